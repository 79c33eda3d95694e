"""Bytes as they are stored: the layout of an LMDB file (which page holds what), derived from its
bytes alone, and entries of changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from struct import unpack_from

from dcp.wire.opcode import Opcode
from vbucket.model.entry import (
    DELETION_ENTRY,
    DELETION_EXTRAS_BYTES,
    MUTATION_ENTRY,
    MUTATION_EXTRAS,
    MUTATION_EXTRAS_BYTES,
    MUTATION_FORM,
)

PAGE_BYTES = 4096
BRANCH, LEAF = 1, 2
BIG_VALUE = 1


@dataclass
class Table:
    """The pages of one table."""

    branches: dict[int, set[bytes]] = field(default_factory=dict)
    """Page number -> the keys below it."""
    leaves: dict[int, set[bytes]] = field(default_factory=dict)
    large: dict[int, bytes] = field(default_factory=dict)
    """First page of a large value -> its key."""


def layout_of(store: Path) -> dict[str, Table]:
    """Return the tables of an undamaged store."""
    data = (store / "data.mdb").read_bytes()
    metas = [unpack_from("<Q", data, slot * PAGE_BYTES + 16 + 128)[0] for slot in (0, 1)]
    start = metas.index(max(metas)) * PAGE_BYTES + 16
    (root,) = unpack_from("<Q", data, start + 24 + 48 + 40)
    return {
        key.decode(): _table(data, unpack_from("<Q", value, 40)[0])
        for key, _, value in _nodes(data, root)
    }


def _table(data: bytes, root: int) -> Table:
    table = Table()
    if root < 2**63:
        _walk(data, root, table)
    return table


def _walk(data: bytes, page: int, table: Table) -> set[bytes]:
    (flags,) = unpack_from("<H", data, page * PAGE_BYTES + 10)
    if flags == LEAF:
        keys = set()
        for key, node_flags, value in _nodes(data, page):
            keys.add(key)
            if node_flags & BIG_VALUE:
                table.large[unpack_from("<Q", value)[0]] = key
        table.leaves[page] = keys
        return keys
    assert flags == BRANCH
    below: set[bytes] = set()
    for _, high, value in _nodes(data, page):
        child = int.from_bytes(value, "little") | high << 32
        below |= _walk(data, child, table)
    table.branches[page] = below
    return below


def keys_on(data: bytes, page: int) -> set[bytes]:
    """Return the keys of a page of a file."""
    return {key for key, *_ in _nodes(data, page)}


def _nodes(data: bytes, page: int) -> list[tuple[bytes, int, bytes]]:
    """Return key, flags and value of each node; in a branch, low bytes of the child's number."""
    start = page * PAGE_BYTES
    flags, lower = unpack_from("<HH", data, start + 10)
    found = []
    for slot in range(16, lower, 2):
        at = start + unpack_from("<H", data, start + slot)[0]
        size, node_flags, key_bytes = unpack_from("<IHH", data, at)
        key = data[at + 8 : at + 8 + key_bytes]
        end = at + 8 + key_bytes
        value = data[at : at + 4] if flags == BRANCH else data[end : end + min(size, PAGE_BYTES)]
        found.append((key, node_flags, value))
    return found


def overwrite(store: Path, page: int, what: str) -> None:
    """Damage a page: `zeros`, `ones`, or `other`, the content of the page before it."""
    path = store / "data.mdb"
    data = bytearray(path.read_bytes())
    start = page * PAGE_BYTES
    before = data[start - PAGE_BYTES : start]
    new = {"zeros": bytes(PAGE_BYTES), "ones": b"\xff" * PAGE_BYTES, "other": before}[what]
    data[start : start + PAGE_BYTES] = new
    path.write_bytes(data)


def pack_mutation(
    *,
    vb_id: int,
    key: bytes,
    value: bytes,
    cas: int,
    seqno: int,
    rev_seqno: int,
    flags: int = 0,
    expiry: int = 0,
    datatype: int = 0,
    prev_seqno: int = 0,
    epoch: int = 0,
) -> bytes:
    """Return the entry of a set; `key` carries its collection-id prefix, `expiry` is absolute."""
    body = MUTATION_EXTRAS_BYTES + len(key) + len(value)
    head = MUTATION_ENTRY.pack(
        prev_seqno, epoch, MUTATION_FORM, len(key), MUTATION_EXTRAS | datatype,
        vb_id, body, cas, seqno, rev_seqno, flags, expiry,
    )  # fmt: skip
    return head + key + value


def pack_deletion(
    *,
    vb_id: int,
    key: bytes,
    cas: int,
    seqno: int,
    rev_seqno: int,
    prev_seqno: int = 0,
    epoch: int = 0,
) -> bytes:
    """Return the entry of a delete."""
    head = DELETION_ENTRY.pack(
        prev_seqno, epoch, 0x80, Opcode.DCP_DELETION, len(key), DELETION_EXTRAS_BYTES, 0,
        vb_id, DELETION_EXTRAS_BYTES + len(key), 0, cas, seqno, rev_seqno, 0,
    )  # fmt: skip
    return head + key
