"""Records of by_key say what the entry says, and notice every flipped bit."""

from __future__ import annotations

import struct

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.stored_bytes import pack_deletion, pack_mutation
from vbucket.model.entry import pack_system_event
from vbucket.model.manifest import ManifestEvent, SystemEventKind
from vbucket.store.key_record import (
    BY_KEY_RECORD,
    RecordDamagedError,
    StoredMeta,
    by_key_item,
    by_key_items,
    check_records,
    checked_meta,
)

PREFIX = b"\x01\x07"
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


@st.composite
def versions(draw: st.DrawFn) -> tuple[bytes, bytes, StoredMeta]:
    """Key, entry, and what is known of it."""
    key = b"\0" + draw(st.binary(min_size=1, max_size=250))
    cas, seqno, rev_seqno = draw(U64), draw(U64), draw(U64)
    if draw(st.booleans()):
        entry = pack_deletion(vb_id=263, key=key, cas=cas, seqno=seqno, rev_seqno=rev_seqno)
        return key, entry, StoredMeta(0x58, 0, cas, seqno, rev_seqno, 0, 0)
    datatype, flags, expiry = draw(st.sampled_from([0, 1])), draw(U32), draw(U32)
    entry = pack_mutation(
        vb_id=263, key=key, value=draw(st.binary(max_size=20)), cas=cas, seqno=seqno,
        rev_seqno=rev_seqno, flags=flags, expiry=expiry, datatype=datatype, prev_seqno=draw(U64),
    )  # fmt: skip
    return key, entry, StoredMeta(0x57, datatype, cas, seqno, rev_seqno, flags, expiry)


@given(st.lists(versions(), max_size=6, unique_by=lambda version: version[0]))
def test_records_are_made_of_entries_and_read_again(
    drawn: list[tuple[bytes, bytes, StoredMeta]],
) -> None:
    items = by_key_items(PREFIX, [key for key, _, _ in drawn], [entry for _, entry, _ in drawn])
    check_records(dict(items))
    for (full_key, value), (key, entry, meta) in zip(items, drawn, strict=True):
        fields = struct.pack(">BBQQQII", *meta)
        assert full_key == PREFIX + key
        assert value == fields + google_crc32c.value(full_key + fields).to_bytes(4, "big")
        assert by_key_item(PREFIX, key, entry) == (full_key, value)
        assert checked_meta(full_key, value) == meta


def test_a_system_event_has_a_record_that_can_be_read() -> None:
    event = ManifestEvent(SystemEventKind.CREATE_SCOPE, 1, 8, 0, "shop")
    entry = pack_system_event(263, 77, event)
    full_key, value = by_key_item(PREFIX, b"\x01events", entry)
    meta = checked_meta(full_key, value)
    assert (meta.opcode, meta.cas, meta.seqno, meta.flags, meta.expiry) == (0x5F, 0, 77, 0, 0)


def test_every_flipped_bit_is_noticed_and_the_key_named() -> None:
    entries = [pack_mutation(vb_id=263, key=b"\0%d" % n, value=b"v", cas=n, seqno=n, rev_seqno=1)
               for n in range(1, 4)]  # fmt: skip
    items = dict(by_key_items(PREFIX, [b"\0%d" % n for n in range(1, 4)], entries))
    wanted = PREFIX + b"\x002"
    assert len(items[wanted]) == BY_KEY_RECORD.size
    for position in range(BY_KEY_RECORD.size):
        for bit in range(8):
            flipped = bytearray(items[wanted])
            flipped[position] ^= 1 << bit
            with pytest.raises(RecordDamagedError, match=r"partition 263: .* key b'\\x002'"):
                check_records({**items, wanted: bytes(flipped)})
    for cut in (items[wanted][:-1], b"", items[wanted] + b"\0"):
        with pytest.raises(RecordDamagedError, match=r"b'\\x002'"):
            check_records({**items, wanted: cut})
