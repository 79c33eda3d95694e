"""From changes in memory to answers: in which order groups are taken, written and published.
Sans-IO.

    next_job() -> job      what the log has to do next; None: nothing, or a job is under way
    done(job)              the log has done it: commits, wakes streams; returns what the shell does

Who calls it: the committer (dcp.server.storage.committer) runs the jobs on a thread or on the loop.
A node in memory and the simulators run them at once. The rules are here, so all have the same ones.

Invariants
- one job at a time. A job that fails because the disk is full is repeated with the same bytes
  before any other; after any other failure the node ends;
- the memtable is frozen only when a group is taken, and the log begins its next segment before the
  next group: then the frozen layer is exactly what the sealed segments hold;
- a group that branches a partition's history is synced with any durability: its failover log goes
  into the store next, and the store must not know versions that the log can lose;
- while groups are held (STOP_PERSISTENCE, for tests), none is taken, so nothing is frozen either;
- streams see a partition's changes, its new version and its new state after they are committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple

from dcp.stream.hub import StreamHub
from dcp.wire.message import EndReason
from vbucket.engine.engine import Engine
from vbucket.log.commit_group import CommitGroup

EndReasons = dict[int, EndReason]
"""By partition: why its streams end at its next branch, if not with ROLLBACK."""


class WriteGroup(NamedTuple):
    """Append a group to the log, and sync it if `is_synced`."""

    group: CommitGroup
    is_synced: bool
    rotates: bool
    """Whether the log begins a new segment next."""


class LogTask(Enum):
    """A job without a group."""

    ROTATE = auto()
    """Begin a new segment."""
    SYNC = auto()
    """Sync what was appended."""


Job = WriteGroup | LogTask


class Published(NamedTuple):
    """What a job or a commit has made visible."""

    group: CommitGroup | None = None
    """The group that is in the log now."""
    branched: tuple[int, ...] = ()
    """Partitions whose new version is committed: write their failover logs into the store."""
    vb_ids: tuple[int, ...] = ()
    """Partitions that committed later than their group was synced."""


class GroupCycle:
    """See the module. `syncs_groups`: durability `commit`."""

    def __init__(self, engine: Engine, hub: StreamHub, *, syncs_groups: bool) -> None:
        self._keyspace = engine.keyspace
        self._commits = engine.commits
        self.hub = hub
        self._syncs_groups = syncs_groups
        self.job: Job | None = None
        """The job under way."""
        self._must_rotate = False
        self._must_sync = False
        self._branched: dict[int, int] = {}
        """Partitions with a new version -> the group that must be committed before streams see
        it."""
        self._restated: dict[int, int] = {}
        """The same for a new state."""
        self.end_reasons: EndReasons = {}
        self.is_synced = True
        """Whether everything in the log is on disk."""

    @property
    def has_work(self) -> bool:
        """Whether a job is under way or will be next."""
        return (
            self.job is not None
            or self._must_rotate
            or self._must_sync
            or (self._keyspace.has_pending and not self._keyspace.holds_groups)
        )

    @property
    def next_is_group(self) -> bool:
        """Whether the next job is a group of changes."""
        is_free = self.job is None and not (self._must_rotate or self._must_sync)
        has_group = self._keyspace.has_pending and not self._keyspace.holds_groups
        return is_free and has_group

    def next_job(self) -> Job | None:
        """Return what the log has to do next; it is under way until `done`."""
        if self.job is not None:
            return None
        if self._must_rotate:
            self._must_rotate = False
            self.job = LogTask.ROTATE
        elif self._must_sync:
            self._must_sync = False
            self.job = LogTask.SYNC
        else:
            group = None if self._keyspace.holds_groups else self._keyspace.take_group()
            if group is None:
                return None
            rotates = self._keyspace.memtables.wants_freeze
            if rotates:
                self._keyspace.freeze()
            self.job = WriteGroup(group, self._syncs_groups or bool(group.branched), rotates)
        return self.job

    def begin_merge(self) -> None:
        """Have a merge begin with everything applied so far, changes that are not taken included.
        No other merge may be running.
        """
        if self._keyspace.has_pending or self.job is not None:
            self._keyspace.merge_soon()
        else:
            self._keyspace.freeze()
            self._must_rotate = True

    def sync_soon(self) -> None:
        """Have the log synced before the next group (durability `interval`), if it is not."""
        self._must_sync = not self.is_synced

    def done(self, job: Job) -> Published:
        """Take note that the log has done the job under way; publish what that commits."""
        assert job is self.job, "jobs are done one at a time"
        self.job = None
        if job is LogTask.ROTATE:
            self._keyspace.note_watermarks()
            return Published()
        if job is LogTask.SYNC:
            self.is_synced = True
            self._commits.all_synced()
            return Published()
        assert isinstance(job, WriteGroup)
        group = job.group
        self.is_synced = job.is_synced
        self._must_rotate = job.rotates
        self._keyspace.group_synced(group, is_on_disk=job.is_synced)
        for vb_id in group.branched:
            self._branched[vb_id] = group.number
        for vb_id in group.restated:
            self._restated[vb_id] = group.number
        return Published(group, self._publish(group.high_seqnos))

    def committed(self, vb_ids: Iterable[int]) -> Published:
        """Publish what `Commits.commit` has committed in these partitions."""
        self._commits.settle()
        vb_ids = tuple(vb_ids)
        return Published(None, self._publish(vb_ids), vb_ids)

    def _publish(self, vb_ids: Iterable[int]) -> tuple[int, ...]:
        """Show streams what is committed in these partitions; return those with a new version."""
        is_committed, hub = self._commits.is_committed, self.hub
        branched = tuple(
            vb_id for vb_id, group in self._branched.items() if is_committed(vb_id, group)
        )
        for vb_id in branched:
            del self._branched[vb_id]
            hub.branched(vb_id, self.end_reasons.pop(vb_id, EndReason.ROLLBACK))
        for vb_id, group in tuple(self._restated.items()):
            if is_committed(vb_id, group):
                del self._restated[vb_id]
                hub.restated(vb_id)
        hub.committed(vb_ids)
        return branched
