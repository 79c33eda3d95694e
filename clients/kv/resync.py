"""Finds in what a partition differs from what somebody holds of it, instead of a stream from 0.

A stream that must begin at 0 sends every document. Who holds most of them compares hashes instead,
reads the keys of the buckets that differ and the documents that it lacks, and follows the stream
from the seqno of the hashes. Mirrors and consumers with the option `held` do.

Invariants
- after the changes that are found, one holds of each key the server's state as of the seqno of the
  hashes (T), or a later one that the stream after T brings again. Documents that were replaced
  meanwhile are left out: their new versions are above T;
- the stream begins inside a snapshot which ends at the highest seqno that was read. So if history
  branches between them, the server answers ROLLBACK, and one compares again;
- nothing is changed here: who holds the documents takes over changes and position in one
  transaction;
- the failover log is read last. If it has another version then, what was read is thrown away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from clients.address import ServerAddress
from clients.errors import ConnectError
from clients.kv.differences import PARTITIONS_AT_ONCE, buckets_to_read, compared
from clients.kv.hash_reads import HashReader, Level, positions_at
from clients.kv.held import Held
from clients.position import Position, Versions
from dcp.wire.hash_reads import KeyVersion, SentDocument
from vbucket.model.ids import vbucket_of
from vbucket.native.key_hashes import BITS_MAX, KeyHashes

AHEAD_S: Final = 10.0
"""How long hashes are used that were read ahead."""
ATTEMPTS: Final = 3
"""How often a partition is read again when its history branches meanwhile."""
_NOTHING: Final = KeyHashes()


class Found(NamedTuple):
    """In what a partition differs, and from where its stream goes on."""

    changed: list[tuple[int, SentDocument]]
    """Collection id, and a document that is not held, or in another version."""
    gone: list[tuple[int, bytes]]
    """Collection id and key of documents that are held, and not on the server."""
    versions: Versions
    seqno: int
    """0: nothing is held, or the server has nothing."""
    read_seqno: int
    """The highest seqno that was read."""


class Resync:
    """Compares partitions of one consumer. Close it when done.

    A partition that has to begin at 0 rarely comes alone, so others that wait are compared, too.
    What was found for one is thrown away when its events are processed (`forget`), or is old.
    """

    def __init__(
        self, address: ServerAddress, held: Held, collection_ids: Collection[int], timeout_s: float
    ) -> None:
        self._address = address
        self._held = held
        self._collection_ids = tuple(collection_ids)
        self._timeout_s = timeout_s
        self._reader: HashReader | None = None
        self._ahead: dict[int, tuple[float, Found]] = {}
        """Partition -> when it was found, and what."""
        self._window = 1

    @property
    def received_bytes(self) -> int:
        """Bytes of the answers."""
        return 0 if self._reader is None else self._reader.received_bytes

    async def close(self) -> None:
        """Close its connections."""
        if self._reader is not None:
            await self._reader.close()

    def forget(self, vb_ids: Iterable[int]) -> None:
        """Take note that what is held of partitions changes."""
        for vb_id in vb_ids:
            self._ahead.pop(vb_id, None)

    async def partition(self, vb_id: int, waiting: Iterable[int] = ()) -> Found | None:
        """Return what differs of a partition. None: its history branches again and again, so begin
        at 0. `waiting`: others that will be asked for, in this order if possible.

        Raises what reading raises (DcpdError), ValueError for what cannot be held.
        """
        for _ in range(ATTEMPTS):
            now_s = asyncio.get_running_loop().time()
            at_s, found = self._ahead.pop(vb_id, (now_s, None))
            if found is not None and now_s - at_s < AHEAD_S:
                return found
            others = (each for each in waiting if each not in self._ahead)
            vb_ids = {vb_id: None}
            while len(vb_ids) < self._window and (each := next(others, None)) is not None:
                vb_ids[each] = None
            self._window = min(4 * self._window, PARTITIONS_AT_ONCE)
            for each, what in (await self._compared(list(vb_ids))).items():
                self._ahead[each] = now_s, what
            _, found = self._ahead.pop(vb_id, (now_s, None))
            if found is not None:
                return found
        return None

    async def _opened(self) -> HashReader:
        if self._reader is None:
            self._reader = await HashReader.open(self._address, self._timeout_s)
        return self._reader

    async def _compared(self, vb_ids: Sequence[int]) -> dict[int, Found]:
        """Compare partitions. One whose history branches meanwhile is missing."""
        mine = {vb_id: self._held.hashes(vb_id) for vb_id in vb_ids}
        parts = {
            vb_id: _Part(vb_id)
            for vb_id, tables in mine.items()
            if any(table.documents for table in tables.values())
        }
        found = {vb_id: Found([], [], (), 0, 0) for vb_id in vb_ids if vb_id not in parts}
        if not parts:
            return found
        reader = await self._opened()
        for vb_id, part in parts.items():
            for collection_id in mine[vb_id].keys() - set(self._collection_ids):
                gone = self._held.within(vb_id, collection_id, (0, b"\1"), ())
                part.gone += [(collection_id, version.key) for version in gone]
        for collection_id in self._collection_ids:
            reader.select(collection_id)
            tables = {vb_id: mine[vb_id].get(collection_id, _NOTHING) for vb_id in parts}
            await self._read(reader, collection_id, tables, parts)
        places: dict[int, Position] = {}
        for link, members in await reader.links_of(parts):
            places |= await positions_at(link, {vb_id: parts[vb_id].seqno for vb_id in members})
        for vb_id, part in parts.items():
            part.check_keys(reader.num_vbuckets)
            if (whole := part.found(places[vb_id])) is not None:
                found[vb_id] = whole
        return found

    async def _read(
        self, reader: HashReader, collection_id: int, mine: Mapping[int, KeyHashes],
        parts: Mapping[int, _Part],
    ) -> None:  # fmt: skip
        """Read in what a collection differs in partitions, into their parts."""
        levels = await reader.levels(list(mine), BITS_MAX)
        buckets = {
            vb_id: buckets_to_read(mine[vb_id], level.hashes) for vb_id, level in levels.items()
        }
        wanted = {vb_id: found for vb_id, found in buckets.items() if found is not None}
        keys = await reader.keys(wanted)
        lacking: dict[int, dict[int, KeyVersion]] = {}
        for vb_id, found in wanted.items():
            theirs = keys[vb_id].versions
            ours: list[KeyVersion] = []
            if mine[vb_id].documents:
                ours = self._held.within(vb_id, collection_id, found, theirs)
            unlike = compared(vb_id, ours, theirs)
            parts[vb_id].gone += [(collection_id, each.key) for each in unlike if not each.second]
            lacking[vb_id] = {each.second.seqno: each.second for each in unlike if each.second}
        documents = await reader.documents({vb_id: list(each) for vb_id, each in lacking.items()})
        for vb_id, level in levels.items():
            part = parts[vb_id]
            part.levels.append(level)
            part.read_seqno = max(part.read_seqno, level.seqno)
            if vb_id in keys:
                part.read_seqno = max(part.read_seqno, keys[vb_id].seqno)
            for document in documents.get(vb_id, ()):
                version = document.version
                if lacking[vb_id].get(version.seqno) != version:
                    raise ConnectError(
                        "a document is not the one that was asked for", vb_id=vb_id,
                        node=reader.name,
                    )  # fmt: skip
                part.changed.append((collection_id, document))


class _Part:
    """What was found of one partition so far."""

    def __init__(self, vb_id: int) -> None:
        self.vb_id = vb_id
        self.changed: list[tuple[int, SentDocument]] = []
        self.gone: list[tuple[int, bytes]] = []
        self.levels: list[Level] = []
        """Of each collection."""
        self.read_seqno = 0

    @property
    def seqno(self) -> int:
        """The seqno that the hashes of all collections have reached."""
        return min(level.seqno for level in self.levels)

    def check_keys(self, num_vbuckets: int) -> None:
        """Check that what is held is held in the partition that has it. Raises ValueError."""
        for _, key in self.gone:
            if (own := vbucket_of(key, num_vbuckets)) != self.vb_id:
                raise ValueError(
                    f"held: of partition {self.vb_id} there is {key!r}, which belongs to partition"
                    f" {own} of this server's {num_vbuckets}: keep documents by the partition of"
                    " their events, and begin anew with a server of another number"
                )

    def found(self, place: Position) -> Found | None:
        """Return what differs. `place`: where the seqno is in the server's history, which is read
        last; None: history branched meanwhile.
        """
        seqno = self.seqno
        if not seqno and self.read_seqno:
            return None  # the first changes come just now, and could be undone without notice
        if seqno and any(level.vb_uuid != place.vb_uuid for level in self.levels):
            return None
        return Found(self.changed, self.gone, place.versions, seqno, self.read_seqno)
