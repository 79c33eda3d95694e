"""Counters, append, touch, metadata, flush over the bytes of real sessions."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.session.node_facts import Limits
from dcp.session.session import Session
from dcp.wire.feature import Feature
from dcp.wire.frame import HEADER, Frame, pack_request
from dcp.wire.message import MUTATION_TOKEN, OpenFlag
from dcp.wire.opcode import OPCODES, QUIET_FORMS, Opcode
from dcp.wire.status import Status
from support.memory_node import START_NS, MemoryNode, Peer, node_for
from vbucket.engine.partition import VbState
from vbucket.model.ids import vbucket_of

VB = 5
KEY = b"k"
START_S = START_NS // 1_000_000_000
QUIET_OF = {loud: quiet for quiet, loud in QUIET_FORMS.items()}
NO_CREATE = 0xFFFF_FFFF


@pytest.fixture
def node(request: pytest.FixtureRequest) -> MemoryNode:
    return node_for(request)


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello()
    return peer


def put(peer: Peer, value: bytes, *, key: bytes = KEY, flags: int = 0, expiry: int = 0) -> Frame:
    extras = struct.pack(">II", flags, expiry)
    return peer.ask(Opcode.SET, vb_id=VB, key=key, value=value, extras=extras)


def touch(peer: Peer, expiry: int, opcode: int = Opcode.TOUCH) -> Frame:
    return peer.ask(opcode, vb_id=VB, key=KEY, extras=expiry.to_bytes(4, "big"))


def put_and_touch(peer: Peer, expiry: int) -> Frame:
    put(peer, b"v")
    return touch(peer, expiry)


def count(
    peer: Peer,
    opcode: int = Opcode.INCREMENT,
    delta: int = 1,
    initial: int = 0,
    expiry: int = NO_CREATE,
    cas: int = 0,
) -> Frame:
    extras = struct.pack(">QQI", delta, initial, expiry)
    return peer.ask(opcode, vb_id=VB, key=KEY, extras=extras, cas=cas)


def number(frame: Frame) -> int:
    assert frame.status == Status.OK
    assert len(frame.value) == 8
    return int.from_bytes(frame.value, "big")


def get(peer: Peer, key: bytes = KEY) -> Frame:
    return peer.ask(Opcode.GET, vb_id=VB, key=key)


def meta(peer: Peer, key: bytes = KEY, extras: bytes = b"") -> Frame:
    return peer.ask(Opcode.GET_META, vb_id=VB, key=key, extras=extras)


def expiry_in(frame: Frame) -> int:
    """Return the expiry that a GET_META answer tells."""
    expiry: int = struct.unpack_from(">III", frame.extras)[2]
    return expiry


# -- counters ------------------------------------------------------------------------------------


def test_a_counter_begins_at_its_initial_number_and_counts(peer: Peer) -> None:
    assert number(count(peer, initial=10, expiry=0)) == 10
    assert number(count(peer, delta=5, initial=10, expiry=0)) == 15
    assert number(count(peer, Opcode.DECREMENT, delta=6)) == 9
    assert get(peer).value == b"9"


def test_expiry_0xffffffff_does_not_create_a_counter(node: MemoryNode, peer: Peer) -> None:
    assert count(peer).status == Status.KEY_ENOENT
    assert node.engine.partitions[VB].high_seqno == 0


def test_a_decrement_stops_at_0(peer: Peer) -> None:
    put(peer, b"3")
    assert number(count(peer, Opcode.DECREMENT, delta=4)) == 0
    assert get(peer).value == b"0"


def test_an_increment_wraps_at_2_to_the_64(peer: Peer) -> None:
    put(peer, b"%d" % (2**64 - 1))
    assert number(count(peer, delta=3)) == 2


@pytest.mark.parametrize(
    "value", [b"", b"x", b"-1", b"+1", b"1x", b" 1", b"1.5", b"%d" % 2**64, b"0" * 21, "٣".encode()]
)
def test_what_is_no_number_is_delta_badval(node: MemoryNode, peer: Peer, value: bytes) -> None:
    put(peer, value)
    assert count(peer).status == Status.DELTA_BADVAL
    assert get(peer).value == value
    assert node.engine.partitions[VB].high_seqno == 1


@settings(max_examples=60)
@given(
    start=st.integers(0, 2**64 - 1),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 2**64 - 1)), max_size=6),
)
def test_counters_are_arithmetic(start: int, steps: list[tuple[bool, int]]) -> None:
    peer = MemoryNode().connect()
    peer.hello()
    expected = start
    assert number(count(peer, initial=start, expiry=0)) == start
    for is_increment, delta in steps:
        if is_increment:
            expected = (expected + delta) % 2**64
            assert number(count(peer, Opcode.INCREMENT, delta)) == expected
        else:
            expected = max(0, expected - delta)
            assert number(count(peer, Opcode.DECREMENT, delta)) == expected
        assert get(peer).value == b"%d" % expected


def test_a_counter_keeps_its_flags_and_expiry(node: MemoryNode, peer: Peer) -> None:
    put(peer, b"1", flags=77, expiry=100)
    count(peer, initial=0, expiry=5000)
    assert get(peer).extras == (77).to_bytes(4, "big")
    assert expiry_in(meta(peer)) == START_S + 100


def test_a_new_counter_takes_the_expiry_of_the_command(node: MemoryNode, peer: Peer) -> None:
    count(peer, initial=4, expiry=10)
    node.now_ns += 10_000_000_000
    assert count(peer).status == Status.KEY_ENOENT


@pytest.mark.parametrize("opcode", [Opcode.INCREMENT, Opcode.APPEND])
def test_cas_of_updates(peer: Peer, opcode: int) -> None:
    cas = put(peer, b"1").cas

    def update(cas: int) -> Frame:
        if opcode == Opcode.INCREMENT:
            return count(peer, cas=cas)
        return peer.ask(opcode, vb_id=VB, key=KEY, value=b"0", cas=cas)

    assert update(cas + 1).status == Status.KEY_EEXISTS
    assert get(peer).value == b"1"
    updated = update(cas)
    assert updated.status == Status.OK
    assert updated.cas == get(peer).cas > cas


def test_cas_of_a_missing_counter_does_not_create_it(peer: Peer) -> None:
    assert count(peer, initial=1, expiry=0, cas=9).status == Status.KEY_ENOENT


MONTH_S = 30 * 24 * 3600


@pytest.mark.parametrize("is_touched", [False, True])
def test_an_expiry_of_up_to_30_days_counts_from_now(peer: Peer, is_touched: bool) -> None:
    def store(expiry: int) -> Frame:
        return put_and_touch(peer, expiry) if is_touched else put(peer, b"v", expiry=expiry)

    store(MONTH_S)
    assert expiry_in(meta(peer)) == START_S + MONTH_S
    store(MONTH_S + 1)
    assert get(peer).status == Status.KEY_ENOENT, "that was a second in 1970"


def test_a_document_is_gone_in_the_second_of_its_expiry(node: MemoryNode, peer: Peer) -> None:
    put(peer, b"v", expiry=1)
    node.now_ns += 1_000_000_000
    assert peer.ask(Opcode.DELETE, vb_id=VB, key=KEY).status == Status.KEY_ENOENT
    put(peer, b"v", expiry=1)
    node.now_ns += 1_000_000_000
    assert peer.ask(Opcode.ADD, vb_id=VB, key=KEY, extras=bytes(8)).status == Status.OK


# -- append and prepend --------------------------------------------------------------------------


def test_append_and_prepend_add_to_the_ends(peer: Peer) -> None:
    put(peer, b"b", flags=9, expiry=50)
    assert peer.ask(Opcode.APPEND, vb_id=VB, key=KEY, value=b"c").status == Status.OK
    assert peer.ask(Opcode.PREPEND, vb_id=VB, key=KEY, value=b"a").status == Status.OK
    found = get(peer)
    assert (found.value, found.extras) == (b"abc", b"\0\0\0\x09")
    assert expiry_in(meta(peer)) == START_S + 50


@pytest.mark.parametrize("opcode", [Opcode.APPEND, Opcode.PREPEND])
def test_append_to_nothing_is_not_stored(node: MemoryNode, peer: Peer, opcode: int) -> None:
    assert peer.ask(opcode, vb_id=VB, key=KEY, value=b"x").status == Status.NOT_STORED
    put(peer, b"1")
    peer.delete(VB, KEY)
    assert peer.ask(opcode, vb_id=VB, key=KEY, value=b"x").status == Status.NOT_STORED
    put(peer, b"1", expiry=1)
    node.now_ns += 1_000_000_000
    assert peer.ask(opcode, vb_id=VB, key=KEY, value=b"x").status == Status.NOT_STORED


def test_append_obeys_the_limit_of_values(node: MemoryNode) -> None:
    peer = node.connect(limits=Limits(value_bytes_max=10))
    peer.hello()
    put(peer, bytes(6))
    assert peer.ask(Opcode.APPEND, vb_id=VB, key=KEY, value=bytes(5)).status == Status.E2BIG
    assert peer.ask(Opcode.APPEND, vb_id=VB, key=KEY, value=bytes(4)).status == Status.OK
    assert len(get(peer).value) == 10


# -- every update command ------------------------------------------------------------------------

COUNTER_EXTRAS = struct.pack(">QQI", 1, 1, 0)
UPDATES: dict[int, dict[str, bytes]] = {
    Opcode.INCREMENT: {"extras": COUNTER_EXTRAS},
    Opcode.DECREMENT: {"extras": COUNTER_EXTRAS},
    Opcode.APPEND: {"value": b"0"},
    Opcode.PREPEND: {"value": b"1"},
}


@pytest.mark.parametrize("opcode", UPDATES)
def test_an_update_is_a_mutation_with_a_token(node: MemoryNode, opcode: int) -> None:
    peer = node.connect()
    peer.hello(Feature.MUTATION_SEQNO)
    put(peer, b"5")
    updated = peer.ask(opcode, vb_id=VB, key=KEY, **UPDATES[opcode])
    part = node.engine.partitions[VB]
    assert MUTATION_TOKEN.unpack(updated.extras) == (part.vb_uuid, 2)
    assert updated.cas == get(peer).cas
    assert peer.must_wait


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("opcode", UPDATES)
def test_a_quiet_update_is_silent_on_success_only(
    node: MemoryNode, peer: Peer, opcode: int, is_merged: bool
) -> None:
    put(peer, b"5")
    if is_merged:
        node.merge()
    quiet = pack_request(QUIET_OF[opcode], vb_id=VB, key=KEY, opaque=3, **UPDATES[opcode])
    (noop,) = peer.send(quiet + pack_request(Opcode.NOOP))
    assert noop.opcode == Opcode.NOOP
    expected = {0x05: b"6", 0x06: b"4", 0x0E: b"50", 0x0F: b"15"}
    assert get(peer).value == expected[opcode]
    put(peer, b"x" if opcode in {Opcode.INCREMENT, Opcode.DECREMENT} else b"1")
    (refused,) = peer.send(pack_request(QUIET_OF[opcode], vb_id=VB, key=b"", opaque=3))
    assert (refused.opcode, refused.opaque, refused.status) == (
        QUIET_OF[opcode], 3, Status.EINVAL,
    )  # fmt: skip


EXTRAS_BYTES = {
    Opcode.INCREMENT: 20, Opcode.DECREMENT: 20, Opcode.APPEND: 0, Opcode.PREPEND: 0,
    Opcode.TOUCH: 4, Opcode.GAT: 4, Opcode.GATQ: 4, Opcode.GET_META: 0, Opcode.VERBOSITY: 4,
}  # fmt: skip


@pytest.mark.parametrize(("opcode", "extras_bytes"), EXTRAS_BYTES.items())
def test_extras_of_another_length_are_einval(
    node: MemoryNode, peer: Peer, opcode: int, extras_bytes: int
) -> None:
    put(peer, b"1")
    key = b"" if opcode == Opcode.VERBOSITY else KEY
    answer = peer.ask(opcode, vb_id=VB, key=key, extras=bytes(extras_bytes + 3))
    assert answer.status == Status.EINVAL
    assert node.engine.partitions[VB].high_seqno == 1


@pytest.mark.parametrize("opcode", EXTRAS_BYTES.keys() - {Opcode.VERBOSITY})
def test_an_update_needs_a_key_and_an_active_partition(
    node: MemoryNode, peer: Peer, opcode: int
) -> None:
    extras = bytes(EXTRAS_BYTES[opcode])
    assert peer.ask(opcode, vb_id=VB, extras=extras).status == Status.EINVAL
    node.engine.partitions[VB].state = VbState.REPLICA
    answer = peer.ask(opcode, vb_id=VB, key=KEY, extras=extras)
    assert (answer.status, answer.value) == (Status.NOT_MY_VBUCKET, node.bucket_config())


@pytest.mark.parametrize("opcode", EXTRAS_BYTES.keys() - {Opcode.VERBOSITY})
def test_a_collection_that_is_not_there_is_unknown(node: MemoryNode, opcode: int) -> None:
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS)
    extras = bytes(EXTRAS_BYTES[opcode])
    answer = peer.ask(opcode, vb_id=VB, key=b"\x08k", extras=extras)
    assert answer.status == Status.UNKNOWN_COLLECTION


# -- touch ---------------------------------------------------------------------------------------


def test_touch_changes_the_expiry_and_answers_nothing_else(node: MemoryNode, peer: Peer) -> None:
    stored = put(peer, b"v", flags=6)
    touched = touch(peer, 100)
    assert (touched.status, touched.extras, touched.value) == (0, b"", b"")
    assert touched.cas > stored.cas
    assert expiry_in(meta(peer)) == START_S + 100
    node.now_ns += 100_000_000_000
    assert get(peer).status == Status.KEY_ENOENT


@pytest.mark.parametrize("opcode", [Opcode.GAT, Opcode.GATQ])
def test_get_and_touch_answers_like_get(peer: Peer, opcode: int) -> None:
    put(peer, b"v", flags=6, expiry=10)
    found = touch(peer, 0, opcode)
    assert (found.value, found.extras) == (b"v", b"\0\0\0\x06")
    assert found.cas == get(peer).cas
    assert expiry_in(meta(peer)) == 0


def test_touching_what_is_missing(peer: Peer) -> None:
    assert touch(peer, 1).status == Status.KEY_ENOENT
    assert touch(peer, 1, Opcode.GAT).status == Status.KEY_ENOENT
    extras = bytes(4)
    (noop,) = peer.send(
        pack_request(Opcode.GATQ, vb_id=VB, key=KEY, extras=extras) + pack_request(Opcode.NOOP)
    )
    assert noop.opcode == Opcode.NOOP


def test_a_touch_with_the_same_expiry_is_no_change(node: MemoryNode, peer: Peer) -> None:
    cas = put(peer, b"v", expiry=START_S + 99).cas
    assert touch(peer, START_S + 99).cas == cas
    assert node.engine.partitions[VB].high_seqno == 1


def test_a_touch_is_a_mutation_on_streams_and_carries_no_token(node: MemoryNode) -> None:
    peer = node.connect()
    peer.hello(Feature.MUTATION_SEQNO)
    put(peer, b"v")
    assert touch(peer, 100).extras == b""
    assert len(touch(peer, 200, Opcode.GAT).extras) == 4
    assert node.engine.partitions[VB].high_seqno == 3


# -- metadata ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_merged", [False, True])
def test_get_meta_tells_of_a_document(node: MemoryNode, peer: Peer, is_merged: bool) -> None:
    put(peer, b"0")
    cas = put(peer, b"1", flags=0xABCD, expiry=START_S + 500).cas
    if is_merged:
        node.merge()
    told = meta(peer)
    assert (told.status, told.cas, told.value, told.key) == (0, cas, b"", b"")
    assert struct.unpack(">IIIQ", told.extras) == (0, 0xABCD, START_S + 500, 2)
    assert meta(peer, extras=b"\2").extras == told.extras + b"\1"


@pytest.mark.parametrize("is_merged", [False, True])
def test_get_meta_tells_of_a_tombstone(node: MemoryNode, peer: Peer, is_merged: bool) -> None:
    put(peer, b"0", flags=3)
    cas = peer.delete(VB, KEY).cas
    if is_merged:
        node.merge()
    told = meta(peer)
    assert (told.status, told.cas) == (0, cas)
    assert struct.unpack(">IIIQ", told.extras) == (1, 0, START_S, 2)


def test_get_meta_of_document_whose_time_is_over_is_tombstone(node: MemoryNode, peer: Peer) -> None:
    put(peer, b"0", expiry=10)
    node.now_ns += 10_500_000_000
    assert struct.unpack(">IIIQ", meta(peer).extras) == (1, 0, START_S + 10, 2)


def test_get_meta_of_what_never_was_is_a_miss(peer: Peer) -> None:
    assert meta(peer).status == Status.KEY_ENOENT
    assert meta(peer, extras=b"\3").status == Status.EINVAL


# -- datatype ------------------------------------------------------------------------------------


def put_json(peer: Peer) -> Frame:
    return peer.ask(Opcode.SET, vb_id=VB, key=KEY, value=b"{}", extras=bytes(8), datatype=1)


def test_json_bit_is_kept_and_told_to_those_who_negotiated_it(node: MemoryNode) -> None:
    knows, ignorant = node.connect(), node.connect()
    assert Feature.JSON.to_bytes(2, "big") in knows.hello(Feature.JSON).value
    ignorant.hello()
    assert put_json(knows).status == Status.OK
    assert (get(knows).datatype, get(ignorant).datatype) == (1, 0)
    assert (touch(knows, 9, Opcode.GAT).datatype, touch(ignorant, 8, Opcode.GAT).datatype) == (1, 0)
    assert meta(knows, extras=b"\2").extras[-1] == 1


def test_the_json_bit_is_refused_where_it_was_not_negotiated(node: MemoryNode) -> None:
    ignorant = node.connect()
    ignorant.hello()
    assert put_json(ignorant).status == Status.EINVAL


def test_a_second_hello_without_json_takes_it_back(node: MemoryNode) -> None:
    peer = node.connect()
    peer.hello(Feature.JSON)
    put_json(peer)
    peer.hello()
    assert get(peer).datatype == 0


def test_documents_of_server_are_json_where_it_was_negotiated(node: MemoryNode) -> None:
    for features, datatype in (((Feature.JSON, Feature.XERROR), 1), ((Feature.XERROR,), 0)):
        peer = node.connect()
        peer.hello(*features)
        assert peer.ask(Opcode.GET_CLUSTER_CONFIG).datatype == datatype
        assert peer.ask(Opcode.GET_ERROR_MAP, value=b"\0\2").datatype == datatype
        assert peer.ask(Opcode.GET_COLLECTIONS_MANIFEST).datatype == datatype
        refused = peer.ask(Opcode.VERBOSITY)
        assert (refused.status, refused.datatype) == (Status.EINVAL, datatype)
        missed = get(peer)
        assert (missed.status, missed.value, missed.datatype) == (Status.KEY_ENOENT, b"", 0)


@pytest.mark.parametrize("is_merged", [False, True])
def test_streams_tell_the_datatype_whatever_hello_said(node: MemoryNode, is_merged: bool) -> None:
    writer = node.connect()
    writer.hello(Feature.JSON)
    put_json(writer)
    node.commit()
    if is_merged:
        node.merge()
    forms = {
        (Feature.JSON,): (1, b"{}"),
        (): (1, b"{}"),
        (Feature.JSON, Feature.COLLECTIONS): (1, b"{}"),
        (Feature.COLLECTIONS,): (1, b"{}"),
    }
    for features, expected in forms.items():
        assert first_mutation(node, *features) == expected
    assert first_mutation(node, Feature.JSON, flags=OpenFlag.NO_VALUE) == (0, b"")
    flags = OpenFlag.NO_VALUE_WITH_DATATYPE
    assert first_mutation(node, Feature.JSON, flags=flags) == (1, b"")


def first_mutation(node: MemoryNode, *features: int, flags: int = 0) -> tuple[int, bytes]:
    consumer = node.connect()
    consumer.hello(*features)
    consumer.open(flags=OpenFlag.PRODUCER | flags)
    consumer.control(b"enable_noop", b"true")
    consumer.stream(VB)
    frame = next(frame for frame in consumer.drain() if frame.opcode == Opcode.DCP_MUTATION)
    consumer.producer.close()
    return frame.datatype, frame.value


def test_an_append_makes_a_json_document_raw(node: MemoryNode) -> None:
    peer = node.connect()
    peer.hello(Feature.JSON)
    put_json(peer)
    peer.ask(Opcode.APPEND, vb_id=VB, key=KEY, value=b"{}")
    assert get(peer).datatype == 0


# -- preserve TTL --------------------------------------------------------------------------------


def flex(opcode: int, framing: bytes, key: bytes, extras: bytes, value: bytes) -> bytes:
    body = framing + extras + key + value
    head = HEADER.pack(
        0x08, opcode, len(framing) << 8 | len(key), len(extras), 0, VB, len(body), 0, 0
    )
    return head + body


def ask_preserving(peer: Peer, opcode: int, extras: bytes, value: bytes = b"new") -> Frame:
    (answer,) = peer.send(flex(opcode, b"\x50", KEY, extras, value))
    return answer


@pytest.mark.parametrize("opcode", [Opcode.SET, Opcode.REPLACE])
def test_preserve_ttl_keeps_the_expiry_of_what_is_there(node: MemoryNode, opcode: int) -> None:
    peer = node.connect()
    peer.hello(Feature.PRESERVE_TTL)
    put(peer, b"old", expiry=START_S + 60)
    assert ask_preserving(peer, opcode, struct.pack(">II", 5, 1000)).status == Status.OK
    found = get(peer)
    assert (found.value, found.extras) == (b"new", b"\0\0\0\5")
    assert expiry_in(meta(peer)) == START_S + 60


def test_preserve_ttl_of_new_document_takes_expiry_of_request(node: MemoryNode) -> None:
    peer = node.connect()
    peer.hello(Feature.PRESERVE_TTL)
    assert ask_preserving(peer, Opcode.SET, struct.pack(">II", 5, 1000)).status == Status.OK
    assert expiry_in(meta(peer)) == START_S + 1000


def test_preserve_ttl_without_sense_or_negotiation_is_refused(node: MemoryNode) -> None:
    peer = node.connect()
    peer.hello(Feature.PRESERVE_TTL)
    assert ask_preserving(peer, Opcode.ADD, bytes(8)).status == Status.EINVAL
    assert ask_preserving(peer, Opcode.SET, bytes(4)).status == Status.EINVAL
    assert ask_preserving(peer, Opcode.APPEND, b"").status == Status.NOT_STORED
    peer.hello()
    assert ask_preserving(peer, Opcode.SET, bytes(8)).status == Status.UNKNOWN_FRAME_INFO


# -- the rest ------------------------------------------------------------------------------------


def test_verbosity_is_accepted(peer: Peer) -> None:
    assert peer.ask(Opcode.VERBOSITY, extras=bytes(4)).status == Status.OK


@pytest.mark.parametrize("opcode", [0x23, 0x24])
def test_gatk_and_gatkq_are_unknown_because_they_are_ioctl_too(peer: Peer, opcode: int) -> None:
    assert peer.ask(opcode, vb_id=VB, key=KEY, extras=bytes(4)).status == Status.UNKNOWN_COMMAND


@pytest.mark.all_partitions
def test_a_client_that_knows_no_partitions_has_its_keys_hashed(node: MemoryNode) -> None:
    peer = node.connect()
    key = b"Hello"
    extras = struct.pack(">QQI", 1, 7, 0)
    assert number(peer.ask(Opcode.INCREMENT, key=key, extras=extras)) == 7
    assert peer.ask(Opcode.APPEND, key=key, value=b"0").status == Status.OK
    assert peer.ask(Opcode.TOUCH, key=key, extras=b"\0\0\0\x09").status == Status.OK
    assert peer.ask(Opcode.GET, key=key).value == b"70"
    assert node.engine.partitions[vbucket_of(key)].high_seqno == 3


def test_table_describes_every_opcode_and_all_are_handled() -> None:
    assert set(OPCODES) == set(Opcode)
    node = MemoryNode()
    session = Session(node.connect().state)
    sent = {opcode for opcode, spec in OPCODES.items() if spec.meaning.startswith("sent: ")}
    handled = set(session._hot) | set(session._cold)
    assert handled | sent == set(Opcode) | {0}


@settings(max_examples=150)
@given(
    opcode=st.sampled_from([*EXTRAS_BYTES, *UPDATES, Opcode.FLUSH, Opcode.FLUSHQ]),
    extras=st.binary(max_size=24),
    key=st.binary(max_size=4),
    value=st.binary(max_size=4),
    has_collections=st.booleans(),
)
def test_no_request_raises_and_each_is_answered_once(
    opcode: int, extras: bytes, key: bytes, value: bytes, has_collections: bool
) -> None:
    peer = MemoryNode().connect()
    peer.hello(*[Feature.COLLECTIONS] * has_collections)
    packet = pack_request(opcode, vb_id=VB, key=key, value=value, extras=extras)
    frames = peer.send(packet + pack_request(Opcode.NOOP))
    assert frames[-1].opcode == Opcode.NOOP
    assert len(frames) == 2 or (len(frames) == 1 and opcode in QUIET_FORMS)


def test_delete_answers_no_cas_to_plain_memcached_clients(node: MemoryNode) -> None:
    memcached, couchbase = node.connect(), node.connect()
    couchbase.hello()
    put(couchbase, b"v")
    assert couchbase.delete(VB, KEY).cas != 0
    memcached.ask(Opcode.SET, key=KEY, value=b"v", extras=bytes(8))
    deleted = memcached.delete(0, KEY)
    assert (deleted.status, deleted.cas) == (Status.OK, 0)
