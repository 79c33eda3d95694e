"""A step of this node on the way to another secret of the cluster: `dcpctl cluster secret`.

    the cluster's record, if another secret is used ── cluster.json ── keyring ── logins of nodes

The steps, and why they shut nobody out, are in `failover.metadata.keyring`. Open links stay open.

Invariant: what this node uses and accepts is in cluster.json before it counts.
"""

from __future__ import annotations

import asyncio
from typing import Final

from msgspec.structs import replace

from dcp.server.cluster.cluster_file import ClusterRefusedError, write_cluster_file
from dcp.server.cluster.joining.becoming_member import NewMember
from dcp.server.cluster.joining.enrolment import ask_again
from dcp.server.cluster.replicated_node import ReplicatedNode
from dcp.server.operate.cluster_requests import SecretsReport, SecretsRequest
from failover.coordinator.records import ClusterRecord, decode_record, encode_record
from failover.metadata.keyring import KeyringError
from failover.metadata.metastore import Put, Range, RangeResult, Txn, if_unchanged

TRIES_MAX: Final = 5
"""How often the cluster's record is written anew that somebody else has changed."""


async def change_secrets(
    replicated: ReplicatedNode, node: NewMember, asked: SecretsRequest
) -> SecretsReport:
    """Take a step, or only return the secrets. Raises ClusterRefusedError."""
    keyring = replicated.access.keyring
    if asked.secrets:
        try:
            with keyring.step(asked.secrets):
                content = replicated.identity.with_secrets(asked.secrets)
                if content.secret != keyring.in_use:
                    await _announce(replicated, content.secret_proof)
                await asyncio.to_thread(write_cluster_file, node.data_dir, content)
        except KeyringError as error:
            raise ClusterRefusedError(str(error)) from error
        except OSError as error:
            raise ClusterRefusedError(
                f"cluster.json cannot be written: {error.strerror}", "Mend that, and try again"
            ) from error
        replicated.identity = content
        node.users.let_cluster_in(keyring.secrets)
    return SecretsReport(replicated.identity.name, list(keyring.secrets))


async def _announce(replicated: ReplicatedNode, proof: str) -> None:
    """Let nobody join with a token of before. Raises ClusterRefusedError."""
    meta, key = replicated.access.meta, replicated.session.view.keys.cluster
    for _ in range(TRIES_MAX):
        found = await ask_again(meta, Range(key))
        if not isinstance(found, RangeResult) or not found.items:
            break
        record = decode_record(found.items[0], ClusterRecord)
        if record.secret_proof == proof:
            return
        changed = Put(key, encode_record(replace(record, secret_proof=proof)))
        await ask_again(meta, Txn((if_unchanged(key, found.items[0].mod_revision),), (changed,)))
    raise ClusterRefusedError(
        "the cluster's record in the metadata store could not be written",
        "Look at `dcpctl cluster status`, and try again",
    )
