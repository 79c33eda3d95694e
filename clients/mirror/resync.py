"""Brings a partition that a mirror cannot follow any more to the server's state, by differences.

A stream that must begin at 0 sends every document. A mirror that holds most of them compares hashes
instead, reads the keys of the buckets that differ and the documents that it lacks, and follows the
stream from the seqno of the hashes.

Invariants
- afterwards the mirror holds, of each key, the server's state as of the seqno of the hashes (T), or
  a later one that the stream after T brings again. Documents that were replaced meanwhile are left
  out: their new versions are above T;
- the position says that the mirror is inside a snapshot which ends at the highest seqno that was
  read. So if history branches between them, the server rolls it back, and it begins again;
- nothing is changed here: the mirror takes over documents, deletions and position in one
  transaction, and clears the journal;
- the failover log is read last. If it has another version then, what was read is thrown away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from clients.address import ServerAddress
from clients.consumer.starting_point import positions_at
from clients.errors import ConnectError
from clients.kv.differences import (
    PARTITIONS_AT_ONCE,
    buckets_to_read,
    compared,
    version_of,
)
from clients.kv.hash_reads import HashReader
from clients.mirror.mirror_state import ROW, ROW_FORM, MirrorStore, Taken, rows_within
from clients.position import Filter, Position
from dcp.wire.hash_reads import KeyVersion
from vbucket.native.key_hashes import BITS_MAX

AHEAD_S: Final = 10.0
"""How long hashes are used that were read ahead."""
ATTEMPTS: Final = 3
"""How often a partition is read again when its history branches meanwhile."""


class Resync:
    """Compares partitions of one mirror. Close it when done.

    A partition that has to begin at 0 rarely comes alone, so those after it are compared, too.
    What was found for one is thrown away when the mirror changes it (`forget`), or is old.
    """

    def __init__(
        self, address: ServerAddress, collection_id: int, chosen: Filter, timeout_s: float
    ) -> None:
        self._address = address
        self._collection_id = collection_id
        self._filter = chosen
        self._timeout_s = timeout_s
        self._reader: HashReader | None = None
        self._ahead: dict[int, Taken] = {}
        self._window = 1
        self._good_until_s = 0.0

    @property
    def received_bytes(self) -> int:
        """Bytes of the answers."""
        return 0 if self._reader is None else self._reader.received_bytes

    async def close(self) -> None:
        """Close its connections."""
        if self._reader is not None:
            await self._reader.close()

    def forget(self, vb_id: int) -> None:
        """Take note that the mirror changes a partition."""
        self._ahead.pop(vb_id, None)

    async def partition(self, store: MirrorStore, vb_id: int) -> Taken | None:
        """Return what differs of a partition. None: there is nothing to compare with, or its
        history branches again and again: begin at 0. Raises what reading raises (DcpdError).
        """
        for _ in range(ATTEMPTS):
            now_s = asyncio.get_running_loop().time()
            if now_s >= self._good_until_s:
                self._ahead.clear()
            taken = self._ahead.pop(vb_id, None)
            if taken is None:
                reader = await self._opened()
                vb_ids = range(vb_id, min(vb_id + self._window, reader.num_vbuckets))
                self._window = min(4 * self._window, PARTITIONS_AT_ONCE)
                self._good_until_s = now_s + AHEAD_S
                self._ahead = await self._compared(reader, store, vb_ids)
                taken = self._ahead.pop(vb_id, None)
            if taken is not None:
                return taken if taken.position.seqno else None
        return None

    async def _opened(self) -> HashReader:
        if self._reader is None:
            self._reader = await HashReader.open(self._address, self._timeout_s)
            self._reader.select(self._collection_id)
        return self._reader

    async def _compared(
        self, reader: HashReader, store: MirrorStore, vb_ids: Sequence[int]
    ) -> dict[int, Taken]:
        """Compare partitions. One whose history branches meanwhile is missing."""
        levels = await reader.levels(vb_ids, BITS_MAX)
        buckets = {
            vb_id: buckets_to_read(store.hashes(vb_id), level.hashes)
            for vb_id, level in levels.items()
        }
        wanted = {vb_id: found for vb_id, found in buckets.items() if found is not None}
        keys = await reader.keys(wanted)
        lacking: dict[int, dict[int, KeyVersion]] = {}
        rows: dict[int, dict[bytes, bytes | None]] = {vb_id: {} for vb_id in vb_ids}
        for vb_id, found in wanted.items():
            theirs = [version.key for version in keys[vb_id].versions]
            rows_held = rows_within(store, vb_id, *found, theirs)
            mine = [version_of(row, ROW_FORM) for row in rows_held]
            unlike = compared(vb_id, mine, keys[vb_id].versions)
            rows[vb_id] = {each.key: None for each in unlike if each.second is None}
            lacking[vb_id] = {each.second.seqno: each.second for each in unlike if each.second}
        documents = await reader.documents({vb_id: list(each) for vb_id, each in lacking.items()})
        places: dict[int, Position] = {}
        for link, members in await reader.links_of(vb_ids):
            places |= await positions_at(link, {vb_id: levels[vb_id].seqno for vb_id in members})
        found_all = {}
        for vb_id, level in levels.items():
            if level.seqno and places[vb_id].vb_uuid != level.vb_uuid:
                continue
            for document in documents.get(vb_id, ()):
                version = document.version
                if lacking[vb_id].get(version.seqno) != version:
                    raise ConnectError(
                        "a document is not the one that was asked for", vb_id=vb_id,
                        node=reader.name,
                    )  # fmt: skip
                row = ROW.pack(version.cas, version.rev_seqno) + document.value
                rows[vb_id][version.key] = row
            read_seqno = max(level.seqno, keys[vb_id].seqno if vb_id in keys else 0)
            found_all[vb_id] = Taken(
                rows[vb_id], read_seqno, self._position(places[vb_id], level.seqno, read_seqno)
            )
        return found_all

    def _position(self, place: Position, seqno: int, read_seqno: int) -> Position:
        # A client that is at the start of a snapshot has nothing of it, so this one starts before.
        start = seqno if read_seqno == seqno else seqno - 1
        if not seqno:
            return Position()
        return Position(
            place.versions, seqno, start, read_seqno,
            collections=(self._collection_id,), filter=self._filter,
        )  # fmt: skip
