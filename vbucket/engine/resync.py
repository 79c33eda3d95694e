"""How a replica goes on whose master has purged deletions that it lacks, instead of at 0. Pure.

    replica, at seqno S                        master, purge seqno P > S, the same history up to S
    stream request                        ->
                                          <-   ROLLBACK to 0, and `Remaining`: P, and the seqnos up
                                               to S of the documents that it had at its floor
    the same, with the keys of its other  ->   looks these up (`deletions_for`)
    documents (`Resync`)
                                          <-   OK, and the snapshot of what is left above S, with a
                                               deletion for each of these keys that it knows no more

All of that is as of the master's history floor F, which is above P: any seqno from F on may be
branched at. A document that the replica has at S and the master has no more at F was replaced or
deleted between. What replaced it, and a deletion above P, are in the snapshot. So only the keys are
open of which the master has neither: their deletion was at or below P, and is purged, or may be
before it is read. Purged ones leave their seqnos free. The snapshot brings one for each such key on
a free seqno between S and P, not always its own: nobody reads deletions at or below a purge seqno
one by one, and the next compaction purges them. What changes above F, comes after the snapshot.

If more deletions are purged meanwhile, the stream ends (`Progress.is_overtaken`), and the replica
asks again. A part of such a snapshot is of use to its sender alone, which knows what is left to
delete. So it has no end (`UNENDED`) until the last of these deletions: a replica that has such a
part goes back to S before it asks again.

Who calls it: `failover.replication.master` and `replica` for the request, `progress` for what is
sent.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import sub
from struct import Struct, pack, unpack
from typing import Final, NamedTuple

import msgspec

from dcp.wire.opcode import Opcode
from failover.rules.history import FailoverLog
from vbucket.engine.engine import Engine
from vbucket.engine.keyspace import MUTATION
from vbucket.engine.loading.bulk import REV_SEQNO_MAX
from vbucket.engine.partition import Partition
from vbucket.model.entry import (
    DELETION_ENTRY,
    DELETION_EXTRAS_BYTES,
    META,
    OPCODE_AT,
    head_of,
    seqno_of,
)
from vbucket.model.ids import SEQNO_MAX
from vbucket.model.manifest import collection_of, decode_leb128

UNENDED: Final = SEQNO_MAX
"""The end of a window whose part cannot be continued by another request."""
DOCUMENTS_MAX: Final = 50_000
"""A partition with more documents and changes above its floor begins at 0: to look through it would
hold up the loop for 50 ms."""
KEYS_MAX: Final = 16_384
KEYS_BYTES_MAX: Final = 1 << 20
"""A replica that would have to ask about more begins at 0."""
DOCUMENTS_PER_S: Final = 200_000
"""How many a node looks through for its replicas: a fifth of a core."""
BURST_S: Final = 0.1

_HEAD: Final = Struct(">QQ")
"""Purge seqno, version."""
_DELETION: Final = int(Opcode.DCP_DELETION)


class Remaining(NamedTuple):
    """What a master says that has purged deletions which a replica lacks."""

    purge: int
    """Its purge seqno."""
    vb_uuid: int
    """Its version: what it tells is about this history."""
    seqnos: Collection[int]
    """Of all its documents at its history floor, up to the replica's seqno."""


Document = tuple[bytes, int, int]
"""Key, CAS and revision."""


class Resync(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a replica asks about."""

    purge: int
    """As in `Remaining`."""
    vb_uuid: str
    """The same, decimal: 64 bits are more than a JSON number holds."""
    documents: list[Document]
    """Of its documents, those that are not among the remaining ones."""


class Looks:
    """How many documents may be looked through now."""

    def __init__(self) -> None:
        self._left = DOCUMENTS_PER_S * BURST_S
        self._asked_ns = 0

    def take(self, now_ns: int, documents: int) -> bool:
        """Return whether so many may be looked through now. The last ones may be too many."""
        elapsed_s = max(0, now_ns - self._asked_ns) / 1e9
        self._asked_ns = now_ns
        left = min(self._left + DOCUMENTS_PER_S * elapsed_s, DOCUMENTS_PER_S * BURST_S)
        self._left = left - documents if left > 0 else left
        return left > 0


def pack_remaining(remaining: Remaining) -> bytes:
    """Return the bytes of `unpack_remaining`: the seqnos as their distances."""
    seqnos = sorted(remaining.seqnos)
    distances = pack(f">{len(seqnos)}Q", *map(sub, seqnos, [0, *seqnos]))
    return _HEAD.pack(remaining.purge, remaining.vb_uuid) + zlib.compress(distances, 1)


def unpack_remaining(data: bytes) -> Remaining:
    """Return what `pack_remaining` packed. Raises ValueError."""
    decoder = zlib.decompressobj()
    try:
        plain = decoder.decompress(data[_HEAD.size :], 8 * DOCUMENTS_MAX)
    except zlib.error as error:
        raise ValueError(f"the seqnos that remain cannot be read: {error}") from error
    if len(data) < _HEAD.size or not decoder.eof or len(plain) % 8:
        raise ValueError("the seqnos that remain are cut short, or too many")
    purge, vb_uuid = _HEAD.unpack_from(data)
    return Remaining(purge, vb_uuid, set(accumulate(unpack(f">{len(plain) // 8}Q", plain))))


def is_small(part: Partition) -> bool:
    """Whether a partition can be looked through in one turn of the loop."""
    return looked_through(part) <= DOCUMENTS_MAX


def looked_through(part: Partition, asked: Resync | None = None) -> int:
    """Return how many documents and changes `remaining` reads, or `deletions_for`."""
    documents = part.item_count if asked is None else len(asked.documents)
    return documents + part.high_seqno - part.history_floor


def remaining(engine: Engine, part: Partition, seqno: int) -> Remaining:
    """Return what a replica at a seqno may keep. Raises StoreDamagedError."""
    before = engine.versions.first_changes_after(part, part.history_floor)
    seqnos = {each for key, _, each, _ in _documents(engine, part) if key not in before}
    seqnos.update(before.values())
    kept = {each for each in seqnos if 0 < each <= seqno}
    return Remaining(part.purge_seqno, part.vb_uuid, kept)


def resync_for(engine: Engine, part: Partition, known: Remaining) -> Resync | None:
    """Return what a replica asks its master about; None: it begins at 0. Raises
    StoreDamagedError.
    """
    if part.item_count > DOCUMENTS_MAX:
        return None
    is_gone = engine.keyspace.manifest.is_gone
    documents = [
        (key, cas, rev_seqno)
        for key, cas, seqno, rev_seqno in _documents(engine, part)
        if seqno not in known.seqnos and not is_gone(collection_of(key))
    ]
    key_bytes = sum(len(key) for key, _, _ in documents)
    is_too_much = len(documents) > KEYS_MAX or key_bytes > KEYS_BYTES_MAX
    return None if is_too_much else Resync(known.purge, str(known.vb_uuid), documents)


def problem_of(asked: Resync) -> str:
    """Return what no replica can ask; "" if there is nothing of it."""
    if len({key for key, _, _ in asked.documents}) < len(asked.documents):
        return "a key is named twice"
    for key, cas, rev_seqno in asked.documents:
        if decode_leb128(key) is None or not (0 <= cas <= SEQNO_MAX and rev_seqno >= 0):
            return f"no document has the key {key!r}, CAS {cas} and revision {rev_seqno}"
    return ""


def is_of_now(part: Partition, asked: Resync) -> bool:
    """Whether a replica asks about what its master has now: no purge and no branch came between."""
    return (asked.purge, asked.vb_uuid) == (part.purge_seqno, str(part.vb_uuid))


def _documents(engine: Engine, part: Partition) -> Iterator[tuple[bytes, int, int, int]]:
    """Yield key, CAS, seqno and revision of all documents of a partition. Raises
    StoreDamagedError.
    """
    newest: dict[bytes, bytes] = {}
    for layer in part.layers():
        newest.update(layer.newest)
    for key, entry in newest.items():
        if entry and entry[OPCODE_AT] == MUTATION:
            yield key, *META.unpack_from(entry)[4:]
    for key, opcode, cas, seqno, rev_seqno in engine.versions.stored_keys(part):
        if opcode == MUTATION and key not in newest:
            yield key, cas, seqno, rev_seqno


def deletions_for(engine: Engine, part: Partition, seqno: int, asked: Resync) -> Deletions | None:
    """Return the deletions that a replica at a seqno lacks; None: there is no room for them, and
    it begins at 0. Raises StoreDamagedError.
    """
    versions, is_gone = engine.versions, engine.keyspace.manifest.is_gone
    before = versions.first_changes_after(part, part.history_floor)
    keys = [key for key, _, _ in asked.documents]
    newest = versions.newest_of(part, [key for key in keys if key not in before])
    placed: list[tuple[int, Document]] = []
    lost: list[Document] = []
    free = asked.purge - seqno
    for document in asked.documents:
        key = document[0]
        opcode, known_seqno = newest.get(key, (_DELETION, before.get(key, 0)))
        if key in before and known_seqno and (entry := versions.entry_at(part, known_seqno)):
            opcode = entry[OPCODE_AT]  # another master with a lower floor may still have it
        elif key in before and known_seqno > seqno:
            free -= known_seqno <= asked.purge  # its own, which nothing has any more
        if opcode == MUTATION or known_seqno > asked.purge or is_gone(collection_of(key)):
            continue
        if known_seqno > seqno:
            placed.append((known_seqno, document))
        else:
            lost.append(document)
    if lost:
        free -= versions.count_between(part, seqno + 1, asked.purge)
        if len(lost) > free:
            return None
    return Deletions(part.vb_id, sorted(placed), lost, asked.purge, part.failover)


class Deletions:
    """Deletions that a snapshot brings up to a purge seqno.

    Some are still known when the replica asks, and may be gone when they are read: these keep their
    seqnos. The others have seqnos that are free.
    """

    def __init__(
        self,
        vb_id: int,
        placed: Iterable[tuple[int, Document]],
        others: Iterable[Document],
        purge: int,
        log: FailoverLog,
    ) -> None:
        """`placed`: each with the seqno of its deletion, ascending."""
        self.purge = purge
        self._vb_id = vb_id
        self._placed = deque(placed)
        self._others = deque(others)
        self._log = log
        self._epoch = 0
        """Of the last entry; epochs do not fall."""

    def __bool__(self) -> bool:
        """Whether any are left."""
        return bool(self._others or self._placed)

    def among(self, first_seqno: int, entries: Sequence[bytes]) -> Iterator[bytes]:
        """Yield the next entries of the snapshot, which begin at `first_seqno` or above, and the
        deletions between them.
        """
        for entry in entries:
            seqno = seqno_of(entry)
            for free_seqno, document in self._between(first_seqno, min(seqno, self.purge + 1)):
                yield self._deletion(free_seqno, *document)
            yield entry
            if self._placed and self._placed[0][0] == seqno:
                self._placed.popleft()
            first_seqno, self._epoch = seqno + 1, head_of(entry).epoch

    def _between(self, seqno: int, end: int) -> Iterator[tuple[int, Document]]:
        """Yield the deletions in [seqno, end), where nothing else is."""
        while seqno < end and self:
            next_seqno = self._placed[0][0] if self._placed else end
            if next_seqno == seqno:
                yield self._placed.popleft()
            elif self._others:
                yield seqno, self._others.popleft()
            else:
                seqno = next_seqno
                continue
            seqno += 1

    def _deletion(self, seqno: int, key: bytes, cas: int, rev_seqno: int) -> bytes:
        """Return a deletion whose CAS and revision are above the document's, and not above those
        that the purged one had.
        """
        self._epoch = max(self._epoch, self._log.epoch_at(seqno))
        head = DELETION_ENTRY.pack(
            0, self._epoch, 0x80, _DELETION, len(key), DELETION_EXTRAS_BYTES, 0, self._vb_id,
            DELETION_EXTRAS_BYTES + len(key), 0, min(cas + 1, SEQNO_MAX), seqno,
            min(rev_seqno + 1, REV_SEQNO_MAX), 0,
        )  # fmt: skip
        return head + key
