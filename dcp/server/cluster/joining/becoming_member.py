"""A process becomes a member, or goes on as the one that its folder is.

A command on a running node makes it a member, or settings at its start do. The node runs alone
until its folder has cluster.json. Who calls it restarts the node then, or goes on with its start.

The settings `cluster` and `cluster_token_file` make a node a member before it listens, so that it
never takes a write of its own. Once the folder has cluster.json, they say nothing new: only a token
file that is missing is written again, because nodes that join may wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from dcp.server.access.access import Access
from dcp.server.access.users import Users
from dcp.server.access.users_file import replace_file
from dcp.server.cluster.cluster_file import (
    SECRET_BYTES,
    ClusterFile,
    ClusterRefusedError,
    ClusterToken,
    ClusterTokenError,
    begin_incarnation,
    read_cluster_file,
    write_cluster_file,
)
from dcp.server.cluster.joining.enrolment import (
    EnrolmentError,
    NewCluster,
    check_join,
    check_name,
    check_new,
    check_store,
    found_cluster,
    is_pristine,
    join_cluster,
    running_members,
    withdraw,
)
from dcp.server.cluster.joining.founding import begin_founding
from dcp.server.cluster.joining.link_try import PATIENCE_LEASES, LinkRequest, LinkTrial
from dcp.server.cluster.joining.newcomer_door import open_door
from dcp.server.cluster.meta_access import (
    EMBEDDED,
    MetaAccess,
    MetaAccessError,
    MetaPortError,
    MetaUrlError,
    new_store_url,
)
from dcp.server.cluster.node_map import host_and_port
from dcp.server.cluster.replicated_node import ReplicatedNode, ReplicationChoices, ServerParts
from dcp.server.config.settings import Settings
from dcp.server.config.sources import is_loopback
from dcp.server.files.kept_twice import is_kept, remove_kept
from dcp.server.net.cluster_config import Ports
from dcp.server.net.fixed_port import PortTakenError
from dcp.server.observe.event_log import EventLog
from dcp.server.storage.folder import CLUSTER_FILE, FolderError
from failover.coordinator.map_life import life_from
from failover.coordinator.records import MemberRecord
from failover.metadata.metastore import MetaStore
from vbucket.engine.engine import Engine

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


CLUSTER_ID_BYTES = 16
TOKEN_WAIT_S: Final = 30.0
"""How long a node that joins waits for its token file."""
TOKEN_LOOK_S: Final = 0.02
Gate = AbstractAsyncContextManager[None]
"""Entered before anything is checked that changes could make wrong (EnrolmentGate)."""
_NOBODY_CHANGES: Gate = nullcontext()
"""Of a node that does not listen yet."""
_RANDOM: random.Random = random.SystemRandom()
_RESTARTS: Final = "the node restarts: its connections end, and it serves again in about a second"


class NewMember(NamedTuple):
    """A node that becomes a member."""

    engine: Engine
    member: str
    """The id of its data folder."""
    data_dir: Path
    settings: Settings
    ports: Ports
    users: Users
    access: Access
    log: EventLog

    def name_or(self, name: str) -> str:
        """Return the node's name: the one given, that of the settings, or one of its id."""
        return name or self.settings.node_name or f"node-{self.member[:8]}"

    def record(self, name: str, rack: str) -> MemberRecord:
        """Return the record of the member. Its start corrects ports that are not known yet."""
        ports = self.ports
        return MemberRecord(
            member=self.member, address=address_of(self.settings, ports.kv or self.settings.port),
            name=name, rack=rack, admin_port=ports.admin, kv_tls_port=ports.kv_tls,
            admin_tls_port=ports.admin_tls,
        )  # fmt: skip


async def init_cluster(
    newcomer: NewMember,
    wanted: NewCluster,
    *,
    meta: str = EMBEDDED,
    name: str = "",
    rack: str = "",
    gate: Gate = _NOBODY_CHANGES,
    draw: random.Random = _RANDOM,
    unix_s: Callable[[], float] = time.time,
) -> ClusterToken:
    """Make a node with its data the first member of a new cluster. Raises EnrolmentError. `draw`
    chooses the port of an embedded store, `unix_s` is the wall clock.

    After it the gate stays closed; the caller restarts the node.
    """
    content = _content_of_new(newcomer, wanted, meta, name, rack, draw)
    if wanted.nodes > 1 and not is_pristine(newcomer.engine):
        raise EnrolmentError(
            f"the folder {newcomer.data_dir} has data, and a cluster that waits for "
            f"{wanted.nodes} nodes begins with empty folders",
            "Leave --cluster-nodes out: then this node's data is the cluster's",
        )
    async with gate:
        access = await _opened(content, newcomer)
        try:
            record = newcomer.record(content.name, content.rack)
            await found_cluster(
                access.meta,
                content.root,
                newcomer.engine,
                record,
                wanted,
                newcomer.users.text,
                proof=content.secret_proof,
                life=life_from(unix_s()),
            )
        finally:
            await access.close()
        if wanted.nodes > 1:
            _begin_founding(newcomer)
        _write(newcomer.data_dir, content)
    return token_of(content)


def _begin_founding(newcomer: NewMember) -> None:
    """Note that the partitions have no records yet. Raises EnrolmentError."""
    try:
        begin_founding(newcomer.data_dir)
    except OSError as error:
        raise EnrolmentError(
            f"{newcomer.data_dir} cannot be written: {error.strerror}",
            "Check that the disk has room and that the folder is writable, then try again",
        ) from error


async def check_init(
    newcomer: NewMember,
    wanted: NewCluster,
    *,
    meta: str = EMBEDDED,
    name: str = "",
    rack: str = "",
) -> list[str]:
    """Return what an operator should know before `init_cluster`, and change nothing. Raises
    EnrolmentError.
    """
    content = _content_of_new(newcomer, wanted, meta, name, rack, _RANDOM)
    if not content.owns_store:  # its own one it would make
        access = await _opened(content, newcomer)
        try:
            await check_store(access.meta, content.root)
        finally:
            await access.close()
    in_sync = "a majority" if wanted.min_in_sync is None else wanted.min_in_sync
    held = sum(part.item_count for part in newcomer.engine.partitions)
    return [
        f"copies of each partition: {wanted.copies}; in sync for a write: {in_sync}",
        f"its data stays: {held} documents, their versions, users and collections",
        _RESTARTS,
    ]


def _content_of_new(
    newcomer: NewMember, wanted: NewCluster, meta: str, name: str, rack: str, draw: random.Random
) -> ClusterFile:
    check_new(wanted)
    name, rack = newcomer.name_or(name), rack or newcomer.settings.rack or ""
    _check(newcomer, name)
    return ClusterFile(
        cluster=secrets.token_hex(CLUSTER_ID_BYTES), meta=_url_of(meta, draw),
        owns_store=meta == EMBEDDED,
        secret=secrets.token_urlsafe(SECRET_BYTES), name=name, rack=rack,
        min_in_sync=wanted.min_in_sync,
    )  # fmt: skip


async def join_by_token(
    newcomer: NewMember,
    text: str,
    *,
    name: str = "",
    rack: str = "",
    gate: Gate = _NOBODY_CHANGES,
) -> ClusterFile:
    """Make a node one more member. Raises EnrolmentError. The gate: as for `init_cluster`."""
    content = _content_of_token(newcomer, text, name, rack)
    async with gate:
        access = await _opened(content, newcomer)
        try:
            record = newcomer.record(content.name, content.rack)
            await _check_join(newcomer, access.meta, content, record)
            cluster = await join_cluster(
                access.meta, content.root, newcomer.engine, record, proof=content.secret_proof
            )
            content = msgspec.structs.replace(content, min_in_sync=cluster.min_in_sync)
            await _write_or_withdraw(access.meta, newcomer.data_dir, content, record)
        finally:
            await access.close()
    return content


async def check_join_by_token(
    newcomer: NewMember, text: str, *, name: str = "", rack: str = ""
) -> tuple[ClusterFile, list[str]]:
    """Return what the folder would have, and what an operator should know before `join_by_token`;
    change nothing. Raises EnrolmentError.
    """
    content = _content_of_token(newcomer, text, name, rack)
    access = await _opened(content, newcomer)
    try:
        record = newcomer.record(content.name, content.rack)
        await _check_join(newcomer, access.meta, content, record)
    finally:
        await access.close()
    return content, ["its users are those of the cluster from then on", _RESTARTS]


def _content_of_token(newcomer: NewMember, text: str, name: str, rack: str) -> ClusterFile:
    try:
        token = ClusterToken.from_text(text)
    except ClusterTokenError as error:
        raise EnrolmentError(error.why, error.try_this) from None
    name, rack = newcomer.name_or(name), rack or newcomer.settings.rack or ""
    _check(newcomer, name)
    return ClusterFile(
        cluster=token.cluster, meta=token.meta, secret=token.secret, name=name, rack=rack
    )


async def _check_join(
    newcomer: NewMember, meta: MetaStore, content: ClusterFile, record: MemberRecord
) -> None:
    """Check that the node may join, and that it has a link each way to each member that is alive.
    Write nothing. Raises EnrolmentError.
    """
    proof = content.secret_proof
    await check_join(meta, content.root, newcomer.engine, record, proof=proof)
    settings, hosts = newcomer.settings, set[str]()

    async def alive() -> list[MemberRecord]:
        members = await running_members(meta, content.root, record.member)
        hosts.update(host_and_port(member.address)[0] for member in members)
        return members

    door = open_door(newcomer.access, settings, newcomer.ports, content.secret, hosts)
    async with door as ports:
        request = LinkRequest(
            name=content.name, address=address_of(settings, ports.kv),
            tls_address=address_of(settings, ports.kv_tls) if ports.kv_tls else "",
        )  # fmt: skip
        patience_s = PATIENCE_LEASES * settings.lease_s
        trial = LinkTrial(request, content.secret, newcomer.access.link_tls, patience_s)
        await trial.run(alive)


async def _write_or_withdraw(
    meta: MetaStore, data_dir: Path, content: ClusterFile, record: MemberRecord
) -> None:
    """Write cluster.json; without it, take the member's record back. Raises EnrolmentError."""
    try:
        _write(data_dir, content)
    except EnrolmentError:
        with contextlib.suppress(EnrolmentError):  # else the next attempt uses it again
            await withdraw(meta, content.root, record)
        raise


def token_of(content: ClusterFile) -> ClusterToken:
    """Return the token for new members."""
    return ClusterToken(cluster=content.cluster, meta=content.meta, secret=content.secret)


def _check(newcomer: NewMember, name: str) -> None:
    check_name(name)
    try:
        present = read_cluster_file(newcomer.data_dir)
    except FolderError as error:
        raise EnrolmentError(str(error)) from None
    if present is not None:
        raise EnrolmentError(
            f"this node is a member already: {present.name!r} of cluster {present.cluster}",
            "To make it a member of another one, start it with an empty --data folder",
        )
    if refusal := cluster_refusal(newcomer.settings):
        raise EnrolmentError(refusal.why, refusal.try_this)


def _url_of(meta: str, draw: random.Random) -> str:
    """Return the URL of the store; a new embedded one gets a port now."""
    if meta != EMBEDDED:
        return meta
    try:
        return new_store_url(draw)
    except MetaAccessError as error:
        raise EnrolmentError(error.why, error.try_this) from None


async def _opened(content: ClusterFile, newcomer: NewMember) -> MetaAccess:
    try:
        return await MetaAccess.open(content, newcomer.data_dir, newcomer.log)
    except (MetaAccessError, MetaUrlError) as error:
        raise EnrolmentError(error.why, error.try_this) from None


def _write(data_dir: Path, content: ClusterFile) -> None:
    """Write cluster.json. If it is there in spite of an error, the node is a member: the next start
    would be that of one, and give up what the node took until then. Raises EnrolmentError.
    """
    try:
        write_cluster_file(data_dir, content)
    except OSError as error:
        path = data_dir / CLUSTER_FILE
        with contextlib.suppress(OSError):
            remove_kept(path)
        if not is_kept(path):
            raise EnrolmentError(
                f"{path} cannot be written: {error.strerror}",
                "Check that the disk has room and that the folder is writable, then try again",
            ) from error


async def entered(
    newcomer: NewMember, open_meta: Callable[[ClusterFile], MetaAccess] | None = None
) -> tuple[ClusterFile, MetaAccess]:
    """Return what the folder knows of its cluster, and the open metadata store. Raises
    FolderError, PortTakenError.
    """
    if not is_kept(newcomer.data_dir / CLUSTER_FILE):
        try:
            await _enrol(newcomer, newcomer.settings)
        except EnrolmentError as error:
            raise FolderError(f"this node does not become a member: {error}") from error
    identity = begun_identity(newcomer.data_dir, newcomer.settings)
    _write_missing_token(newcomer, identity)
    if open_meta is not None:
        return identity, open_meta(identity)
    try:
        return identity, await MetaAccess.open(identity, newcomer.data_dir, newcomer.log)
    except MetaPortError as error:
        raise PortTakenError(str(error)) from error
    except (MetaAccessError, MetaUrlError) as error:
        raise FolderError(str(error)) from error


async def _enrol(newcomer: NewMember, settings: Settings) -> None:
    if settings.cluster == "init":
        wanted = NewCluster(settings.cluster_copies, None, settings.cluster_nodes)
        token = await init_cluster(newcomer, wanted, meta=settings.cluster_meta)
        if settings.cluster_token_file is not None:
            _write_token(settings.cluster_token_file, token.to_text())
        return
    path = settings.cluster_token_file
    if path is None:
        raise EnrolmentError("--cluster join needs --cluster-token-file, the token of a member")
    await _until_there(path, newcomer.log)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EnrolmentError(f"the token file {path} cannot be read: {error}") from error
    await join_by_token(newcomer, text)


async def _until_there(path: Path, log: EventLog) -> None:
    """Wait for the token file: the node that makes the cluster may start at the same time."""
    loop = asyncio.get_running_loop()
    until_s, is_told = loop.time() + TOKEN_WAIT_S, False
    while not _is_there(path) and loop.time() < until_s:
        if not is_told:
            is_told = True
            log.info("waiting for the token file", path=str(path), seconds_at_most=TOKEN_WAIT_S)
        await asyncio.sleep(TOKEN_LOOK_S)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # reading it says what is wrong


def _write_missing_token(newcomer: NewMember, identity: ClusterFile) -> None:
    """Write the token file of `--cluster init` if it is missing: the start that made the cluster
    could not write it. A member that cannot write it either runs all the same.
    """
    path = newcomer.settings.cluster_token_file
    if newcomer.settings.cluster != "init" or path is None:
        return
    try:
        if not path.exists():
            _write_token(path, token_of(identity).to_text())
    except (EnrolmentError, OSError) as error:
        newcomer.log.error(
            "nodes that join may wait for the token file",
            reason=f"{error}. `dcpctl cluster token` prints the token",
        )


def _write_token(path: Path, text: str) -> None:
    try:
        replace_file(path, text.encode() + b"\n")
    except OSError as error:
        why = f"the token file {path} cannot be written: {error.strerror}"
        raise EnrolmentError(why) from error
