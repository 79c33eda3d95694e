"""Values that clients compress with Snappy, over the bytes of real sessions."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from cramjam import snappy
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.session.kv.with_meta import META_EXTRAS
from dcp.session.node_facts import Limits
from dcp.session.text import TextSession
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.engine.documents.json_value import is_json_text
from vbucket.model import datatype as datatypes
from vbucket.model.entry import DATATYPE_AT
from vbucket.model.ids import vbucket_of
from vbucket.store.plain_value import plain_value

KEY = b"\0k"
JSON, SNAPPY = 1, 2
PLAIN = b'{"text":"' + b"again and " * 40 + b'"}'
PACKED = bytes(snappy.compress_raw(PLAIN))
ALL = (Feature.JSON, Feature.SNAPPY)


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


@pytest.fixture
def vb(node: MemoryNode) -> int:
    return vbucket_of(b"k", node.partitions)


def connect(node: MemoryNode, *features: int, **limits: Any) -> Peer:
    peer = node.connect(limits=Limits(**limits))
    peer.hello(Feature.COLLECTIONS, Feature.XERROR, Feature.MUTATION_SEQNO, *features)
    return peer


def put(
    peer: Peer, vb: int, value: bytes = PACKED, datatype: int = JSON | SNAPPY, key: bytes = KEY
) -> Frame:
    extras = struct.pack(">II", 7, 0)
    return peer.ask(Opcode.SET, vb_id=vb, key=key, value=value, extras=extras, datatype=datatype)


def seen(frame: Frame) -> tuple[int, int, bytes]:
    return frame.status, frame.datatype, frame.value


READS: list[tuple[int, bytes]] = [
    (Opcode.GET, b""), (Opcode.GETQ, b""), (Opcode.GETK, b""), (Opcode.GETKQ, b""),
    (Opcode.GAT, bytes(4)), (Opcode.GATQ, bytes(4)), (Opcode.GET_AND_LOCK, b""),
]  # fmt: skip


@pytest.mark.parametrize("is_merged", [False, True])
def test_each_client_gets_the_value_in_a_form_that_it_knows(
    node: MemoryNode, vb: int, is_merged: bool
) -> None:
    writer = connect(node, *ALL)
    assert put(writer, vb).status == Status.OK
    if is_merged:
        node.merge()
        node.crash()
    forms: list[tuple[tuple[int, ...], tuple[int, int, bytes]]] = [
        (ALL, (0, JSON | SNAPPY, PACKED)),
        ((Feature.SNAPPY,), (0, SNAPPY, PACKED)),
        ((Feature.JSON,), (0, JSON, PLAIN)),
        ((), (0, 0, PLAIN)),
    ]
    for features, form in forms:
        reader = connect(node, *features)
        for opcode, extras in READS:
            found = reader.ask(opcode, vb_id=vb, key=KEY, extras=extras)
            assert seen(found) == form, (features, Opcode(opcode))
        node.engine.locks.held.clear()
        get = pack_request(Opcode.GET, vb_id=vb, key=KEY)
        assert [seen(frame) for frame in reader.send(get * 4)] == [form] * 4
        assert reader.ask(Opcode.GET_RANDOM_KEY).value == form[2]
        meta = reader.ask(Opcode.GET_META, vb_id=vb, key=KEY, extras=b"\x02")
        assert meta.extras[-1] & SNAPPY == form[1] & SNAPPY


def test_it_is_stored_as_it_came_where_that_is_smaller(node: MemoryNode, vb: int) -> None:
    writer = connect(node, *ALL)
    put(writer, vb)
    entry = node.engine.partitions[vb].newest[KEY]
    assert entry[DATATYPE_AT] == JSON | SNAPPY
    assert entry.endswith(PACKED)
    assert plain_value(entry) == PLAIN
    noise = bytes(range(200))
    put(writer, vb, bytes(snappy.compress_raw(noise)), SNAPPY)
    entry = node.engine.partitions[vb].newest[KEY]
    assert (entry[DATATYPE_AT], plain_value(entry)) == (0, noise)
    assert entry.endswith(noise)


def test_text_clients_get_plain_values(node: MemoryNode, vb: int) -> None:
    put(connect(node, *ALL), vb)
    text = node.connect()
    TextSession(text.state).receive(b"get k\r\n", node.now_ns)
    assert b"".join(text.state.answers) == b"VALUE k 7 %d\r\n%b\r\nEND\r\n" % (len(PLAIN), PLAIN)


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (b"", Status.EINVAL),
        (b"no Snappy at all", Status.EINVAL),
        (PACKED[:-1], Status.EINVAL),
        (PACKED + b"x", Status.EINVAL),
        (b"\xff" * 20, Status.EINVAL),
        (b"\x80\x80\x80\x80\x80\x01" + PACKED, Status.EINVAL),  # a length of more than 32 bits
        (b"\xff\xff\xff\xff\x0f" + PACKED, Status.E2BIG),
        (b"\x81\x80\x40" + PACKED, Status.E2BIG),  # the limit and 1
        (b"\xff\xff\x3f" + PACKED, Status.EINVAL),  # below the limit, but not in so few bytes
    ],
)
def test_bad_values_are_refused_and_change_nothing(
    node: MemoryNode, vb: int, value: bytes, status: int
) -> None:
    writer = connect(node, *ALL, value_bytes_max=1 << 20)
    seqno = node.engine.partitions[vb].high_seqno
    meta = META_EXTRAS.pack(0, 0, 9, 9)
    for opcode, extras in (
        (Opcode.SET, bytes(8)), (Opcode.ADD, bytes(8)), (Opcode.SET_WITH_META, meta),
    ):  # fmt: skip
        refused = writer.ask(opcode, vb_id=vb, key=KEY, value=value, extras=extras, datatype=SNAPPY)
        assert (refused.status, b"context" in refused.value) == (status, True)
    assert node.engine.partitions[vb].high_seqno == seqno


def test_a_length_is_checked_before_anything_is_inflated(
    node: MemoryNode, vb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NothingIsInflated:
        decompress_raw_len = staticmethod(snappy.decompress_raw_len)

        @staticmethod
        def decompress_raw(value: bytes) -> bytes:
            raise AssertionError("it was inflated")

    monkeypatch.setattr(datatypes, "snappy", NothingIsInflated)
    writer = connect(node, *ALL, value_bytes_max=2000)
    assert put(writer, vb, bytes(snappy.compress_raw(bytes(2001)))).status == Status.E2BIG
    assert put(writer, vb, b"\xd0\x0f" + b"\x00a").status == Status.EINVAL, "2,000 of 4 bytes"
    monkeypatch.undo()
    assert put(writer, vb, bytes(snappy.compress_raw(bytes(2000)))).status == Status.OK


def test_clients_that_did_not_negotiate_it_may_not_send_it(node: MemoryNode, vb: int) -> None:
    meta = META_EXTRAS.pack(0, 0, 9, 9)
    for features in ((), (Feature.JSON,)):
        peer = connect(node, *features)
        assert put(peer, vb).status == Status.EINVAL
        peer.set(vb, KEY, b"v")
        for opcode, extras in ((Opcode.APPEND, b""), (Opcode.SET_WITH_META, meta)):
            refused = peer.ask(
                opcode, vb_id=vb, key=KEY, value=PACKED, extras=extras, datatype=SNAPPY
            )
            assert refused.status == Status.EINVAL
    everything = connect(node, *ALL)
    assert put(everything, vb, PACKED, 4 | SNAPPY).status == Status.EINVAL
    everything.hello(Feature.COLLECTIONS)
    assert put(everything, vb).status == Status.EINVAL, "a HELLO takes back the one before"


def test_appends_and_counters_work_on_the_plain_value(node: MemoryNode, vb: int) -> None:
    peer = connect(node, *ALL)
    put(peer, vb)
    end = b"the end" * 20
    for opcode in (Opcode.APPEND, Opcode.PREPEND):
        value = bytes(snappy.compress_raw(end))
        done = peer.ask(opcode, vb_id=vb, key=KEY, value=value, datatype=SNAPPY)
        assert done.status == Status.OK
    found = connect(node).ask(Opcode.GET, vb_id=vb, key=KEY)
    assert seen(found) == (0, 0, end + PLAIN + end)
    digits = b"0" * 18 + b"41"
    # Longer than it is plain: so short a value is never stored compressed by the server itself.
    put(peer, vb, bytes(snappy.compress_raw(digits)), SNAPPY)
    number = peer.ask(Opcode.INCREMENT, vb_id=vb, key=KEY, extras=struct.pack(">QQI", 1, 0, 0))
    assert number.value == struct.pack(">Q", 42)
    assert seen(peer.ask(Opcode.GET, vb_id=vb, key=KEY)) == (0, JSON, b"42")


def test_touch_keeps_the_value(node: MemoryNode, vb: int) -> None:
    peer = connect(node, *ALL)
    put(peer, vb)
    peer.ask(Opcode.TOUCH, vb_id=vb, key=KEY, extras=b"\0\0\1\0")
    assert seen(peer.ask(Opcode.GET, vb_id=vb, key=KEY)) == (0, JSON | SNAPPY, PACKED)
    assert seen(connect(node).ask(Opcode.GET, vb_id=vb, key=KEY)) == (0, 0, PLAIN)


def test_set_with_meta_takes_compressed_values(node: MemoryNode, vb: int) -> None:
    peer = connect(node, *ALL)
    meta = META_EXTRAS.pack(0, 0, 9, 9)
    done = peer.ask(
        Opcode.SET_WITH_META, vb_id=vb, key=KEY, value=PACKED, extras=meta, datatype=SNAPPY
    )
    assert done.status == Status.OK
    assert seen(connect(node).ask(Opcode.GET, vb_id=vb, key=KEY)) == (0, 0, PLAIN)


def streamed(peer: Peer, vb: int) -> list[Frame]:
    """Return the mutations of a partition from its beginning."""
    assert peer.open(b"%d" % id(peer)).status == Status.OK
    peer.control(b"enable_noop", b"true")
    assert peer.stream(vb).status == Status.OK
    return [frame for frame in peer.drain() if frame.opcode == Opcode.DCP_MUTATION]


@pytest.mark.parametrize("is_merged", [False, True])
def test_streams_send_what_the_client_knows(node: MemoryNode, vb: int, is_merged: bool) -> None:
    writer = connect(node, *ALL)
    for number in range(30):
        key = b"\0%d" % number
        if number % 3:
            put(writer, vb, PLAIN, JSON, key)
        else:
            put(writer, vb, key=key)
    node.commit()
    if is_merged:
        node.merge()
    packed = [streamed(connect(node, *ALL), vb)]
    assert [frame.datatype for frame in packed[0]] == [JSON | SNAPPY, JSON, JSON] * 10
    assert {frame.value for frame in packed[0]} == {PACKED, PLAIN}
    for features in ((Feature.JSON,), ()):
        frames = streamed(connect(node, *features), vb)
        assert [(frame.datatype, frame.value) for frame in frames] == [(JSON, PLAIN)] * 30
        assert [frame.key for frame in frames] == [frame.key for frame in packed[0]]


def test_force_value_compression_compresses_where_smaller(node: MemoryNode, vb: int) -> None:
    writer = connect(node, *ALL)
    put(writer, vb, PLAIN, JSON, b"\0a")
    put(writer, vb, key=b"\0b")
    put(writer, vb, b"short", 0, b"\0c")
    node.commit()
    reader = connect(node, *ALL)
    assert reader.open(b"reader").status == Status.OK
    assert reader.control(b"force_value_compression", b"true").status == Status.OK
    reader.control(b"enable_noop", b"true")
    reader.stream(vb)
    frames = [frame for frame in reader.drain() if frame.opcode == Opcode.DCP_MUTATION]
    assert [frame.datatype for frame in frames] == [JSON | SNAPPY, JSON | SNAPPY, 0]
    assert [bytes(snappy.decompress_raw(frame.value)) for frame in frames[:2]] == [PLAIN] * 2
    assert frames[2].value == b"short"


@pytest.mark.parametrize(
    ("features", "value"), [((Feature.JSON,), b"true"), (ALL, b"yes"), (ALL, b"")]
)
def test_force_value_compression_takes_snappy_and_a_boolean(
    node: MemoryNode, features: tuple[int, ...], value: bytes
) -> None:
    reader = connect(node, *features)
    reader.open(b"reader")
    assert reader.control(b"force_value_compression", value).status == Status.EINVAL


@pytest.mark.parametrize("features", [(), ALL])
def test_previous_values_are_in_a_form_that_the_client_knows(
    node: MemoryNode, vb: int, features: tuple[int, ...]
) -> None:
    writer = connect(node, *ALL)
    put(writer, vb)
    node.commit()
    reader = connect(node, *features)
    reader.open(b"reader")
    for control in (b"x_previous_value", b"enable_noop"):
        reader.control(control, b"true")
    reader.stream(vb)
    reader.drain()
    put(writer, vb, b"short", 0)
    node.commit()
    (replaced,) = [f for f in reader.drain() if f.opcode == Opcode.DCP_PREVIOUS_VALUE]
    wanted = (JSON | SNAPPY, PACKED) if features else (JSON, PLAIN)
    assert (replaced.datatype, replaced.value) == wanted


VALUES = st.one_of(st.binary(max_size=60), st.binary(max_size=6).map(lambda some: some * 50))


@given(st.lists(st.tuples(VALUES, st.booleans()), max_size=12), st.integers(0, 12))
@settings(max_examples=60)
def test_nobody_can_tell_how_a_value_came(
    stored: list[tuple[bytes, bool]], merged_after: int
) -> None:
    node = MemoryNode()
    writer, reader = connect(node, *ALL), connect(node)
    for number, (value, is_packed) in enumerate(stored):
        sent = bytes(snappy.compress_raw(value)) if is_packed else value
        assert put(writer, 0, sent, SNAPPY * is_packed, b"\0%d" % number).status == Status.OK
        if number == merged_after:
            node.merge()
    node.commit()
    for number, (value, _) in enumerate(stored):
        found = reader.ask(Opcode.GET, vb_id=0, key=b"\0%d" % number)
        assert seen(found) == (Status.OK, 0, value)
    frames = streamed(reader, 0)
    shown = [(is_json_text(value), value) for value, _ in stored]
    assert [(frame.datatype, frame.value) for frame in frames] == shown


@pytest.mark.parametrize(
    ("datatype", "features", "why"),
    [
        (SNAPPY, (Feature.JSON,), "0x02 means Snappy, which was not negotiated (HELLO 0x0a)"),
        (JSON | SNAPPY, (), "0x03 means Snappy, which was not negotiated (HELLO 0x0a)"),
        (4, (*ALL, Feature.XATTR), "0x04 means XATTRs, which only sub-document and with-meta"),
        (JSON, (Feature.SNAPPY,), "0x01 means JSON, which was not negotiated (HELLO 0x0b)"),
        (8, (*ALL, Feature.XATTR), "0x08 has unknown bits 0x08; known are 0x01 JSON, 0x02 Snappy"),
        (0xFF, ALL, "0xff has unknown bits 0xf8"),
    ],
)
def test_a_refused_datatype_has_its_own_reason(
    node: MemoryNode, vb: int, datatype: int, features: tuple[int, ...], why: str
) -> None:
    """Negotiating more would not help where the command or the bit is the reason."""
    peer = connect(node, *features)
    for opcode in (Opcode.SET, Opcode.ADD, Opcode.APPEND):
        extras = b"" if opcode == Opcode.APPEND else bytes(8)
        refused = peer.ask(
            opcode, vb_id=vb, key=KEY, value=PACKED, extras=extras, datatype=datatype
        )
        assert refused.status == Status.EINVAL
        assert f"datatype {why}" in refused.value.decode()
