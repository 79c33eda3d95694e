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
- documents, deletions, journal and position change in one transaction;
- the failover log is read last. If it has another version then, what was read is thrown away.
"""

from __future__ import annotations

import asyncio
from typing import Final

from clients.address import ServerAddress
from clients.consumer.starting_point import positions_at
from clients.errors import ConnectError
from clients.kv.differences import (
    PARTITIONS_AT_ONCE,
    Difference,
    buckets_to_read,
    compared,
    hashes_of,
    version_of,
)
from clients.kv.hash_reads import HashReader, Level
from clients.mirror.mirror_state import ROW, ROW_FORM, MirrorStore
from clients.position import Filter, Position
from dcp.wire.hash_reads import KeyVersion, SentDocument
from vbucket.native.key_hashes import BITS_MAX, rows_of_buckets

AHEAD_S: Final = 10.0
"""How long hashes are used that were read ahead."""
ATTEMPTS: Final = 3
"""How often a partition is read again when its history branches meanwhile."""


class Resync:
    """Resyncs partitions of one mirror. Close it when done."""

    def __init__(
        self, address: ServerAddress, collection_id: int, chosen: Filter, timeout_s: float
    ) -> None:
        self._address = address
        self._collection_id = collection_id
        self._filter = chosen
        self._timeout_s = timeout_s
        self._reader: HashReader | None = None
        self._levels: dict[int, Level] = {}
        """Read ahead: one partition rarely comes alone."""
        self._ahead = 1
        self._good_until_s = 0.0
        self.received_bytes = 0

    async def close(self) -> None:
        """Close its connections, and forget what was read ahead."""
        reader, self._reader = self._reader, None
        self._levels.clear()
        self._ahead = 1
        if reader is not None:
            self.received_bytes += reader.received_bytes
            await reader.close()

    async def partition(self, store: MirrorStore, vb_id: int) -> Position | None:
        """Resync a partition; return the position to follow it from. None: there is nothing to
        compare with, or its history branches again and again: begin at 0.

        Raises what reading raises (DcpdError).
        """
        for _ in range(ATTEMPTS):
            level = await self._level(vb_id)
            if not level.seqno:
                return None
            position = await self._taken(store, vb_id, level)
            if position is not None:
                return position
        return None

    async def _opened(self) -> HashReader:
        if self._reader is None:
            self._reader = await HashReader.open(self._address, self._timeout_s)
            self._reader.collection_id = self._collection_id
        return self._reader

    async def _level(self, vb_id: int) -> Level:
        now_s = asyncio.get_running_loop().time()
        level = self._levels.pop(vb_id, None)
        if level is None or now_s >= self._good_until_s:
            self._good_until_s = now_s + AHEAD_S
            reader = await self._opened()
            vb_ids = range(vb_id, min(vb_id + self._ahead, reader.num_vbuckets))
            self._ahead = min(2 * self._ahead, PARTITIONS_AT_ONCE)
            self._levels = await reader.levels(vb_ids, BITS_MAX)
            level = self._levels.pop(vb_id)
        return level

    async def _taken(self, store: MirrorStore, vb_id: int, level: Level) -> Position | None:
        """Take over what differs. None: history has branched meanwhile, and nothing was changed."""
        reader = await self._opened()
        rows = store.rows(vb_id)
        read_seqno = level.seqno
        found: list[Difference] = []
        lacking: dict[int, KeyVersion] = {}
        documents: list[SentDocument] = []
        wanted = buckets_to_read(hashes_of(rows, ROW_FORM), level.hashes)
        if wanted is not None:
            keys = (await reader.keys({vb_id: wanted}))[vb_id]
            held = [version_of(row, ROW_FORM) for row in rows_of_buckets(rows, ROW_FORM, *wanted)]
            found = compared(vb_id, held, keys.versions)
            lacking = {each.second.seqno: each.second for each in found if each.second is not None}
            documents = await reader.documents(vb_id, list(lacking))
            read_seqno = max(read_seqno, keys.seqno)
        link = await reader.link_of(vb_id)
        place = (await positions_at(link, {vb_id: level.seqno}))[vb_id]
        if place.vb_uuid != level.vb_uuid:
            return None
        for document in documents:
            if lacking.get(document.version.seqno) != document.version:
                raise ConnectError(
                    "a document is not the one that was asked for", vb_id=vb_id, node=reader.name
                )
        # A client that is at the start of a snapshot has nothing of it, so this one starts before.
        start = level.seqno if read_seqno == level.seqno else level.seqno - 1
        position = Position(
            place.versions, level.seqno, start, read_seqno,
            collections=(self._collection_id,), filter=self._filter,
        )  # fmt: skip
        with store.changing() as change:
            for each in found:
                if each.second is None:
                    change.put(vb_id, each.key, None, level.seqno)
            for version, _, _, _, value in documents:
                row = ROW.pack(version.cas, version.rev_seqno) + value
                change.put(vb_id, version.key, row, level.seqno)
            change.begin_at(vb_id, read_seqno)
            change.place({vb_id: position})
        return position
