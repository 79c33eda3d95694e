"""Retention for named consumers: no purge passes the position of one that is away. Sans-IO.

A partition has a document with what it keeps for which consumers, and the positions that they save
(`vbucket.model.consumer_documents`). Whoever raises its purge seqno asks here first.

Invariants
- a keep holds from the change that promises it, committed or not, until the change that ends it is
  committed. A position counts when it is committed: what a failover loses was never counted;
- a purge comes after the positions that allow it in the log of the partition. So a copy that has
  the purge has them, too, and a consumer finds no purge behind it at any master.

The limits: the age of the oldest change that the consumer has not seen, and the bytes of all such
changes. Documents of consumers themselves do not count, because each save is a change, too.

The bytes are for all partitions of a consumer together: `share_of` says how many each of them may
keep. Only if all do not fit, those with the most give way, down to what each may have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from dcp.wire.opcode import Opcode
from vbucket.engine.engine import Engine
from vbucket.engine.partition import Partition
from vbucket.model.consumer_documents import (
    OWN_PREFIX,
    Keep,
    checkpoint_key,
    decode_keeps,
    keep_key,
    position_in,
)
from vbucket.model.entry import META, OPCODE_AT, key_of, seqno_of
from vbucket.model.ids import DEFAULT_COLLECTION_PREFIX
from vbucket.store.plain_value import plain_value
from vbucket.store.store import StoreView
from vbucket.upkeep.retention import bytes_above, seqno_below
from vbucket.upkeep.seqno_at_time import seqno_before

NEAR: Final = 0.8
"""The share of a limit from which on the consumer's operator is warned."""
LOOK_BYTES: Final = 16 << 10
"""Changes that are read to find the oldest one that is not a consumer's own."""
_MUTATION: Final = int(Opcode.DCP_MUTATION)
_OWN: Final = DEFAULT_COLLECTION_PREFIX + OWN_PREFIX


class KeepState(StrEnum):
    """How a keep of a partition stands."""

    KEPT = "kept"
    ENDING = "ending"
    """A limit is nearly reached."""
    ENDED = "ended"
    """A limit is passed: the next purge may pass the consumer."""
    LOST = "lost"
    """Deletions that the consumer has not seen are purged: it starts again at 0."""


class Share(NamedTuple):
    """How many bytes of unseen changes each partition may keep for a consumer."""

    bytes_max: int
    near_bytes: int
    """From here on the consumer's operator is warned."""


class Unseen(NamedTuple):
    """What a consumer has not seen of a partition, and its limit for all partitions together."""

    bytes_unseen: int
    bytes_max: int


class Standing(NamedTuple):
    """What a partition keeps for one consumer now."""

    name: str
    keep: Keep
    position: int | None
    """Where the consumer is, None: the server has no position of it."""
    purge_max: int
    """How far the partition may be purged, as far as this consumer is concerned."""
    state: KeepState


def keeps_of(engine: Engine, part: Partition) -> dict[str, Keep]:
    """Return what a partition keeps, by consumer. Raises StoreDamagedError."""
    key = DEFAULT_COLLECTION_PREFIX + keep_key(part.vb_id)
    newest = engine.versions.newest_entry(part, key)
    if newest is None:
        return {}
    return _keeps_in(engine.versions.committed_entry(part, key)) | _keeps_in(newest)


def position_of(engine: Engine, part: Partition, name: str) -> int | None:
    """Return the committed position of a consumer in a partition, None: the server has none.

    Raises StoreDamagedError.
    """
    key = DEFAULT_COLLECTION_PREFIX + checkpoint_key(name, part.vb_id)
    value = _value(engine.versions.committed_entry(part, key))
    try:
        return None if value is None else position_in(value, part.vb_id)
    except ValueError:
        return None  # somebody else's document


def unseen_of(engine: Engine, store: StoreView, part: Partition) -> dict[str, Unseen]:
    """Return what the consumers for which a partition keeps anything have not seen of it.

    Raises StoreDamagedError.
    """
    record = store.partition(part.vb_id)
    last_seqno = 0 if record is None else record.last_seqno
    found = {}
    for name, keep in keeps_of(engine, part).items():
        position = position_of(engine, part, name)
        held = keep.seqno if position is None else position
        found[name] = Unseen(bytes_above(store, part.vb_id, last_seqno, held), keep.bytes_max)
    return found


def share_of(unseen: Iterable[Unseen], *, partitions: int, of_partitions: int) -> Share:
    """Return the share of each of these partitions, where a node has `partitions` of all."""
    rows = list(unseen)
    limit = max((row.bytes_max for row in rows), default=0) * partitions // of_partitions
    sizes = sorted(row.bytes_unseen for row in rows)
    return Share(_level(sizes, limit), _level(sizes, int(NEAR * limit)))


def _level(sizes: list[int], limit: int) -> int:
    """Return the level at which the sum of min(size, level) is the limit; the limit if all fit.
    The sizes ascend.
    """
    for index, size in enumerate(sizes):
        level = limit // (len(sizes) - index)
        if size > level:
            return level
        limit -= size
    return limit + sum(sizes)


def standings(
    engine: Engine,
    store: StoreView,
    part: Partition,
    now_ns: int,
    shares: Mapping[str, Share] = MappingProxyType({}),
) -> list[Standing]:
    """Return what a partition keeps for each consumer; those without a share have an equal part of
    their limit. Raises StoreDamagedError.
    """
    unseen, found = unseen_of(engine, store, part), []
    for name, keep in keeps_of(engine, part).items():
        share = shares.get(name) or share_of(
            [unseen[name]], partitions=1, of_partitions=engine.num_vbuckets
        )
        found.append(_standing(engine, store, part, now_ns, name, keep, unseen[name], share))
    return found


def purge_max(
    engine: Engine,
    store: StoreView,
    part: Partition,
    now_ns: int,
    shares: Mapping[str, Share] = MappingProxyType({}),
) -> int | None:
    """Return how far a partition may be purged; None: it keeps nothing.

    Raises StoreDamagedError.
    """
    found = standings(engine, store, part, now_ns, shares)
    return min((each.purge_max for each in found), default=None)


def held_by(engine: Engine, part: Partition, upto_seqno: int) -> str:
    """Return the consumer that a purge would pass, "" if there is none, whatever its limits."""
    for name, keep in keeps_of(engine, part).items():
        position = position_of(engine, part, name)
        if upto_seqno > (keep.seqno if position is None else position) >= part.purge_seqno:
            return name
    return ""


def lost_text(engine: Engine, part: Partition, start_seqno: int) -> str:
    """Return in words for whom deletions were kept that a purge has passed at this position, "" if
    for nobody. Raises StoreDamagedError.
    """
    names = [
        f"{name!r} (for {keep.for_s:g} s, {keep.bytes_max} bytes)"
        for name, keep in keeps_of(engine, part).items()
        if position_of(engine, part, name) == start_seqno < part.purge_seqno
    ]
    return f" What was kept for consumer {', '.join(names)} has passed its limits." if names else ""


def _standing(
    engine: Engine, store: StoreView, part: Partition, now_ns: int, name: str, keep: Keep,
    unseen: Unseen, share: Share,
) -> Standing:  # fmt: skip
    position = position_of(engine, part, name)
    held = keep.seqno if position is None else position
    if part.purge_seqno > held and position != 0:
        return Standing(name, keep, position, part.purge_seqno, KeepState.LOST)
    oldest_ns = _oldest_unseen(engine, part, held)
    if oldest_ns is None:
        return Standing(name, keep, position, held, KeepState.KEPT)
    for_ns = int(keep.for_s * 1e9)
    age_ns, limit, state = now_ns - oldest_ns, held, KeepState.KEPT
    if age_ns > for_ns:
        frames = engine.versions.frames
        before = seqno_before(frames, part.vb_id, part.committed_seqno, now_ns - for_ns)
        limit, state = max(limit, before), KeepState.ENDED
    record = store.partition(part.vb_id)
    if record is not None and unseen.bytes_unseen > share.bytes_max:
        below = seqno_below(store, part.vb_id, record.last_seqno, share.bytes_max)
        if below > held:
            limit, state = max(limit, below), KeepState.ENDED
    is_near = age_ns > NEAR * for_ns or unseen.bytes_unseen > share.near_bytes
    if state is KeepState.KEPT and is_near:
        state = KeepState.ENDING
    return Standing(name, keep, position, limit, state)


def _oldest_unseen(engine: Engine, part: Partition, seqno: int) -> int | None:
    """Return when the first change above a seqno was made, ns since the Unix epoch; None: there is
    none but documents of consumers.
    """
    if seqno >= part.committed_seqno:
        return None
    entries = engine.versions.entries(part, seqno + 1, part.committed_seqno, LOOK_BYTES)
    cas = 0
    for entry in entries:
        of_entry = META.unpack_from(entry)[4]  # 0: a system event has none
        cas = of_entry or cas
        if of_entry and not key_of(entry).startswith(_OWN):
            return cas
    is_all = not entries or seqno_of(entries[-1]) >= part.committed_seqno
    return None if is_all else cas


def _keeps_in(entry: bytes | None) -> dict[str, Keep]:
    value = _value(entry)
    try:
        return {} if value is None else decode_keeps(value)
    except ValueError:
        return {}  # somebody else's document


def _value(entry: bytes | None) -> bytes | None:
    """Return the value of a version; None: it is no document."""
    if not entry or entry[OPCODE_AT] != _MUTATION:
        return None
    return plain_value(entry)
