"""Damage in one copy of a block, and its repair from versions of another copy, on the store's twin.

The product's code proves the versions and puts them back (`vbucket.check.mend.put_versions`); only
the pages are the twin's. It happens on a copy of the block: reads of what is damaged are not
simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import google_crc32c

from memory.kv_env import MemoryEnv
from vbucket.check.mend import put_versions
from vbucket.model.entry import seqno_of
from vbucket.store.block import Block
from vbucket.store.lmdb.page_mend import PageMender, ValuePlace
from vbucket.store.records import BY_SEQNO_TABLE

_PLACE = 1
_crc32c = google_crc32c.value


class TwinMender:
    """The part of a `PageMender` that puts versions back, over the rows of a table. The checksum of
    a block's head stands for that of its first page.
    """

    def __init__(self, rows: Mapping[bytes, bytes]) -> None:
        """`rows` are sound now."""
        self.rows = dict(rows)
        self._known = {key: _crc32c(head_of(key, value)) for key, value in rows.items()}

    def place_of_value(self, _table: str, key: bytes) -> ValuePlace | None:
        """See PageMender."""
        return ValuePlace(0, len(self.rows[key]), _PLACE) if key in self.rows else None

    def bytes_at(self, _table: str, key: bytes, _place: ValuePlace) -> bytes:
        """See PageMender."""
        return self.rows[key]

    def last_at_or_before(self, _table: str, key: bytes) -> tuple[bytes, bytes] | None:
        """See PageMender."""
        found = max((each for each in self.rows if each <= key), default=None)
        return None if found is None else (found, self.rows[found])

    def put_value(self, _table: str, key: bytes, _place: ValuePlace, value: bytes) -> bool:
        """See PageMender."""
        is_known = _crc32c(head_of(key, value)) == self._known[key]
        if is_known:
            self.rows[key] = value
        return is_known

    def bad_page(self, _table: str, key: bytes) -> None:
        """See PageMender: pages are sound."""
        assert key in self.rows


def head_of(key: bytes, value: bytes) -> bytes:
    """Return what a block has before its versions: their checksums, too."""
    return value[: len(value) - len(Block(key, value).body)]


def put_in_place(env: MemoryEnv, vb_id: int, entries: Sequence[bytes]) -> bool | None:
    """Damage a block of a partition that has one of these versions of another copy, and have it
    mended with them; return whether it is what it was. None: there is no such block, or they are
    not taken.
    """
    given = {seqno_of(entry) for entry in entries}
    for key, value in env.tables[BY_SEQNO_TABLE].items():
        if key[:2] == vb_id.to_bytes(2, "big"):
            seqnos = Block(key, value).seqnos
            lost = next((at for at, seqno in enumerate(seqnos) if seqno in given), None)
            if lost is not None:
                return _mended(key, value, lost, entries)
    return None


def _mended(key: bytes, value: bytes, lost: int, entries: Sequence[bytes]) -> bool | None:
    mender = TwinMender({key: value})
    block = Block(key, value)
    damaged = bytearray(value)
    damaged[len(value) - len(block.body) + block.ends[lost] - 1] ^= 1
    mender.rows[key] = bytes(damaged)
    how = put_versions(cast("PageMender", mender), key, entries)
    return mender.rows[key] == value if how else None
