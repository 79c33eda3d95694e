"""Makes the replication of a node from its folder and its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dcp.server.cluster.cluster_file import ClusterFile, begin_incarnation, read_cluster_file
from dcp.server.cluster.cluster_refusal import ClusterRefusedError
from dcp.server.cluster.meta_access import MetaAccess
from dcp.server.cluster.replicated_node import ReplicatedNode, ReplicationChoices, ServerParts
from dcp.server.config.settings import Settings
from dcp.server.config.sources import is_loopback
from dcp.server.net.cluster_config import Ports
from dcp.server.storage.folder import FolderError
from failover.coordinator.records import MemberRecord

_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared, not bound


def cluster_refusal(settings: Settings) -> ClusterRefusedError | None:
    """Return why a node with these settings cannot be in a cluster; None if it can."""
    if settings.durability != "commit":
        return ClusterRefusedError(
            f"durability {settings.durability} is not possible in a cluster, because an answer "
            "must mean that every copy in sync is on disk",
            "Restart this node with --durability commit",
        )
    if (
        settings.tls_only == "on"
        and settings.cluster_tls == "off"
        and not is_loopback(settings.host)
    ):
        return ClusterRefusedError(
            "--tls-only on leaves other nodes no port: nodes connect without TLS",
            "Use --cluster-tls on, or --tls-only off and a network of their own",
        )
    if settings.host in _WILDCARDS and not settings.advertise_host:
        return ClusterRefusedError(
            f"--host {settings.host} is no address that other nodes could use",
            "Say with --advertise-host which one they can",
        )
    return None


def begun_identity(data_dir: Path, settings: Settings) -> ClusterFile:
    """Return what the folder knows of its cluster, with the incarnation of this process. Raises
    FolderError.
    """
    found = read_cluster_file(data_dir)
    assert found is not None, "it is the folder of a member"
    if refusal := cluster_refusal(settings):
        raise FolderError(f"{data_dir} is the folder of a node of a cluster: {refusal}")
    return begin_incarnation(data_dir, found)


def replicated_node(
    parts: ServerParts, member: str, identity: ClusterFile, settings: Settings, access: MetaAccess
) -> ReplicatedNode:
    """Return the replication of a node."""
    choices = ReplicationChoices(
        commit_timeout_ns=int(settings.commit_timeout_s * 1e9),
        acknowledges_as_master=settings.acknowledge == "master",
        replica_lag_max_ns=int(settings.replica_lag_max_s * 1e9),
        beat_ns=int(settings.heartbeat_s * 1e9),
        unheard_ns=int(settings.suspect_after_s * 1e9),
        lease_s=int(settings.lease_s),
        value_bytes_max=settings.value_bytes_max,
        fill_bytes_per_s=settings.rebalance_rate,
    )
    return ReplicatedNode(parts, member, identity, choices, access)


def own_record(replicated: ReplicatedNode, settings: Settings, ports: Ports) -> MemberRecord:
    """Return where this node is reached."""
    return MemberRecord(
        member=replicated.member, address=address_of(settings, ports.kv),
        name=replicated.identity.name, rack=replicated.identity.rack, admin_port=ports.admin,
        kv_tls_port=ports.kv_tls, admin_tls_port=ports.admin_tls,
        owns_store=replicated.identity.owns_store,
    )  # fmt: skip


def address_of(settings: Settings, port: int) -> str:
    """Return HOST:PORT of the key-value port as other nodes use it."""
    host = settings.advertise_host or settings.host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
