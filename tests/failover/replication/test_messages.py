"""The messages between nodes: round trips, and every way in which one is refused."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import cbor2
import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.session.replication_port import ReplicationError
from dcp.wire.frame import Frame, FrameDecoder, pack_request
from dcp.wire.opcode import Opcode
from failover.replication.messages import (
    CONTROL_BYTES_MAX,
    ENTRY_OVERHEAD_BYTES_MAX,
    FORMAT,
    EntriesSection,
    Greeting,
    ReplicaPosition,
    StoreSeen,
    Welcome,
    decode,
    encode,
    pack_ack,
    pack_entries,
    problem_of,
    unpack_ack,
    unpack_entries,
    versions_of,
)
from failover.rules.history import EPOCH_MAX, FailoverLog, Version
from support.stored_bytes import pack_deletion, pack_mutation
from vbucket.model.control import pack_control
from vbucket.model.entry import (
    CONTROL_ENTRY,
    LOG_CONTROL,
    OPCODE_AT,
    PREFIX_BYTES,
    pack_system_event,
)
from vbucket.model.ids import SEQNO_MAX
from vbucket.model.manifest import INITIAL_MANIFEST, events_between

VB = 3
VALUE_BYTES_MAX = 1000


def frame_of(data: bytes) -> Frame:
    [frame] = FrameDecoder().feed(data)
    return frame


def change(seqno: int, **parts: Any) -> bytes:
    told = {"vb_id": VB, "key": b"\0k", "value": b"v", "cas": 7, "rev_seqno": 1, "epoch": 2}
    return pack_mutation(seqno=seqno, **{**told, **parts})


def floor(seqno: Any = 0, purge: Any = 0, **more: Any) -> bytes:
    return pack_control(VB, {"kind": "floor", "seqno": seqno, "purge": purge, **more})


def section(*entries: bytes, epoch: int = 2, committed_seqno: int = 5) -> EntriesSection:
    return EntriesSection(VB, 9, epoch, committed_seqno, entries)


def problem(*entries: bytes, high_seqno: int = 4, **parts: Any) -> str:
    return problem_of(section(*entries, **parts), high_seqno, None, VALUE_BYTES_MAX)


# -- round trips -----------------------------------------------------------------------------------

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
entry = st.builds(
    lambda seqno, key, value: change(seqno, key=b"\0" + key, value=value),
    st.integers(1, SEQNO_MAX), st.binary(max_size=9), st.binary(max_size=30),
)  # fmt: skip
sections = st.lists(
    st.builds(EntriesSection, st.integers(0, 1023), u32, u32, u64, st.lists(entry, max_size=4)),
    max_size=4,
)


@given(number=u64, question=u64, sent=sections)
def test_a_message_comes_back_as_it_was(
    number: int, question: int, sent: list[EntriesSection]
) -> None:
    seen = StoreSeen(question, number)
    message = unpack_entries(frame_of(pack_entries(number, question, sent, seen)))
    assert (message.number, message.question, message.seen) == (number, question, seen)
    assert [each._replace(entries=list(each.entries)) for each in message.sections] == sent


@given(number=u64, question=u64)
def test_an_acknowledgement_comes_back_as_it_was(number: int, question: int) -> None:
    seen = StoreSeen(question, number)
    frame = frame_of(pack_ack(number, question, seen))
    assert frame.opcode == Opcode.X_REPLICA_ACK
    assert unpack_ack(frame.extras) == (number, question, seen)


def test_documents_come_back_as_they_were() -> None:
    log = FailoverLog((Version(2**48 - 1, SEQNO_MAX, EPOCH_MAX), Version(7, 0, 0)))
    position = ReplicaPosition(EPOCH_MAX, versions_of(log))
    welcome = Welcome(EPOCH_MAX, versions_of(log), SEQNO_MAX, SEQNO_MAX - 1, SEQNO_MAX)
    for document in (position, welcome, Greeting(FORMAT, "größe", "m", 1, "a")):
        assert decode(encode(document), type(document)) == document
    assert position.failover_log() == welcome.failover_log() == log


# -- damage ----------------------------------------------------------------------------------------


@given(sent=sections, at=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused(sent: list[EntriesSection], at: int, bit: int) -> None:
    frame = frame_of(pack_entries(1, 2, sent))
    value = bytearray(frame.value)
    if value:
        value[at % len(value)] ^= 1 << bit
        with pytest.raises(ReplicationError, match="message 1: the checksum of its"):
            unpack_entries(frame._replace(value=bytes(value)))


@given(extras=st.binary(max_size=40), value=st.binary(max_size=200))
def test_bytes_of_any_kind_raise_nothing_else(extras: bytes, value: bytes) -> None:
    frame = frame_of(pack_request(Opcode.X_REPLICA_ENTRIES, extras=extras, value=value))
    with suppress(ReplicationError):
        unpack_entries(frame)
    if len(extras) != 32:
        with pytest.raises(ReplicationError, match="32 bytes of extras"):
            unpack_ack(extras)


def with_checksum(value: bytes) -> Frame:
    """A message whose checksum is right: a peer that lies."""
    extras = struct.pack(">QQIQQ", 1, 1, google_crc32c.value(value), 0, 0)
    return frame_of(pack_request(Opcode.X_REPLICA_ENTRIES, extras=extras, value=value))


@given(st.binary(max_size=200))
def test_content_of_any_kind_raises_nothing_else(value: bytes) -> None:
    """And what is accepted can be judged."""
    try:
        message = unpack_entries(with_checksum(value))
    except ReplicationError:
        return
    for each in message.sections:
        assert isinstance(problem_of(each, 0, None, VALUE_BYTES_MAX), str)


HEAD = 22
"""Bytes of a section before its entries."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (bytes(HEAD - 1), "its last section is cut"),
        (bytes(HEAD - 1) + b"\x01", "partition 0: 1 bytes of entries, fewer follow"),
        (bytes(HEAD - 1) + b"\x05" + bytes(5), "do not add up"),
    ],
)
def test_lengths_have_to_add_up(value: bytes, text: str) -> None:
    with pytest.raises(ReplicationError, match=text):
        unpack_entries(with_checksum(value))


@given(kind=st.sampled_from([Greeting, ReplicaPosition, Welcome]), value=st.binary(max_size=60))
def test_json_of_any_kind_raises_nothing_else(kind: Any, value: bytes) -> None:
    with pytest.raises(ReplicationError, match=f"not a {kind.__name__}"):
        decode(value, kind)


@pytest.mark.parametrize(
    "value",
    [
        b"[" * 1_000_000,
        b'{"a":' * 300_000,
        b'{"epoch":1,"versions":' + b"[" * 1_000_000,
        b'{"epoch":' + b"9" * 100_000 + b',"versions":[]}',
        b'{"epoch":1,"versions":[],"more":1}',
        b'{"epoch":1,"versions":[["1","2",3,4]]}',
        b'{"epoch":1.5,"versions":[]}',
        b'{"epoch":1,"versions":[["1",2,3]]}',
    ],
)
def test_deep_huge_and_unknown_json_is_refused(value: bytes) -> None:
    with pytest.raises(ReplicationError, match="not a ReplicaPosition"):
        decode(value, ReplicaPosition)


@pytest.mark.parametrize(
    "version", [("x", "0", 0), ("1", "-1", 0), ("9" * 5000, "0", 0), ("1", "0", -1), ("", "", 0)]
)
def test_versions_that_cannot_be_are_refused(version: tuple[str, str, int]) -> None:
    for holder in (ReplicaPosition(1, [version]), Welcome(1, [version], 0, 0, 0)):
        with pytest.raises(ValueError):
            holder.failover_log()
    with pytest.raises(ValueError):
        ReplicaPosition(1, []).failover_log()


# -- what a replica does not apply -----------------------------------------------------------------


def test_what_follows_is_taken() -> None:
    created = INITIAL_MANIFEST.create_collection("_default", "other")
    [event] = events_between(INITIAL_MANIFEST, created)
    deletion = {"key": b"\0k", "cas": 8, "rev_seqno": 2, "prev_seqno": 6, "epoch": 2}
    assert not problem(
        change(5),
        floor(5, 4),
        change(6, prev_seqno=5),
        pack_deletion(vb_id=VB, seqno=7, **deletion),
        pack_system_event(VB, 8, event, 2),
    )
    assert problem() == "", "a high watermark alone"


def altered(data: bytes, at: int, *new: int) -> bytes:
    return data[:at] + bytes(new) + data[at + len(new) :]


NEXT = change(5)
LONG = change(5, value=bytes(VALUE_BYTES_MAX + ENTRY_OVERHEAD_BYTES_MAX))


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([change(6)], "seqno 6 follows 4"),
        ([change(4)], "seqno 4 follows 4"),
        ([change(5), change(7)], "seqno 7 follows 5"),
        ([change(5), change(5)], "seqno 5 follows 5"),
        ([change(0)], "seqno 0 follows 4"),
        ([change(5, vb_id=4)], "an entry of partition 4 in the section of partition 3"),
        ([change(5, epoch=3)], "leader epoch 3, outside 0 to 2"),
        ([change(5, epoch=2), change(6, epoch=1)], "seqno 6 has leader epoch 1, outside 2 to 2"),
        ([LONG], "at most 2024 are allowed"),
        ([change(5, cas=0)], "has CAS 0"),
        ([change(5, prev_seqno=5)], "seqno 5 replaces seqno 5"),
        ([altered(NEXT, OPCODE_AT, Opcode.SET)], "opcode 0x01"),
        ([altered(NEXT, OPCODE_AT, Opcode.DCP_DELETION)], "opcode 0x58"),
        ([altered(NEXT, PREFIX_BYTES + 2, 0xFF, 0xFF)], "65535 of key: that is no change"),
        ([altered(NEXT, PREFIX_BYTES + 2, 0, 0)], "0 of key"),
        ([altered(NEXT, PREFIX_BYTES + 4, 30)], "30 of extras"),
        ([NEXT[: PREFIX_BYTES + 8] + bytes(16)], "0 bytes"),
        ([pack_control(VB, {"kind": "epoch", "epoch": 9})], "not for replicas"),
        ([pack_control(VB, {"kind": "failover", "log": []})], "not for replicas"),
        ([floor(kind=None)], "not for replicas"),
        ([floor("5", 4)], "no seqno"),
        ([floor(True, 0)], "no seqno"),
        ([floor(5, 4)], "history floor 5 with purge seqno 4, behind seqno 4"),
        ([floor(4, 4)], "a purge seqno is below it"),
        ([floor(4, -1)], "-1 is no seqno"),
        ([floor(-1, 0)], "-1 is no seqno"),
        ([floor(0, 1)], "a purge seqno is below it"),
        ([floor(more="x" * CONTROL_BYTES_MAX)], "bytes is not for replicas"),
        ([CONTROL_ENTRY.pack(0, 0, 0x80, LOG_CONTROL, 0, 0, 0, VB, 0, 0, 0)], "cannot be read"),
        (
            [CONTROL_ENTRY.pack(0, 0, 0x80, LOG_CONTROL, 0, 0, 0, VB, 200, 0, 0) + b"\x81" * 200],
            "cannot be read",
        ),
    ],
)  # fmt: skip
def test_what_does_not_follow_is_refused(entries: list[bytes], text: str) -> None:
    assert text in problem(*entries)


def test_a_floor_above_what_is_committed_is_refused() -> None:
    assert problem(floor(4, 3), committed_seqno=4) == ""
    assert "committed seqno 3" in problem(floor(4, 3), committed_seqno=3)


@pytest.mark.parametrize(
    ("epoch", "committed_seqno"), [(0, 5), (EPOCH_MAX + 1, 5), (2, SEQNO_MAX + 1)]
)
def test_an_epoch_or_high_watermark_that_cannot_be_is_refused(
    epoch: int, committed_seqno: int
) -> None:
    assert "cannot be" in problem(epoch=epoch, committed_seqno=committed_seqno)


@given(st.recursive(st.integers() | st.text() | st.none(), st.lists, max_leaves=5), st.binary())
def test_control_entries_of_any_content_are_judged(document: object, more: bytes) -> None:
    for value in (cbor2.dumps(document), cbor2.dumps({"kind": "floor"}) + more, more):
        head = CONTROL_ENTRY.pack(0, 0, 0x80, LOG_CONTROL, 0, 0, 0, VB, len(value), 0, 0)
        assert problem(head + value)
