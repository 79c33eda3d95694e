"""A member's log is damaged, and no checksum proves what it was: may the start give the rest up?

It may, as `--accept-log-loss` does, while this member is in no in-sync set. Then each change that
was answered is on the disks of others, and the masters bring what this copy lacks. Masters leave
out a member that is down, so this is a matter of seconds, unless nobody else has what it has.

Who calls it: the start of a node (`dcp.server.node`), when recovery refuses the log.

Invariants
- nothing is given up on the word of a metadata store that is older than what this folder has seen
  (`seen.json`), that lacks a partition's record, or that does not answer;
- the member has been in no in-sync set for a lease time: what a master asked of the store while
  this member ran is decided by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from dcp.server.cluster.cluster_file import ClusterFile, read_cluster_file
from dcp.server.cluster.joining.enrolment import EnrolmentError, ask_again
from dcp.server.cluster.meta_access import MetaAccess, MetaAccessError, MetaUrlError
from dcp.server.cluster.seen_file import SEEN_FILE, read_seen
from dcp.server.config.settings import Settings
from dcp.server.observe.event_log import EventLog
from dcp.server.storage.folder import FolderError
from dcp.server.storage.opening import stored_node
from failover.coordinator.records import (
    ClusterKeys,
    KeyKind,
    RecordUnreadableError,
    decode_partition,
)
from failover.coordinator.seen_records import SeenRecords
from failover.coordinator.view import Stored
from failover.metadata.metastore import MetaStore, Range, RangeResult
from vbucket.log.record import LogDamagedError

WAIT_LEASES: Final = 10
"""So many lease times a start waits for the masters to leave this member out."""
LOOK_S: Final = 0.25


class LogCopies(NamedTuple):
    """What a member has copies of, and what its folder has seen of their records."""

    member: str
    partitions: int
    keys: ClusterKeys
    seen: SeenRecords


OpenMeta = Callable[[ClusterFile], MetaAccess]
"""Opens another metadata store than the one that the folder names."""


async def until_log_may_be_given_up(
    data_dir: Path,
    settings: Settings,
    damage: LogDamagedError,
    log: EventLog,
    open_meta: OpenMeta | None = None,
) -> None:
    """Return when the start may give up the rest of this member's log. Raises LogDamagedError, with
    the reason why it may not.
    """
    try:
        identity = read_cluster_file(data_dir)
        if identity is None:
            raise damage
        keys = ClusterKeys(identity.root)
        seen = SeenRecords(keys, read_seen(data_dir / SEEN_FILE, identity.cluster))
        node = stored_node(data_dir, settings)
        copies = LogCopies(node.node_id, node.partitions, keys, seen)
        log.error(
            "the log is damaged: waiting until no in-sync set has this node", reason=str(damage),
            seconds_at_most=WAIT_LEASES * settings.lease_s,
        )  # fmt: skip
        access = (
            open_meta(identity)
            if open_meta is not None
            else await MetaAccess.open(identity, data_dir, log)
        )
    except (OSError, ValueError, FolderError, MetaAccessError, MetaUrlError) as error:
        raise _refused(damage, str(error)) from error
    try:
        why_not = await until_left_out(access.meta, copies, settings.lease_s)
    finally:
        await access.close()
    if why_not:
        raise _refused(damage, why_not)
    log.error("the rest of the damaged log is given up: masters bring what it had")


class Looks:
    """Decides from looks at the records whether a member was left out for long enough. Pure."""

    def __init__(self, lease_s: float, now_s: float) -> None:
        self._lease_s = lease_s
        self._until_s = now_s + WAIT_LEASES * lease_s
        self._out_since_s: float | None = None

    def take(self, needs: str, now_s: float) -> str | None:
        """Take what needs the member now; "": nothing. Return "" if it was left out for a lease
        time, what still needs it if the time is over, None to look again.
        """
        if needs:
            self._out_since_s = None
            return needs if now_s >= self._until_s else None
        if self._out_since_s is None:
            self._out_since_s = now_s
        return "" if now_s - self._out_since_s >= self._lease_s else None


async def until_left_out(meta: MetaStore, copies: LogCopies, lease_s: float) -> str:
    """Wait until a member has been in no in-sync set for a lease time. Return "", or what still
    needs it when the time is over.
    """
    loop = asyncio.get_running_loop()
    looks = Looks(lease_s, loop.time())
    while True:
        try:
            needs = await _what_needs(meta, copies)
        except (EnrolmentError, RecordUnreadableError) as error:
            return str(error)
        said = looks.take(needs, loop.time())
        if said is not None:
            return said
        await asyncio.sleep(LOOK_S)


async def _what_needs(meta: MetaStore, copies: LogCopies) -> str:
    """Return why a member cannot be done without now, "" if it can. Raises EnrolmentError,
    RecordUnreadableError.
    """
    prefix = copies.keys.of_partitions(KeyKind.PARTITION)
    found = await ask_again(meta, Range(prefix, is_prefix=True))
    if not isinstance(found, RangeResult):
        return f"the metadata store does not answer: {found}"
    in_sync: list[int] = []
    for item in found.items:
        key, stored = copies.keys.parse(item.key), decode_partition(item)
        assert key is not None, "it has the prefix of partitions"
        if not copies.seen.note_partition(key.vb_id, Stored(stored, item)):
            return f"the metadata store has an older record of partition {key.vb_id} than was seen"
        if copies.member in stored.record.isr:
            in_sync.append(key.vb_id)
    if in_sync:
        return (
            f"{len(in_sync)} of its partitions are in sync here, and their masters do not leave it "
            f"out (the first is {in_sync[0]})"
        )
    if len(found.items) < copies.partitions or not found.items:
        return f"the metadata store has records of {len(found.items)} partitions only"
    return ""


def _refused(damage: LogDamagedError, why: str) -> LogDamagedError:
    return LogDamagedError(
        f"{damage}. A member gives up the rest of its log by itself if the other copies do without "
        f"it, but here {why}"
    )
