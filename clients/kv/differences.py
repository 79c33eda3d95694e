"""Compares two copies of a collection by hashes, and reads only what differs. Pure.

    hash of each partition -> keys and versions of the buckets that differ

One side has its hashes read, the other one is asked in what it differs from them. A server takes
one request for that. A `Copy` is one side: a server (`clients.kv.hash_reads`), a mirror's file, or
rows that are read here (`RowsCopy`): an archive, a table. `docs/diff.md` says what is promised.

Invariant: of a partition whose hashes are equal nothing else is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from typing import Final, NamedTuple

from clients.errors import DcpdError
from dcp.wire.hash_reads import KeyVersion
from vbucket.model.ids import NUM_VBUCKETS, vbucket_of
from vbucket.native.key_hashes import (
    BITS_MAX,
    KeyHashes,
    Row,
    RowForm,
    bits_for,
    differing,
    rows_of_buckets,
)

PARTITIONS_AT_ONCE: Final = 64
"""Partitions that are read together."""
_U64: Final = Struct(">Q")

Wanted = Mapping[int, tuple[int, bytes]]
"""Partition -> bits, and a byte for each of 2^bits buckets: 1 if it is wanted."""
Known = Mapping[int, Sequence[KeyVersion]]
"""Partition -> keys and versions."""


class NotComparableError(DcpdError):
    """The two sides hold different things, so that no comparison says anything."""


class Difference(NamedTuple):
    """A key that differs: what each side has of it, None if it has none."""

    vb_id: int
    key: bytes
    first: KeyVersion | None
    second: KeyVersion | None

    @property
    def kind(self) -> str:
        """In which way, as JSON shows it."""
        if self.first is None:
            return "missing on A"
        if self.second is None:
            return "missing on B"
        if self.first.rev_seqno == self.second.rev_seqno:
            return "value"
        return "older on A" if self.first.rev_seqno < self.second.rev_seqno else "older on B"


class Differing(NamedTuple):
    """The buckets of a partition that differ, a byte for each of 2^bits, and what is in them."""

    bits: int
    buckets: bytes
    versions: list[KeyVersion]


class Copy(ABC):
    """The documents of one collection on one side, by partition."""

    name: str
    """As people call it."""
    num_vbuckets: int
    """How many partitions it has; 0: as many as the other side, or NUM_VBUCKETS."""
    partitions_seen = 0
    """It has at least so many."""

    compares = False
    """Whether it is sent the other side's hashes, and tells only in what it differs."""
    looks_up = False
    """Whether it costs less to look up keys that the other side has than to find a bucket's."""
    received_bytes = 0
    """How many bytes were sent for the comparison."""

    @abstractmethod
    async def collections(self) -> dict[str, int]:
        """Return its collections: scope.collection -> id."""

    @abstractmethod
    def select(self, collection_id: int) -> None:
        """Compare this collection from now on."""

    @property
    def only_collection(self) -> int | None:
        """The collection that it is of, if it is of one whose name it does not know."""
        return None

    @abstractmethod
    async def hashes(self, vb_ids: Sequence[int], bits: int) -> dict[int, KeyHashes]:
        """Return the hashes of partitions, in a table of `bits` at most."""

    @abstractmethod
    async def close(self) -> None:
        """Close what is open."""

    @abstractmethod
    async def versions(self, wanted: Wanted, known: Known) -> dict[int, list[KeyVersion]]:
        """Return the keys and versions in some buckets of partitions. `known`: what the other side
        has there, if that was read first.
        """

    async def differing(self, tables: Mapping[int, KeyHashes]) -> dict[int, Differing]:
        """Return in what its partitions differ from these hashes, of those that do."""
        mine = await self.hashes(list(tables), BITS_MAX)
        buckets = {vb_id: buckets_to_read(mine[vb_id], table) for vb_id, table in tables.items()}
        wanted = {vb_id: found for vb_id, found in buckets.items() if found is not None}
        versions = await self.versions(wanted, {})
        return {vb_id: Differing(*wanted[vb_id], found) for vb_id, found in versions.items()}


class RowsCopy(Copy):
    """A side whose rows are read here, partition by partition. `form` says where a row has what."""

    def __init__(self, name: str, num_vbuckets: int, form: RowForm) -> None:
        self.name = name
        self.num_vbuckets = num_vbuckets
        self.form = form

    @abstractmethod
    def rows(self, vb_id: int) -> list[Row]:
        """Return the rows of a partition's documents."""

    async def hashes(self, vb_ids: Sequence[int], bits: int) -> dict[int, KeyHashes]:  # noqa: ARG002
        """See Copy. It is all computed, so fewer bits would save nothing."""
        found = {}
        for vb_id in vb_ids:
            rows = self.rows(vb_id)
            if rows:
                check_partition(self, vb_id, version_of(rows[0], self.form).key)
            found[vb_id] = hashes_of(rows, self.form)
        return found

    async def versions(self, wanted: Wanted, known: Known) -> dict[int, list[KeyVersion]]:  # noqa: ARG002
        """See Copy."""
        found = {}
        for vb_id, (bits, buckets) in wanted.items():
            rows = rows_of_buckets(self.rows(vb_id), self.form, bits, buckets)
            found[vb_id] = [version_of(row, self.form) for row in rows]
        return found


def check_partition(copy: Copy, vb_id: int, key: bytes) -> None:
    """Check that a key belongs to the partition that has it. Raises NotComparableError."""
    if vbucket_of(key, copy.num_vbuckets) != vb_id:
        raise _other_number(
            f"the keys of {copy.name} are not those of {copy.num_vbuckets} partitions"
        )


def hashes_of(rows: list[Row], form: RowForm) -> KeyHashes:
    """Return the hashes of rows."""
    table = KeyHashes(bits_for(len(rows)))
    table.change([], rows, form)
    return table


def version_of(row: Row, form: RowForm) -> KeyVersion:
    """Return a row as a key and its version."""
    key, value = row
    (cas,), (rev,) = _U64.unpack_from(value, form.cas_at), _U64.unpack_from(value, form.rev_at)
    return KeyVersion(key[form.prefix_at + len(form.prefix) :], cas, 0, rev)


def buckets_to_read(mine: KeyHashes, other: KeyHashes) -> tuple[int, bytes] | None:
    """Return which buckets of two tables differ, as `Wanted` has them; None: no one."""
    bits = min(mine.bits, other.bits)
    buckets = differing(mine.at(bits), other.at(bits))
    return (bits, buckets) if any(buckets) else None


def compared(
    vb_id: int, first: Iterable[KeyVersion], second: Iterable[KeyVersion]
) -> list[Difference]:
    """Return in what two lists of versions differ, by key."""
    theirs = {version.key: version for version in second}
    found = []
    for one in first:
        two = theirs.pop(one.key, None)
        if two is None or (one.cas, one.rev_seqno) != (two.cas, two.rev_seqno):
            found.append(Difference(vb_id, one.key, one, two))
    found += [Difference(vb_id, key, None, two) for key, two in theirs.items()]
    return sorted(found, key=lambda each: each.key)


def _other_number(what: str) -> NotComparableError:
    return NotComparableError(
        what, hint="Keys are in other partitions there. Compare copies with the same number."
    )


def partitions_of(first: Copy, second: Copy) -> int:
    """Return how many partitions both sides have. Raises NotComparableError."""
    counts = {first.num_vbuckets, second.num_vbuckets} - {0} or {NUM_VBUCKETS}
    if len(counts) != 1:
        raise _other_number(
            f"{first.name} has {first.num_vbuckets} partitions and {second.name} has"
            f" {second.num_vbuckets}"
        )
    (count,) = counts
    for each in (first, second):
        if each.partitions_seen > count:
            raise _other_number(f"{each.name} has more than {count} partitions")
    first.num_vbuckets = second.num_vbuckets = count
    return count


class Comparison:
    """Compares two copies, some partitions at a time. `clients.kv.hash_reads.differences` does it
    for all.
    """

    def __init__(self, first: Copy, second: Copy) -> None:
        self._first, self._second = first, second
        self._most_differ = False
        """Whether most partitions of a group did. Then the next ones are not asked for one hash of
        each partition first."""

    async def of_group(self, vb_ids: Sequence[int]) -> list[list[Difference]]:
        """Return the keys that differ, by partition."""
        first, second = self._first, self._second
        unequal = vb_ids if self._most_differ else await self._unequal(vb_ids)
        is_second = second.compares or first.looks_up
        asked, other = (second, first) if is_second else (first, second)
        tables = await other.hashes(unequal, BITS_MAX) if unequal else {}
        found = await asked.differing(tables) if tables else {}
        self._most_differ = 2 * len(found) > len(vb_ids)
        if not found:
            return []
        told = {vb_id: each.versions for vb_id, each in found.items()}
        wanted = {vb_id: (each.bits, each.buckets) for vb_id, each in found.items()}
        looked_up = await other.versions(wanted, told)
        ours, theirs = (looked_up, told) if is_second else (told, looked_up)
        return [compared(vb_id, ours[vb_id], theirs[vb_id]) for vb_id in found]

    async def _unequal(self, vb_ids: Sequence[int]) -> list[int]:
        """Return the partitions whose hashes differ."""
        one = await self._first.hashes(vb_ids, 0)
        two = await self._second.hashes(vb_ids, 0)
        return [vb_id for vb_id in vb_ids if one[vb_id] != two[vb_id]]


def checked_collections(
    first: Mapping[str, int], second: Mapping[str, int], names: tuple[str, str]
) -> list[str]:
    """Return the collections of both sides. Raises NotComparableError naming what one lacks."""
    lacking = [
        f"{name} lacks {', '.join(sorted(missing))}"
        for name, missing in (
            (names[0], second.keys() - first.keys()), (names[1], first.keys() - second.keys())
        )
        if missing
    ]  # fmt: skip
    if lacking:
        raise NotComparableError(
            f"the collections differ: {'; '.join(lacking)}",
            hint="Name one that both have: --collection SCOPE.COLLECTION.",
        )
    return sorted(first)
