"""python -m tests.soak.cluster.group_member ADDRESS FILE: a member of the group of consumers.

Effects, positions and the epoch of each partition are in one SQLite file, so a transaction of a
member whose epoch is gone is refused (docs/consumers.md, "Groups that live").

An effect is a row with a partition and a seqno. Each seqno has one at most: a change that had its
effect twice breaks the table's primary key, and ends the member. Each has one at least: within a
history, which has every version, the next change has the next seqno. What is passed over outside of
a history, where only newest versions come, is noted.

The member leaves the group when its standard input ends.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import sys
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

from clients.checkpoint.checkpoint import Checkpoint, decode_position, encode_position
from clients.consumer.batch_reader import Delivery
from clients.consumer.group_member import GroupMember, Share
from clients.consumer.options import ConsumerOptions
from clients.errors import TRANSIENT, EpochGoneError, NotMyVbucketError
from clients.event import (
    Deletion,
    Event,
    Mutation,
    Rollback,
    SeqnoAdvanced,
    SnapshotStart,
    StreamOpened,
    SystemEvent,
)
from dcp.wire.message import MarkerFlag
from vbucket.model.consumer_documents import OWN_PREFIX

GROUP: Final = "sinks"
LEASE_S: Final = 5.0
"""Longer than the default: on an overloaded machine members that live would be taken for dead."""
RETRY_S: Final = 0.2
"""Pause before a member asks again to join, while nobody leads the group's partition."""
OPTIONS: Final = ConsumerOptions(history=True, validate=True)
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS fence (vb INTEGER PRIMARY KEY, epoch INTEGER, position BLOB);
CREATE TABLE IF NOT EXISTS effect
    (vb INTEGER, seqno INTEGER, key BLOB, value BLOB, PRIMARY KEY (vb, seqno)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS passed (vb INTEGER, after INTEGER, before INTEGER);
"""
_FENCE: Final = """
INSERT INTO fence VALUES (?, ?, NULL)
ON CONFLICT (vb) DO UPDATE SET epoch = excluded.epoch WHERE epoch <= excluded.epoch
"""
_NEWEST: Final = """
SELECT key, value FROM effect AS one WHERE value IS NOT NULL AND seqno =
    (SELECT max(seqno) FROM effect AS other WHERE other.vb = one.vb AND other.key = one.key)
"""
LOCK_S: Final = 60.0
"""Longest wait for the transaction of another member, which may be frozen in the middle of it."""


class GapError(Exception):
    """A change is missing: the text says which."""


class GroupSink:
    """The file of all members; see the module."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, timeout=LOCK_S, isolation_level=None)
        self._db.execute("PRAGMA synchronous = OFF")  # processes are killed, and no power is cut
        self._db.executescript(_TABLES)
        self._db.execute("CREATE INDEX IF NOT EXISTS by_key ON effect (vb, key, seqno)")
        self._at: dict[int, int] = {}
        """Partition -> the last seqno of the stream."""
        self._histories: dict[int, bool] = {}
        """Partition -> whether the snapshot that is open has every version."""

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    # -- as a member -------------------------------------------------------------------------------

    def begin(self, share: Share) -> Checkpoint:
        """Fence the older epochs of a share; return where it begins. Raises EpochGoneError."""
        with self._db:
            self._fence(share.epoch, share.vbuckets)
            positions = self.positions()
        return {vb_id: positions[vb_id] for vb_id in share.vbuckets if vb_id in positions}

    def take(self, share: Share, delivery: Delivery) -> None:
        """Store effects and positions, in one transaction. Raises EpochGoneError, GapError,
        sqlite3.IntegrityError.
        """
        events, positions = delivery
        with self._db:
            self._fence(share.epoch, positions)
            for event in events:
                self._apply(event)
            self._db.executemany(
                "UPDATE fence SET position = ? WHERE vb = ?",
                [(encode_position(place), vb_id) for vb_id, place in positions.items()],
            )

    def _fence(self, epoch: int, vb_ids: Iterable[int]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        for vb_id in vb_ids:
            if not self._db.execute(_FENCE, (vb_id, epoch)).rowcount:
                raise EpochGoneError(f"epoch {epoch} is gone: partition {vb_id} has a later one")

    def _apply(self, event: Event) -> None:
        vb_id = event.vb_id
        match event:
            case StreamOpened():
                self._at[vb_id] = event.start_seqno
            case SnapshotStart():
                self._histories[vb_id] = bool(event.flags & MarkerFlag.HISTORY)
            case Mutation() | Deletion():
                self._move(vb_id, event.seqno)
                value = event.value if isinstance(event, Mutation) else None
                row = (vb_id, event.seqno, event.key, value)
                self._db.execute("INSERT INTO effect VALUES (?, ?, ?, ?)", row)
            case SeqnoAdvanced() | SystemEvent():
                self._pass(vb_id, event.seqno + 1)
                self._at[vb_id] = event.seqno
            case Rollback():
                self._undo(vb_id, event.to_seqno)

    def _move(self, vb_id: int, seqno: int) -> None:
        """Go on to a change. Raises GapError."""
        before = self._at[vb_id]
        if seqno != before + 1:
            if self._histories[vb_id]:
                raise GapError(f"seqno {seqno} of partition {vb_id} follows {before} in a history")
            self._pass(vb_id, seqno)
        self._at[vb_id] = seqno

    def _pass(self, vb_id: int, seqno: int) -> None:
        """Note that nothing comes of the seqnos before this one."""
        self._db.execute("INSERT INTO passed VALUES (?, ?, ?)", (vb_id, self._at[vb_id], seqno))

    def _undo(self, vb_id: int, seqno: int) -> None:
        self._db.execute("DELETE FROM effect WHERE vb = ? AND seqno > ?", (vb_id, seqno))
        self._db.execute("DELETE FROM passed WHERE vb = ? AND after >= ?", (vb_id, seqno))
        self._db.execute(
            "UPDATE passed SET before = ? WHERE vb = ? AND before > ?", (seqno + 1, vb_id, seqno)
        )

    # -- what the file has -------------------------------------------------------------------------

    def positions(self) -> Checkpoint:
        """Return the position of each partition that has one."""
        rows = self._db.execute("SELECT vb, position FROM fence WHERE position IS NOT NULL")
        return {vb_id: decode_position(raw) for vb_id, raw in rows}

    def epoch(self) -> int:
        """Return the newest epoch that a partition was fenced with."""
        return int(self._db.execute("SELECT coalesce(max(epoch), 0) FROM fence").fetchone()[0])

    def documents(self) -> dict[bytes, bytes]:
        """Return what the effects have made."""
        found = dict(self._db.execute(_NEWEST))
        return {key: value for key, value in found.items() if not key.startswith(OWN_PREFIX)}

    def effects(self) -> int:
        """Return how many changes had their effect."""
        return int(self._db.execute("SELECT count(*) FROM effect").fetchone()[0])

    def unaccounted(self) -> dict[int, int]:
        """Return how many changes up to its position have no effect, by partition; 0 is left out.
        Less than 0: there are more effects than changes.
        """
        effects = dict(self._db.execute("SELECT vb, count(*) FROM effect GROUP BY vb"))
        passed = "SELECT vb, sum(before - after - 1) FROM passed GROUP BY vb"
        left = dict(self._db.execute(passed))
        lacking = {
            vb_id: place.seqno - effects.get(vb_id, 0) - left.get(vb_id, 0)
            for vb_id, place in self.positions().items()
        }
        return {vb_id: count for vb_id, count in lacking.items() if count}


async def follow(address: str, path: Path) -> None:
    """Join as soon as the group's partition has a master; take part until the input ends."""
    sink = GroupSink(path)
    async with AsyncExitStack() as stack:
        while True:
            member = GroupMember(address, GROUP, OPTIONS, lease_s=LEASE_S)
            try:
                await stack.enter_async_context(member)
                break
            except (NotMyVbucketError, *TRANSIENT) as error:
                print(f"not a member yet: {error}", file=sys.stderr, flush=True)
                await asyncio.sleep(RETRY_S)
        await member.run(sink.begin, sink.take)


async def main(address: str, path: Path) -> None:
    """Follow until the standard input ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    following = asyncio.create_task(follow(address, path))
    ended = asyncio.create_task(reader.read())
    await asyncio.wait({following, ended}, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    if following.done():
        following.result()
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
