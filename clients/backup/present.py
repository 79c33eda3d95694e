"""What a server has already of what is restored, by hashes (X_READ_HASHES).

A bucket whose hash is the same on both sides has the same documents: key, CAS and revision. Their
values are not compared, so a restore with `force` does not ask.

Invariants
- what is left out is on the server, or deleted there as it is in the archive;
- of a partition only keys and heads are in memory, as `clients.backup.reading` has its keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from clients.backup.selection import split_key
from clients.errors import OperationTimeoutError, StatusError
from clients.kv.differences import PARTITIONS_AT_ONCE, buckets_to_read
from clients.kv.hash_reads import HashReader
from dcp.wire.opcode import Opcode
from vbucket.native.key_hashes import BITS_MAX, KeyHashes, Row, RowForm, rows_of_buckets

HEAD_BYTES: Final = 40
"""Of a stored frame: up to its revision."""
_OPCODE_AT: Final = 1
_CAS_AT: Final = 16
_REV_AT: Final = 32
_MUTATION: Final = int(Opcode.DCP_MUTATION)


class Present:
    """See the module. `vb_ids` are asked for in this order. `prefixes` are those of keys of the
    collections, on the server.
    """

    def __init__(
        self, reader: HashReader, prefixes: Iterable[bytes], vb_ids: Iterable[int]
    ) -> None:
        self._reader = reader
        self._collections = {prefix: split_key(prefix + b"k")[0] for prefix in prefixes}
        self._left = list(vb_ids)
        self._hashes: dict[int, dict[int, KeyHashes]] = {}
        """Partition -> collection -> hashes, of those that come next."""

    async def ask(self, vb_id: int) -> bool:
        """Ask for the hashes of a partition, if that was not done; return whether the server has
        documents there. False, too, if it has no hashes, does not let this user read them, or
        cannot do it now.
        """
        if vb_id not in self._hashes and self._left:
            some, self._left = self._left[:PARTITIONS_AT_ONCE], self._left[PARTITIONS_AT_ONCE:]
            self._hashes.clear()
            try:
                for collection_id in self._collections.values():
                    self._reader.select(collection_id)
                    for each, found in (await self._reader.hashes(some, BITS_MAX)).items():
                        self._hashes.setdefault(each, {})[collection_id] = found
            except (StatusError, OperationTimeoutError):
                self._left = []  # all of the rest is sent: no restore waits for hashes
                self._hashes.clear()
        return any(each.documents for each in self._hashes.get(vb_id, {}).values())

    def lacking(self, vb_id: int, rows: Iterable[tuple[bytes, Row]]) -> Collection[bytes]:
        """Return the keys of a partition in whose buckets the server has something else. `rows`:
        collection's prefix; key, with it, and the first HEAD_BYTES of its frame.
        """
        by_collection: Mapping[bytes, list[Row]] = defaultdict(list)
        for prefix, row in rows:
            by_collection[prefix].append(row)
        wanted: set[bytes] = set()
        for prefix, some in by_collection.items():
            theirs = self._hashes[vb_id][self._collections[prefix]]
            form = RowForm(0, prefix, _CAS_AT, _REV_AT)
            mine = KeyHashes(theirs.bits)
            mine.change([], [row for row in some if row[1][_OPCODE_AT] == _MUTATION], form)
            if (buckets := buckets_to_read(mine, theirs)) is not None:
                wanted.update(key for key, _ in rows_of_buckets(some, form, *buckets))
        return wanted

    async def close(self) -> None:
        """Close the connections."""
        await self._reader.close()
