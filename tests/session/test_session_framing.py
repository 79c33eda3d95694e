"""Framing: pipelines cut anywhere, bad frames, flex frames, limits; nothing raises or grows."""

from __future__ import annotations

import struct
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.session.access.rights import EVERYTHING, MESSAGES_TO_CONSUMERS, Rights, Role
from dcp.session.kv.values import SKIPPED_BYTES_MAX
from dcp.session.node_facts import BODY_BYTES_MAX_BEFORE_LOGIN, Limits
from dcp.session.session import BODY_EXTRA_BYTES
from dcp.session.state import ANSWER_BYTES_MAX
from dcp.wire.feature import Feature
from dcp.wire.frame import FLEX_HEADER, HEADER, pack_request, pack_response
from dcp.wire.message import StreamRequest, pack_buffer_ack, pack_open, pack_stream_request
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status
from support.memory_node import START_NS, MemoryNode, Peer, node_for
from vbucket.engine.partition import Hold, VbState
from vbucket.model.ids import NUM_VBUCKETS

VALUE_MAX = 300
LIMITS = Limits(value_bytes_max=VALUE_MAX)
BODY_MAX = VALUE_MAX + BODY_EXTRA_BYTES


@pytest.fixture
def node(request: pytest.FixtureRequest) -> MemoryNode:
    return node_for(request)


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    return node.connect()


def pack_flex(opcode: int, framing: bytes, *, key: bytes = b"", extras: bytes = b"") -> bytes:
    body = len(framing) + len(extras) + len(key)
    head = FLEX_HEADER.pack(0x08, opcode, len(framing), len(key), len(extras), 0, 0, body, 9, 0)
    return head + framing + extras + key


def test_stores_wait_while_the_answers_are_enough(
    node: MemoryNode, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal for a partition that is elsewhere carries the map of the cluster."""
    monkeypatch.setattr(node, "bucket_config", lambda: bytes(ANSWER_BYTES_MAX))
    peer.hello(Feature.COLLECTIONS, Feature.MUTATION_SEQNO)
    requests = [
        pack_request(Opcode.SET, vb_id=vb_id, key=b"\0k", extras=bytes(8))
        for vb_id in (NUM_VBUCKETS, 0, 0, 0)
    ]
    peer.session.receive(b"".join(requests), node.now_ns)
    assert peer.state.is_full
    assert len(peer.state.answers) == 1
    assert not node.engine.keyspace.has_pending
    statuses = [answer.status for answer in peer.send(b"")]
    assert statuses == [Status.NOT_MY_VBUCKET, Status.OK, Status.OK, Status.OK]


# -- flex frames -------------------------------------------------------------------------------


def test_flex_request_with_barrier_does_what_plain_one_does(peer: Peer) -> None:
    peer.set(0, b"k", b"v")
    (found,) = peer.send(pack_flex(Opcode.GET, b"\0", key=b"k"))
    assert (found.status, found.value, found.opaque) == (Status.OK, b"v", 9)
    assert found.magic == Magic.RESPONSE
    (noop,) = peer.send(pack_flex(Opcode.NOOP, b"\0\0"))
    assert noop.status == Status.OK


def test_a_flex_request_without_frame_infos_is_fine(peer: Peer) -> None:
    (stored,) = peer.send(pack_flex(Opcode.SET, b"", key=b"k", extras=bytes(8)))
    assert stored.status == Status.OK


@pytest.mark.parametrize(
    "framing",
    [
        b"\x11\x01",  # durability
        b"\x22\0\1",  # stream id
        b"\x45guest",  # impersonate
        b"\x50",  # preserve TTL
        b"\xf0\x00",  # escaped id 15
        b"\xf0",  # escaped id, cut
        b"\x00\x11\x01",  # a barrier, then durability
    ],
)
def test_any_other_frame_info_is_unknown_frame_info(peer: Peer, framing: bytes) -> None:
    (answer,) = peer.send(pack_flex(Opcode.SET, framing, key=b"k", extras=bytes(8)))
    assert answer.status == Status.UNKNOWN_FRAME_INFO
    assert peer.ask(Opcode.GET, key=b"k").status == Status.KEY_ENOENT


@pytest.mark.parametrize("framing", [b"\x05ab", b"\x0f", b"\x0f\x05ab"])
def test_a_frame_info_that_is_cut_short_is_einval(peer: Peer, framing: bytes) -> None:
    (answer,) = peer.send(pack_flex(Opcode.NOOP, framing))
    assert answer.status == Status.EINVAL


def test_framing_extras_beyond_the_body_are_einval(peer: Peer) -> None:
    good = pack_flex(Opcode.GET, b"\0", key=b"k")
    (answer,) = peer.send(good[:2] + b"\xff" + good[3:])
    assert answer.status == Status.EINVAL


# -- bad frames --------------------------------------------------------------------------------


def test_a_byte_that_begins_no_request_closes_with_a_reason(node: MemoryNode) -> None:
    noop = pack_request(Opcode.NOOP)
    for magic in set(range(256)) - {0x80, 0x81, 0x83, 0x08}:
        peer = node.connect()
        answers = peer.send(noop + bytes([magic]) + noop[1:] + noop)
        assert len(answers) == 1, "what came before is answered, what comes after is not"
        assert peer.state.is_closing
        assert f"0x{magic:02x}" in peer.state.close_reason


def test_another_protocol_is_noticed_before_24_bytes_are_there(peer: Peer) -> None:
    assert peer.send(b"GET / HTTP/1.1\r\n") == []
    assert peer.state.is_closing


def test_a_header_is_waited_for_as_long_as_it_may_be_one(peer: Peer) -> None:
    packet = pack_request(Opcode.NOOP)
    assert peer.send(packet[:23]) == []
    assert not peer.state.is_closing
    assert len(peer.send(packet[23:])) == 1


@pytest.mark.parametrize("magic", [Magic.RESPONSE, Magic.SERVER_RESPONSE])
def test_responses_of_the_client_are_ignored(peer: Peer, magic: int) -> None:
    response = pack_response(Opcode.DCP_NOOP, value=b"whatever", key=b"k")
    response = bytes([magic]) + response[1:]
    (answer,) = peer.send(response + pack_request(Opcode.NOOP, opaque=4))
    assert answer.opaque == 4


def test_extras_and_key_longer_than_the_body_are_einval(peer: Peer) -> None:
    head = HEADER.pack(0x80, Opcode.HELLO, 5, 5, 0, 0, 4, 0, 0)
    answer, noop = peer.send(head + b"abcd" + pack_request(Opcode.NOOP))
    assert (answer.status, noop.status) == (Status.EINVAL, Status.OK)


def oversized(opcode: int, body_bytes: int) -> bytes:
    return HEADER.pack(0x80, opcode, 1, 8, 0, 0, body_bytes, 0, 0)


@pytest.mark.parametrize("opcode", [Opcode.SET, Opcode.SETQ, Opcode.HELLO, Opcode.GET, 0x66])
@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 20])
def test_a_body_over_the_limit_is_refused_and_skipped(
    node: MemoryNode, opcode: int, piece_bytes: int
) -> None:
    peer = node.connect(limits=LIMITS)
    noop = pack_request(Opcode.NOOP)
    for body_bytes in (BODY_MAX + 1, BODY_MAX * 3):
        data = noop + oversized(opcode, body_bytes) + bytes(body_bytes) + noop
        answers = []
        for at in range(0, len(data), piece_bytes):
            answers += peer.send(data[at : at + piece_bytes])
            assert held_bytes(peer) <= 24
        assert [frame.status for frame in answers] == [Status.OK, Status.E2BIG, Status.OK]
        assert [frame.opcode for frame in answers] == [Opcode.NOOP, opcode, Opcode.NOOP]
    assert not peer.state.is_closing


def test_the_refusal_comes_before_the_body(node: MemoryNode) -> None:
    peer = node.connect(limits=LIMITS)
    peer.hello(Feature.XERROR)
    (refused,) = peer.send(oversized(Opcode.SET, SKIPPED_BYTES_MAX))
    assert refused.status == Status.E2BIG
    assert b"setting value_bytes_max" in refused.value
    for _ in range(10):
        assert peer.send(bytes(1 << 20)) == []
    assert (held_bytes(peer), peer.state.is_closing) == (0, False)


def test_a_body_that_no_client_means_closes_the_connection(node: MemoryNode) -> None:
    for magic, body_bytes in ((0x80, SKIPPED_BYTES_MAX + 1), (0x81, BODY_MAX + 1)):
        peer = node.connect(limits=LIMITS)
        head = HEADER.pack(magic, Opcode.SET, 1, 8, 0, 0, body_bytes, 0, 0)
        assert peer.send(head + bytes(100)) == []
        assert peer.state.is_closing
        assert str(body_bytes) in peer.state.close_reason
        assert held_bytes(peer) <= 124


@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
@pytest.mark.parametrize("is_removed", [False, True])
@pytest.mark.parametrize("value_bytes", [LIMITS.value_bytes_max + 1, BODY_MAX * 2])
def test_refused_set_removes_document_where_setting_says_so(
    node: MemoryNode, piece_bytes: int, is_removed: bool, value_bytes: int
) -> None:
    peer = node.connect(limits=LIMITS._replace(oversized_set_removes=is_removed))
    peer.hello()
    statuses = []
    for opcode, cas in (
        (Opcode.ADD, 0), (Opcode.REPLACE, 0), (Opcode.SET, 5), (Opcode.SET, 0), (Opcode.SETQ, 0),
    ):  # fmt: skip
        peer.set(0, b"k", b"old")
        node.commit()
        data = pack_request(opcode, key=b"k", value=bytes(value_bytes), extras=bytes(8), cas=cas)
        answers = []
        for at in range(0, len(data), piece_bytes):
            answers += peer.send(data[at : at + piece_bytes])
        assert [frame.status for frame in answers] == [Status.E2BIG]
        statuses.append(peer.ask(Opcode.GET, key=b"k").status)
        assert peer.must_wait == bool(statuses[-1]), "the deletion is on disk before the answer"
    removed = [Status.KEY_ENOENT if is_removed else Status.OK] * 2
    assert statuses == [Status.OK] * 3 + removed


def test_a_refused_set_of_a_user_without_rights_removes_nothing(node: MemoryNode) -> None:
    peer = node.connect(limits=LIMITS._replace(oversized_set_removes=True))
    peer.hello()
    peer.set(0, b"k", b"old")
    peer.state.login.logged_in("reader", Rights({Role.READ: (EVERYTHING,)}))
    (refused,) = peer.send(oversized(Opcode.SET, BODY_MAX + 1) + bytes(8) + b"k")
    assert refused.status == Status.E2BIG
    peer.send(bytes(BODY_MAX - 8))
    assert peer.ask(Opcode.GET, key=b"k").status == Status.OK


def test_before_login_a_body_is_small(node: MemoryNode) -> None:
    stranger = node.connect(is_loopback=False)
    stranger.send(oversized(Opcode.HELLO, BODY_BYTES_MAX_BEFORE_LOGIN + 1))
    assert stranger.state.is_closing


def test_nothing_is_kept_of_what_comes_after_the_close(peer: Peer) -> None:
    peer.send(pack_request(Opcode.QUIT))
    for _ in range(10):
        assert peer.send(bytes(1000)) == []
    assert held_bytes(peer) == 0


# -- what is kept is bounded -------------------------------------------------------------------


def held_bytes(peer: Peer) -> int:
    """Return what the session keeps of input."""
    return len(peer.state.buffer) + len(peer.session._gathered)


def test_large_packet_is_gathered_without_a_copy_for_each_piece(peer: Peer) -> None:
    value = bytes(1_000_000)
    packet = pack_request(Opcode.SET, key=b"k", value=value, extras=bytes(8))
    noop = pack_request(Opcode.NOOP)
    peer.send(noop[:10])
    assert len(peer.send(noop[10:] + packet[:40])) == 1
    gathered = peer.session._gathered
    for at in range(40, len(packet) - 1000, 1000):
        assert peer.send(packet[at : at + 1000]) == []
        assert peer.session._gathered is gathered
        assert len(gathered) == at + 1000
        assert peer.state.buffer == b""
    answers = peer.send(packet[len(gathered) :] + noop + noop[:5])
    assert [answer.opcode for answer in answers] == [Opcode.SET, Opcode.NOOP]
    assert peer.send(noop[5:])[0].status == Status.OK
    assert peer.ask(Opcode.GET, key=b"k").value == value


@pytest.mark.all_partitions
@pytest.mark.parametrize(
    "opcode", [Opcode.GET, Opcode.STAT, Opcode.GET_ALL_VB_SEQNOS, Opcode.GET_ERROR_MAP, 0xB5]
)
def test_client_that_does_not_read_is_not_answered_without_bound(
    node: MemoryNode, opcode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = b"x" * 500_000
    monkeypatch.setattr(node, "stats", lambda _group: [("name", big.decode())])
    monkeypatch.setattr(node, "global_config", lambda: big)
    peer = node.connect()
    peer.set(0, b"k", big)
    key = b"k" if opcode == Opcode.GET else b""
    value = b"\0\2" if opcode == Opcode.GET_ERROR_MAP else b""
    count = 2000
    peer.session.receive(pack_request(opcode, key=key, value=value) * count, START_NS)
    assert peer.state.is_full
    assert sum(map(len, peer.state.answers)) <= ANSWER_BYTES_MAX + 2 * len(big)
    answered = 0
    for _ in range(count):
        answered += len([a for a in peer._answers() if opcode != Opcode.STAT or not a.key])
        if not peer.state.is_full:
            break
        peer.session.resume(START_NS)
    assert answered == count


def test_not_my_vbucket_with_its_configuration_is_bounded_too(
    node: MemoryNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "bucket_config", lambda: bytes(10_000))
    peer = node.connect()
    peer.hello()
    peer.session.receive(pack_request(Opcode.GET, key=b"k", vb_id=2000) * 5000, START_NS)
    assert sum(map(len, peer.state.answers)) <= ANSWER_BYTES_MAX + 20_000


# -- the same bytes, cut anywhere --------------------------------------------------------------


def store_extras(expiry: int = 0) -> bytes:
    return struct.pack(">II", 1, expiry)


KEYS = st.sampled_from([b"a", b"b", b"\0a", b"\x08c", b"k" * 250, b""])
STORES = st.builds(
    lambda opcode, key, value, cas, expiry, vb_id, opaque: pack_request(
        opcode, key=key, value=value, cas=cas, extras=store_extras(expiry), vb_id=vb_id,
        opaque=opaque,
    ),
    st.sampled_from([Opcode.SET, Opcode.SETQ, Opcode.ADD, Opcode.REPLACEQ]),
    KEYS,
    st.sampled_from([b"", b"v", bytes(VALUE_MAX), bytes(VALUE_MAX + 1)]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([0, 0, 1]),
    st.sampled_from([0, 1, 1024]),
    st.integers(0, 3),
)  # fmt: skip
READS = st.builds(
    lambda opcode, key, vb_id: pack_request(opcode, key=key, vb_id=vb_id),
    st.sampled_from([Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ, Opcode.DELETE]),
    KEYS,
    st.sampled_from([0, 1, 1024]),
)
OTHERS = st.sampled_from(
    [
        pack_request(Opcode.NOOP, opaque=77),
        pack_request(Opcode.HELLO, value=b"\0\4\0\7"),
        pack_request(Opcode.HELLO, value=b"\0\x12"),
        pack_request(Opcode.VERSION),
        pack_request(0x66, key=b"unknown"),
        pack_request(Opcode.STAT),
        pack_request(Opcode.GET_FAILOVER_LOG),
        pack_open(b"name", 1),
        pack_stream_request(0, StreamRequest(0, 0, 10, 0, 0, 0), 5),
        pack_request(Opcode.DCP_CONTROL, key=b"enable_noop", value=b"true"),
        pack_buffer_ack(100),
        pack_flex(Opcode.GET, b"\0", key=b"a"),
        pack_flex(Opcode.GET, b"\x50", key=b"a"),
        pack_response(Opcode.DCP_NOOP),
        pack_request(Opcode.QUIT),
        oversized(Opcode.SET, BODY_MAX + 1) + bytes(10),
        b"\x42 is no magic",
    ]
)
PIPELINES = st.lists(st.one_of(STORES, READS, OTHERS), max_size=12)


class Outcome(NamedTuple):
    """What a peer can tell of a session."""

    answers: bytes
    is_closing: bool
    high_seqnos: list[int]
    entries: bytes
    """What would go into the log."""
    wait_group: int


def outcome(pieces: list[bytes], node: MemoryNode | None = None) -> Outcome:
    node = node or PIPELINE_NODE
    before = [part.high_seqno for part in node.engine.partitions[:2]]
    assert not any(before), "the node is as new"
    peer = node.connect(limits=LIMITS)
    answers: list[bytes] = []
    for piece in pieces:
        peer.session.receive(piece, START_NS)
        answers += peer.state.answers
        peer.state.answers.clear()
        while peer.state.is_full:  # a batch of dear commands lets others in between
            peer.session.resume(START_NS)
            answers += peer.state.answers
            peer.state.answers.clear()
    after = [part.high_seqno for part in node.engine.partitions[:2]]
    if peer.state.producer is not None:
        peer.state.producer.close()
    group = node.engine.keyspace.take_group()
    wait_group = peer.state.wait_group - node.engine.commits.committed_group
    node.crash()
    entries = b"" if group is None else group.payload
    return Outcome(b"".join(answers), peer.state.is_closing, after, entries, wait_group)


PIPELINE_NODE = MemoryNode(partitions=8)
"""Nothing is ever committed on it, so a crash makes it new again."""


@settings(max_examples=60, deadline=None)
@given(PIPELINES, st.data())
def test_same_bytes_get_same_answers_wherever_they_are_cut(
    packets: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(packets)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    pieces = [
        stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
    ]
    assert outcome(pieces) == outcome([stream])


def test_byte_by_byte_is_the_same_as_at_once(node: MemoryNode) -> None:
    stream = (
        pack_request(Opcode.SET, key=b"a", value=b"v", extras=bytes(8))
        + pack_request(Opcode.GETK, key=b"a")
        + pack_request(Opcode.HELLO, value=b"\0\4")
        + pack_request(Opcode.GET, key=b"missing", vb_id=3)
        + pack_request(Opcode.QUIT)
    )
    assert outcome([bytes([byte]) for byte in stream], node) == outcome([stream], node)


# -- runs of SETs ------------------------------------------------------------------------------

TOKENS_AND_COLLECTIONS = pack_request(Opcode.HELLO, value=b"\0\x04\0\x07\0\x0b\0\x12")
LONGEST_KEY = b"\0" + b"k" * 250


def one_set(opcode: int = Opcode.SET, **fields: int | bytes) -> bytes:
    """Return a SET as a run takes it, but for these fields."""
    usual = {"key": b"\0a", "value": b"v", "extras": store_extras(), "vb_id": 1, "opaque": 7}
    return pack_request(opcode, **(usual | fields))


NO_PART_OF_A_RUN = (
    one_set(Opcode.SETQ),
    one_set(Opcode.ADD),
    one_set(Opcode.GET, extras=b"", value=b""),
    one_set(cas=1),
    one_set(extras=store_extras(5)),
    one_set(extras=b""),
    one_set(extras=bytes(9)),
    one_set(datatype=2),
    one_set(vb_id=1024),
    one_set(value=bytes(VALUE_MAX + 1)),
    one_set(key=b""),
    one_set(key=b"\0"),
    one_set(key=b"\x08c"),
    one_set(key=LONGEST_KEY + b"k"),
    pack_response(Opcode.SET),
    pack_flex(Opcode.SET, b"\0", key=b"\0a", extras=bytes(8)),
    HEADER.pack(0x80, Opcode.SET, 20, 8, 0, 1, 8 + 10, 0, 0) + store_extras() + b"\0short key",
    oversized(Opcode.SET, BODY_MAX + 1) + bytes(40),
    one_set()[:-1],
    one_set()[:30],
)


@pytest.mark.parametrize("odd", [*NO_PART_OF_A_RUN, one_set(datatype=1), one_set(key=LONGEST_KEY)])
def test_a_run_of_sets_is_what_each_of_them_is_alone(odd: bytes) -> None:
    around = [one_set(), one_set(opaque=8), odd, one_set(vb_id=0), one_set(opaque=9)]
    for packets in (around, around[:3], around[2:4]):
        alone = outcome([TOKENS_AND_COLLECTIONS, *packets])
        assert outcome([TOKENS_AND_COLLECTIONS + b"".join(packets)]) == alone


def test_a_run_is_for_partitions_that_take_writes(node: MemoryNode) -> None:
    peer = node.connect()
    peer.send(TOKENS_AND_COLLECTIONS)
    node.engine.partitions[1].state = VbState.REPLICA
    node.engine.partitions[2].hold_writes(Hold.LOG_FULL, "the disk is full")
    answers = peer.send(one_set(vb_id=0) + one_set(vb_id=1) + one_set(vb_id=2))
    assert [answer.status for answer in answers] == [
        Status.OK, Status.NOT_MY_VBUCKET, Status.ETMPFAIL,
    ]  # fmt: skip


def test_sets_that_go_the_usual_way_are_taken_together(node: MemoryNode) -> None:
    peer = node.connect()
    peer.send(TOKENS_AND_COLLECTIONS)
    taken: list[bytes] = []
    store = peer.session._documents.store

    def one_by_one(*fields: int) -> None:
        taken.append(b"one")
        store(*fields)

    peer.session._hot[Opcode.SET] = one_by_one
    assert len(peer.send(one_set() * 9)) == 9
    assert not taken, "a run takes all of them"


# -- garbage -----------------------------------------------------------------------------------


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A pipeline with some of its bytes changed, cut out or doubled."""
    stream = bytearray(b"".join(draw(PIPELINES)))
    for _ in range(draw(st.integers(0, 6))):
        if not stream:
            break
        at = draw(st.integers(0, len(stream) - 1))
        match draw(st.sampled_from(["change", "cut", "double"])):
            case "change":
                stream[at] = draw(st.integers(0, 255))
            case "cut":
                del stream[at : at + draw(st.integers(1, 30))]
            case _:
                stream[at:at] = stream[at : at + draw(st.integers(1, 30))]
    return bytes(stream)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(mutated(), st.binary(max_size=200)), max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_garbage_never_raises_and_never_grows_the_buffer(
    pieces: list[bytes], is_loopback: bool, has_features: bool
) -> None:
    peer = GARBAGE_NODE.connect(is_loopback=is_loopback, limits=LIMITS)
    if has_features:
        peer.hello(Feature.COLLECTIONS, Feature.XERROR, Feature.MUTATION_SEQNO)
        peer.send(pack_open(b"name", 1))
    largest = max(map(len, pieces), default=0)
    for piece in pieces:
        peer.send(piece)
        assert held_bytes(peer) <= 24 + BODY_MAX + largest
        if peer.state.producer is not None:
            peer.drain()
    if peer.state.producer is not None:
        peer.state.producer.close()


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 255),
    st.binary(max_size=60),
    st.binary(max_size=60),
    st.binary(max_size=60),
    st.booleans(),
)
def test_any_extras_key_and_value_of_any_opcode_get_min_refusal(
    opcode: int, extras: bytes, key: bytes, value: bytes, is_dcp: bool
) -> None:
    peer = GARBAGE_NODE.connect()
    peer.hello(Feature.COLLECTIONS, Feature.XERROR)
    if is_dcp:
        peer.send(pack_open(b"name", 1))
        peer.control(b"enable_noop", b"true")
    peer.send(pack_request(opcode, extras=extras, key=key, value=value))
    if opcode not in {Opcode.QUIT, Opcode.QUITQ} and not (
        is_dcp and opcode in MESSAGES_TO_CONSUMERS
    ):
        assert peer.ask(Opcode.NOOP).status == Status.OK
    if peer.state.producer is not None:
        peer.state.producer.close()


GARBAGE_NODE = MemoryNode()
