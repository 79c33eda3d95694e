"""Named consumers: their saved positions, what is kept for those that are away, and groups.

The admin interface calls it. A node answers for the partitions of which it is the master; `dcpctl
consumer` asks every node. What is kept is a document of each partition (`vbucket.engine.keeps`), so
its copies have it, and the next master has it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from dcp.server.observe.event_log import EventLog
from dcp.server.operate.operations import WritesRefusedError
from dcp.server.operate.reports import Count, UnixTime, VbId
from dcp.server.storage.kept_consumers import KeptConsumers
from dcp.server.storage.waiters import CommitWaiters
from dcp.session.group_command import group_in
from dcp.wire.status import RefusedError
from vbucket.engine.engine import SET, Engine
from vbucket.engine.keeps import KeepState, keeps_of, position_of
from vbucket.engine.partition import Partition, VbState
from vbucket.engine.read_view import Views
from vbucket.model.consumer_documents import (
    CHECKPOINT_PREFIX,
    GROUP_PREFIX,
    KEEPS_MAX,
    Keep,
    checkpoint_of,
    encode_keeps,
    keep_key,
)
from vbucket.model.ids import DEFAULT_COLLECTION_PREFIX, time_ns_from_cas
from vbucket.store.plain_value import plain_value

AT_ONCE: Final = 32
"""Partitions between two turns of the loop."""
COMMIT_WAIT_S: Final = 5.0
"""How long a change waits for its commit in all partitions together."""
_OWNER: Final = "(consumers)"
"""What its read views count for: no user has this name."""
_END: Final = b"\xff" * 251


class SavedConsumer(msgspec.Struct):
    """A consumer by the name of its checkpoint in the server, in the partitions of this node."""

    name: str
    positions: Annotated[Count, Meta(description="Partitions with a saved position.")] = 0
    lag_items: Annotated[Count, Meta(description="Seqnos above these positions.")] = 0
    saved_s: Annotated[UnixTime | None, Meta(description="When it saved a position last.")] = None
    kept_for_s: Annotated[
        float | None,
        Meta(description="How old deletions may get that are kept for it; null: none are kept."),
    ] = None
    kept_bytes: Annotated[
        Count | None, Meta(description="How many bytes of changes it may be behind.")
    ] = None
    states: Annotated[
        dict[str, int],
        Meta(
            description="Partitions that keep deletions for it, by state: kept, ending (a limit is "
            "nearly reached), ended (a purge may pass it), lost (a purge has: it begins at 0)."
        ),
    ] = {}


class LivingGroup(msgspec.Struct):
    """A group of consumers whose members beat, as of its last change (docs/consumers.md)."""

    name: str
    vb: Annotated[VbId, Meta(description="The partition whose master has the members' leases.")]
    epoch: Annotated[Count, Meta(description="Rises with each change of the members.")]
    members: Annotated[
        dict[str, int],
        Meta(
            description="Member -> partitions that it follows. One that died stays until the next"
            " beat of another one."
        ),
    ]


class SavedConsumers(msgspec.Struct):
    """By name."""

    consumers: list[SavedConsumer]
    groups: list[LivingGroup]


class KeepingReport(msgspec.Struct):
    """Where a change of what is kept is committed."""

    name: str
    vbs: Annotated[list[VbId], Meta(description="Partitions of this node.")]
    lost: Annotated[
        Count, Meta(description="Of them, where a purge has passed the consumer before.")
    ] = 0
    positions: Annotated[Count, Meta(description="Saved positions that were deleted.")] = 0
    partitions: Annotated[Count, Meta(description="Partitions of the server in all.")] = 0


class TooManyKeepsError(Exception):
    """Deletions are kept for KEEPS_MAX consumers already; nothing was changed."""


class ConsumerDesk:
    """See the module."""

    def __init__(
        self,
        engine: Engine,
        views: Views,
        kept: KeptConsumers,
        commits: CommitWaiters,
        log: EventLog,
    ) -> None:
        self._engine = engine
        self._views = views
        self._kept = kept
        self._commits = commits
        self._log = log

    async def consumers(self) -> SavedConsumers:
        """Return all that have a saved position, or that deletions are kept for."""
        found: dict[str, SavedConsumer] = {}
        groups: list[LivingGroup] = []
        await self._kept.look(range(self._engine.num_vbuckets), time.time_ns())
        for part in self._mine():
            await _breathe(part)
            groups += self._groups(part)
            for key in self._checkpoints(part):
                about = checkpoint_of(key)
                position = None if about is None else position_of(self._engine, part, about[0])
                if about is not None and position is not None:
                    row = found.setdefault(about[0], SavedConsumer(about[0]))
                    row.positions += 1
                    row.lag_items += max(0, part.committed_seqno - position)
                    meta = self._engine.newest_meta(part.vb_id, DEFAULT_COLLECTION_PREFIX + key)
                    if meta is not None:
                        row.saved_s = max(row.saved_s or 0.0, time_ns_from_cas(meta.cas) / 1e9)
        for rows in self._kept.found().values():
            for each in rows:
                row = found.setdefault(each.name, SavedConsumer(each.name))
                row.kept_for_s, row.kept_bytes = each.keep.for_s, each.keep.bytes_max
                row.states = dict(Counter(row.states) + Counter([each.state.value]))
        return SavedConsumers([found[name] for name in sorted(found)], groups)

    async def keep(self, name: str, for_s: float, bytes_max: int) -> KeepingReport:
        """Keep deletions that a consumer has not seen, within these limits, from now on.

        Raises TooManyKeepsError, WritesRefusedError; then nothing was changed.
        """
        engine = self._engine
        for part in self._mine():
            keeps = keeps_of(engine, part)
            if name not in keeps and len(keeps) >= KEEPS_MAX:
                raise TooManyKeepsError

        def change(part: Partition, keeps: Mapping[str, Keep]) -> dict[str, Keep]:
            return {**keeps, name: Keep(for_s, bytes_max, part.purge_seqno)}

        vbs = await self._change(change)
        await self._kept.look(vbs, time.time_ns())
        rows = self._kept.found()
        lost = sum(
            any(each.name == name and each.state is KeepState.LOST for each in rows.get(vb_id, ()))
            for vb_id in vbs
        )
        self._log.info(
            "deletions are kept for a consumer",
            consumer=name, kept_for_s=for_s, kept_bytes=bytes_max, vbuckets=len(vbs), lost=lost,
        )  # fmt: skip
        return KeepingReport(name, vbs, lost, partitions=engine.num_vbuckets)

    async def forget(self, name: str) -> KeepingReport:
        """Delete a consumer's saved positions, and keep nothing for it. Raises WritesRefusedError;
        then nothing was changed.
        """

        def change(_part: Partition, keeps: Mapping[str, Keep]) -> dict[str, Keep]:
            return {other: keep for other, keep in keeps.items() if other != name}

        self._refuse_while_full()
        positions = 0
        for part in self._mine():
            await _breathe(part)
            for key in self._checkpoints(part, f"{name}:"):
                about = checkpoint_of(key)
                if about is not None and about[0] == name and part.state == VbState.ACTIVE:
                    self._engine.begin_batch(time.time_ns())
                    status, _, _ = self._engine.delete(
                        part.vb_id, DEFAULT_COLLECTION_PREFIX + key, 0
                    )
                    positions += not status
        vbs = await self._change(change)
        await self._kept.look(vbs, time.time_ns())
        self._log.info("consumer forgotten", consumer=name, positions=positions, vbuckets=len(vbs))
        count = self._engine.num_vbuckets
        return KeepingReport(name, vbs, positions=positions, partitions=count)

    async def _change(
        self, change: Callable[[Partition, Mapping[str, Keep]], dict[str, Keep]]
    ) -> list[int]:
        """Change what partitions keep; return those where it is committed."""
        engine = self._engine
        self._refuse_while_full()
        written: dict[int, tuple[int, int]] = {}
        for part in self._mine():
            await _breathe(part)
            before = keeps_of(engine, part)
            after = change(part, before)
            key = DEFAULT_COLLECTION_PREFIX + keep_key(part.vb_id)
            engine.begin_batch(time.time_ns())
            if after:
                body = key + encode_keeps(after)
                status, _, _ = engine.store(SET, part.vb_id, key, body, 0, 0, 0, 0)
            else:
                status, _, _ = engine.delete(part.vb_id, key, 0) if before else (0, 0, 0)
            if not status:
                written[part.vb_id] = part.vb_uuid, part.high_seqno
        try:
            async with asyncio.timeout(COMMIT_WAIT_S):
                for vb_id in written:
                    await self._commits.until_partition(vb_id)
        except TimeoutError:
            pass  # those that are committed are told
        parts = engine.partitions
        return [
            vb_id
            for vb_id, (vb_uuid, seqno) in written.items()
            if parts[vb_id].vb_uuid == vb_uuid and parts[vb_id].committed_seqno >= seqno
        ]

    def _mine(self) -> Iterator[Partition]:
        return (part for part in self._engine.partitions if part.state == VbState.ACTIVE)

    def _checkpoints(self, part: Partition, begin: str = "") -> list[bytes]:
        """Return the keys of the positions that a partition has, of names that begin so."""
        return self._keys(part, (CHECKPOINT_PREFIX + begin).encode())

    def _groups(self, part: Partition) -> list[LivingGroup]:
        """Return the groups that a partition's master coordinates."""
        groups: list[LivingGroup] = []
        for key in self._keys(part, GROUP_PREFIX):
            with suppress(ValueError, RefusedError):  # somebody else's document, or it is due
                entry = self._engine.document_entry(part, DEFAULT_COLLECTION_PREFIX + key)
                group = group_in(b"" if entry is None else plain_value(entry))
                sizes = {name: group.owners.count(name) for name in group.members}
                name = key[len(GROUP_PREFIX) :].decode("utf-8", "replace")
                groups.append(LivingGroup(name, part.vb_id, group.epoch, sizes))
        return groups

    def _keys(self, part: Partition, begin: bytes) -> list[bytes]:
        """Return the keys of a partition that begin so."""
        prefix = DEFAULT_COLLECTION_PREFIX + begin
        view = self._views.open(part.vb_id, part.committed_seqno, _OWNER)
        keys: list[bytes] = []
        try:
            scan = view.scan(prefix, prefix + _END, with_values=False)
            while not scan.is_done:
                keys += [shown.key[1:] for shown in scan.step(1000)]
        finally:
            self._views.close(view)
        return keys

    def _refuse_while_full(self) -> None:
        if self._engine.write_refusal:
            raise WritesRefusedError(self._engine.write_refusal)


async def _breathe(part: Partition) -> None:
    if part.vb_id % AT_ONCE == AT_ONCE - 1:
        await asyncio.sleep(0)
