"""A member of a group of consumers that share the partitions, and one SQLite file.

    python examples/demos/cluster_group.py 127.0.0.1:11210 group.sqlite

Start as many as you like, and kill them whenever you like: the others take over. Effects, positions
and the epoch of each partition are in one file, so one transaction fences a member whose epoch is
gone (docs/consumers.md, "Groups that live"). A change that had its effect twice would break the
table's primary key, and end the member.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path

from processes import follow_until_killed
from replica import Replica

from dcpd import (
    Checkpoint,
    ConsumerOptions,
    DcpdError,
    Delivery,
    EpochGoneError,
    GroupMember,
    decode_position,
    encode_position,
)
from dcpd import Share as GroupShare

GROUP = "flights"
RETRY_S = 0.2
"""Pause before a member asks again to join, while nobody leads the group's partition."""
OPTIONS = ConsumerOptions(validate=True)
FENCES = (
    "CREATE TABLE IF NOT EXISTS fence (vb_id INTEGER PRIMARY KEY, epoch INTEGER, position BLOB)"
)
FENCE = """
INSERT INTO fence VALUES (?, ?, NULL)
ON CONFLICT (vb_id) DO UPDATE SET epoch = excluded.epoch WHERE epoch <= excluded.epoch
"""


class GroupFile(Replica):
    """The file of all members: a replica with a position and an epoch for each partition."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._db.execute(FENCES)

    def begin(self, share: GroupShare) -> Checkpoint:
        """Fence the older epochs of a share; return where it begins. Raises EpochGoneError."""
        with self._db:
            self._fence(share.epoch, share.vbuckets)
            positions = self.positions()
        return {vb_id: positions[vb_id] for vb_id in share.vbuckets if vb_id in positions}

    def take(self, share: GroupShare, delivery: Delivery) -> None:
        """Apply events with their positions, in one transaction. Raises EpochGoneError."""
        events, positions = delivery
        rows = [(encode_position(place), vb_id) for vb_id, place in positions.items()]
        with self._db:
            self._fence(share.epoch, positions)
            self.apply(events)
            self._db.executemany("UPDATE fence SET position = ? WHERE vb_id = ?", rows)

    def positions(self) -> Checkpoint:
        """Return the position of each partition that has one."""
        rows = self._db.execute("SELECT vb_id, position FROM fence WHERE position IS NOT NULL")
        return {vb_id: decode_position(raw) for vb_id, raw in rows}

    def epoch(self) -> int:
        """Return the newest epoch that a partition was fenced with."""
        return int(self._db.execute("SELECT coalesce(max(epoch), 0) FROM fence").fetchone()[0])

    def _fence(self, epoch: int, vb_ids: Iterable[int]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        for vb_id in vb_ids:
            if not self._db.execute(FENCE, (vb_id, epoch)).rowcount:
                raise EpochGoneError(f"epoch {epoch} is gone: partition {vb_id} has a later one")


async def follow(server: str, path: Path) -> None:
    """Join as soon as the group's partition has a master, and take part without end."""
    file = GroupFile(path)
    while True:
        member = GroupMember(server, GROUP, OPTIONS)
        try:
            await member.__aenter__()
            break
        except DcpdError as error:
            print(f"not a member yet: {error}", file=sys.stderr, flush=True)
            await asyncio.sleep(RETRY_S)
    try:
        await member.run(file.begin, file.take)
    finally:
        await member.__aexit__(None, None, None)


if __name__ == "__main__":
    help_ = "the SQLite file of all members"
    sys.exit(follow_until_killed("member", __doc__, help_, follow))
