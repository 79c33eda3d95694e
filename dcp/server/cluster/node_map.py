"""The partition map that a node tells its clients, made from its view of the metadata store.

The map's version is the life of the cluster, and the newest mod revision of what the map is made of
(`failover.coordinator.map_life`). It is made only when the view has come that far, so that the same
version is the same map on every node. A node that was read ahead of the watch, for example after
its own write, tells the former map for a few milliseconds.

Clients are told the first change at once, and further ones apart. An election changes hundreds of
records, and a handover one after the other; telling each of them would cost more than the changes.
Writers wait for the first one.

Nobody waits for a map in which only replicas have changed. Copies that move change hundreds of
records one after the other, for minutes, and each map costs every node some milliseconds of its
event loop, and every client as much. So these are told further apart.

Who calls it: `dcp.server.cluster.replicated_node`.

Invariants
- an urgent change is told within `MAP_S`, any other one within `REPLICAS_S`;
- a change stays urgent until a map was told: this node may know its record before it may tell it.

The file map.json of the folder has the version of the newest map that this node has told clients.
By it a node that starts knows that the metadata store was set back, and raises the life of the
cluster there (`failover.coordinator.map_life`). The file is written KEEP_S after the last time at
most, beside everything else: a store that is restored from a copy that is not older than that is
not recognised. A folder without the file has told nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from dcp.server.files.kept_twice import read_kept, write_kept
from dcp.server.net.cluster_config import ClusterConfig
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.housekeeping import Tasks
from failover.coordinator.map_life import NEVER_SENT, MapLife, MapVersion
from failover.coordinator.records import MemberRecord
from failover.coordinator.view import ClusterView, bucket_map
from failover.metadata.metastore import MetaStore, StoreResult
from vbucket.model.partition_map import MapNode


class MapShown:
    """See the module. `life` says which versions may be told."""

    def __init__(
        self,
        view: ClusterView,
        life: MapLife,
        config: ClusterConfig,
        cluster: str,
        own: MemberRecord,
    ) -> None:
        self._view = view
        self._life = life
        self._config = config
        self._cluster = cluster
        self._own = own
        self.version = NEVER_SENT
        """What clients were told last."""
        self._masters: dict[int, str | None] = {}
        self._members: dict[str, MemberRecord] = {}
        """What it said: partition -> its master, and the nodes."""

    def is_urgent(self, vb_ids: Iterable[int]) -> bool:
        """Return whether clients have to know soon of changes of these partitions: one has another
        master than they were told, or a node another address, or all maps begin anew.
        """
        told, partitions = self._masters, self._view.partitions
        for vb_id in vb_ids:
            stored = partitions.get(vb_id)
            if stored is None or stored.content.record.master != told.get(vb_id):
                return True
        is_same_life = self._life.version().life == self.version.life
        return not is_same_life or self._members != self._members_now()

    def _members_now(self) -> dict[str, MemberRecord]:
        members = {name: stored.content for name, stored in self._view.members.items()}
        members.setdefault(self._own.member, self._own)
        return members

    def update(self) -> bool:
        """Tell clients the newest map; return whether it is a newer one."""
        view, version = self._view, self._life.version()
        if version <= self.version or not self._life.may_tell(version):
            return False
        if view.is_loaded and view.revision < version.rev:
            return False
        self._members = self._members_now()
        self._masters = {
            vb_id: stored.content.record.master for vb_id, stored in view.partitions.items()
        }
        shown = bucket_map(
            view, self._config.num_vbuckets, self._own.member, _nodes(self._members),
            rev=version.rev, rev_epoch=version.life,
        )  # fmt: skip
        self._config.show(shown, self._cluster)
        self.version = version
        self._life.note_told(version)
        return True


def _nodes(members: dict[str, MemberRecord]) -> dict[str, MapNode]:
    """Return the nodes with their hosts, on loopback too: clients of the Java world refuse a map in
    which a node other than the one that they asked has none.
    """
    return {
        name: MapNode(
            *host_and_port(record.address), record.admin_port,
            record.kv_tls_port, record.admin_tls_port, record.rack,
        )
        for name, record in members.items()
    }  # fmt: skip


def tls_address_of(record: MemberRecord) -> str:
    """Return HOST:PORT of a node's key-value port with TLS; "": it has none."""
    host, _, _port = record.address.rpartition(":")
    return f"{host}:{record.kv_tls_port}" if record.kv_tls_port else ""


def host_and_port(address: str) -> tuple[str, int]:
    """Split HOST:PORT, with brackets around an IPv6 address."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


MAP_S: Final = 0.01
"""Time between two maps."""
REPLICAS_S: Final = 1.0
"""The same if only replicas have changed. Clients read from them if a master does not answer, and
are sent on by a node that has no copy any more."""


class MapPace:
    """See the module. `show` looks at the map, and tells it if it is another one than before."""

    def __init__(self, clock: asyncio.AbstractEventLoop, show: Callable[[], None]) -> None:
        self._clock = clock
        self._show = show
        self._timer: asyncio.TimerHandle | None = None
        self._told_s = -REPLICAS_S
        """When a map was told last."""
        self._is_urgent = False
        """Whether an urgent change is not told yet."""
        self._look_s = 0.0
        """When the map is looked at, if there is a timer."""

    def changed(self, *, is_urgent: bool) -> None:
        """A record has changed. Urgent: clients would go to the wrong node."""
        self._is_urgent |= is_urgent
        due_s = self._told_s + (MAP_S if self._is_urgent else REPLICAS_S)
        if self._timer is not None:
            if self._look_s <= due_s:
                return
            self._timer.cancel()
        self._look_s = due_s
        self._timer = self._clock.call_at(due_s, self._look)

    def cancel(self) -> None:
        """Tell nothing more: the node stops."""
        if self._timer is not None:
            self._timer.cancel()

    def told(self) -> None:
        """Another map is being told: the next one has time."""
        self._told_s, self._is_urgent = self._clock.time(), False

    def _look(self) -> None:
        self._timer = None
        self._show()


HEARD_NS: Final = 3_000_000_000
"""How long the life has to be raised before it is: nodes that have seen newer records say so within
a second or two."""
RETRY_NS: Final = 1_000_000_000
"""Time between attempts."""


class RaisedLife:
    """See the module."""

    def __init__(self, life: MapLife, meta: MetaStore) -> None:
        self._life = life
        self._meta = meta
        self._next_ns = self._due_since_ns = 0

    def tick(self, now_ns: int, unix_s: float) -> None:
        """Let time pass: raise the life if that is due. `unix_s` is the wall clock."""
        if now_ns < self._next_ns:
            return
        txn = self._life.raising(unix_s)
        if txn is None:
            self._due_since_ns = 0
            return
        self._due_since_ns = self._due_since_ns or now_ns
        if now_ns - self._due_since_ns >= HEARD_NS:
            self._next_ns = now_ns + RETRY_NS
            self._meta.submit(txn, _decided)


def _decided(_result: StoreResult) -> None:
    """Do nothing: the view shows whether it was written."""


FORMAT: Final = 1
MAP_FILE: Final = "map.json"
KEEP_S: Final = 1.0
"""Time between two writes: elections and handovers make many maps a second."""
_ADVICE: Final = "Without it, this node does not notice a metadata store that was set back"


class MapContent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file says."""

    format: int = FORMAT
    cluster: str
    """The cluster's id: a folder may get another cluster's file."""
    life: int
    rev: int


def read_sent_map(data_dir: Path) -> MapContent | None:
    """Return what the file of a folder says; None: there is none. Raises OSError,
    msgspec.DecodeError.
    """
    try:
        return msgspec.json.decode(read_kept(data_dir / MAP_FILE).content, type=MapContent)
    except FileNotFoundError:
        return None


class SentMap:
    """See the module. Lives on one event loop."""

    def __init__(
        self, data_dir: Path, cluster: str, tasks: Tasks, log: EventLog, keep_s: float = KEEP_S
    ) -> None:
        """Read what the folder has. A file that cannot be read is told, and counts as none."""
        self._path = data_dir / MAP_FILE
        self._cluster = cluster
        self._tasks = tasks
        self._log = log
        self._keep_s = keep_s
        self._kept = self._newest = self._read()
        self._writing = threading.Lock()
        self._on_disk = self._kept
        """What the file has; only while `_writing` is held."""
        self._is_keeping = False
        self._has_failed = False

    @property
    def version(self) -> MapVersion:
        """The newest one."""
        return self._newest

    def _read(self) -> MapVersion:
        try:
            content = read_sent_map(self._path.parent)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._log.warning(f"{self._path} cannot be read. {_ADVICE}", reason=str(error))
            return NEVER_SENT
        if content is None or content.format != FORMAT or content.cluster != self._cluster:
            return NEVER_SENT
        return MapVersion(content.life, content.rev)

    def note(self, version: MapVersion) -> None:
        """Clients are told this version."""
        self._newest = max(self._newest, version)
        if self._newest != self._kept and not self._is_keeping:
            self._is_keeping = True
            self._tasks.begin(self._keep())

    async def _keep(self) -> None:
        """Write until the newest one is on disk."""
        while self._newest != self._kept:
            version = self._newest
            self._written(version, await asyncio.to_thread(self._write, version))
            await asyncio.sleep(self._keep_s)
        self._is_keeping = False

    def _write(self, version: MapVersion) -> str:
        """Write a version, unless the file has it or a newer one; return why that failed, or ""."""
        content = MapContent(cluster=self._cluster, life=version.life, rev=version.rev)
        with self._writing:
            if version <= self._on_disk:
                return ""
            try:
                write_kept(self._path, msgspec.json.encode(content) + b"\n")
            except OSError as error:
                return str(error)
            self._on_disk = version
        return ""

    def _written(self, version: MapVersion, why_not: str) -> None:
        if why_not and not self._has_failed:  # it is tried again
            self._log.warning(f"{self._path} cannot be written. {_ADVICE}", reason=why_not)
        self._has_failed = bool(why_not)
        if not why_not:
            self._kept = version

    def finish(self) -> None:
        """Write the newest one at the end of the process, after a write that is under way."""
        if self._newest != self._kept:
            self._written(self._newest, self._write(self._newest))


class NodeMap:
    """The map of a node of a cluster: what it is, what was told, and when the next one is told."""

    shown: MapShown

    def __init__(self, view: ClusterView, meta: MetaStore, sent: SentMap, pace: MapPace) -> None:
        self._view = view
        self.sent = sent
        self.life = MapLife(view, sent.version)
        self.raised = RaisedLife(self.life, meta)
        self._pace = pace

    def begin(self, config: ClusterConfig, cluster: str, own: MemberRecord) -> None:
        """Tell clients that this node exists; `own` is its own record."""
        self.shown = MapShown(self._view, self.life, config, cluster, own)
        self.shown.update()

    def changed(self, vb_ids: Iterable[int]) -> None:
        """The records of these partitions have changed."""
        self._pace.changed(is_urgent=self.shown.is_urgent(vb_ids))

    def update(self) -> bool:
        """Make the newest map, if it is another one than before; return whether to tell it."""
        is_new = self.shown.update()
        if is_new:
            self.sent.note(self.shown.version)
            self._pace.told()
        return is_new

    def stop(self) -> None:
        """Tell nothing more, and write down what was told."""
        self._pace.cancel()
        self.sent.finish()
