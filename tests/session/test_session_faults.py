"""Faults on demand: what a request meets, and what happens to it."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.session.faults import RULES_MAX, FaultError, FaultTable
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import START_NS, node_for
from vbucket.model.ids import vbucket_of

MS = 1_000_000


ALWAYS = SimpleNamespace(random=lambda: 0.0)


@pytest.fixture
def node(request: pytest.FixtureRequest):
    return node_for(request)


@pytest.fixture
def peer(node):
    peer = node.connect()
    peer.hello(Feature.XERROR)
    peer.set(1, b"key", b"value")
    node.commit()
    return peer


def get(peer, vb_id=1):
    return peer.ask(Opcode.GET, vb_id=vb_id, key=b"key").status


def test_a_fault_answers_its_status_and_says_so(peer):
    fault = peer.state.shared.faults.add(draws=ALWAYS, opcode=Opcode.GET, status=Status.ETMPFAIL)
    answer = peer.ask(Opcode.GET, vb_id=1, key=b"key", opaque=9)
    assert (answer.status, answer.opaque) == (Status.ETMPFAIL, 9)
    assert b"fault 1 is set" in answer.value
    assert peer.set(1, b"key", b"").status == Status.OK, "another command"
    assert fault.met == 1
    assert ("fault", {"fault": 1, "opcode": 0, "vb_id": 1}) in peer.state.notes.lines


def test_a_fault_is_gone_after_its_count(peer):
    peer.state.shared.faults.add(draws=ALWAYS, opcode=Opcode.GET, status=Status.EBUSY, count=2)
    assert [get(peer) for _ in range(3)] == [Status.EBUSY, Status.EBUSY, Status.OK]
    assert peer.state.shared.faults.rules == []


def test_a_fault_meets_one_partition_and_no_command_without_one(peer):
    peer.state.shared.faults.add(draws=ALWAYS, vb_id=0, status=Status.EBUSY)
    assert get(peer, 0) == Status.EBUSY
    assert get(peer, 1) == Status.OK
    assert peer.ask(Opcode.NOOP).status == Status.OK, "its vbucket field means nothing"


@pytest.mark.all_partitions
def test_a_fault_finds_the_partition_of_a_client_that_knows_none(node):
    peer = node.connect()  # neither HELLO nor SELECT_BUCKET
    peer.state.shared.faults.add(draws=ALWAYS, vb_id=vbucket_of(b"key"), status=Status.EBUSY)
    assert peer.ask(Opcode.GET, key=b"key").status == Status.EBUSY
    assert peer.ask(Opcode.GET, key=b"other").status == Status.KEY_ENOENT


def test_a_fault_meets_the_quiet_form_too(peer):
    peer.state.shared.faults.add(draws=ALWAYS, opcode=Opcode.SET, status=Status.ENOMEM)
    (answer,) = peer.send(pack_request(Opcode.SETQ, vb_id=1, key=b"key", extras=bytes(8)))
    assert (answer.opcode, answer.status) == (Opcode.SETQ, Status.ENOMEM)


def test_a_fault_of_any_command_meets_the_handshake(node):
    peer = node.connect()
    peer.state.shared.faults.add(draws=ALWAYS, status=Status.EBUSY, count=1)
    assert peer.hello().status == Status.EBUSY
    assert peer.hello().status == Status.OK


def test_rollback_names_its_seqno_and_not_my_vbucket_brings_map(peer):
    peer.open()
    faults = peer.state.shared.faults
    faults.add(draws=ALWAYS, opcode=Opcode.DCP_STREAM_REQ, status=Status.ROLLBACK,
               rollback_seqno=5, count=1)  # fmt: skip
    faults.add(draws=ALWAYS, status=Status.NOT_MY_VBUCKET, opcode=Opcode.GET)
    answer = peer.stream(1)
    assert (answer.status, answer.value) == (Status.ROLLBACK, (5).to_bytes(8, "big"))
    assert peer.stream(1).status == Status.OK
    assert b'"name":"default"' in peer.ask(Opcode.GET, vb_id=1, key=b"key").value


def test_a_disconnect_answers_what_came_before_and_nothing_after(peer):
    peer.state.shared.faults.add(draws=ALWAYS, opcode=Opcode.GET, disconnects=True)
    frames = peer.send(
        pack_request(Opcode.NOOP, opaque=1)
        + pack_request(Opcode.GET, vb_id=1, key=b"key", opaque=2)
        + pack_request(Opcode.NOOP, opaque=3)
    )
    assert [frame.opaque for frame in frames] == [1]
    assert peer.state.is_closing
    assert peer.state.close_reason == "fault 1 disconnects"


def test_a_delay_holds_up_the_request_and_all_behind_it(node, peer):
    """Answers keep the order of the requests, so what follows waits too; more may arrive."""
    peer.state.shared.faults.add(draws=ALWAYS, opcode=Opcode.GET, delay_ms=100, count=1)
    session, state = peer.session, peer.state
    state.answers.clear()
    packets = [
        pack_request(Opcode.GET, vb_id=1, key=b"key", opaque=1),
        pack_request(Opcode.NOOP, opaque=2),
        pack_request(Opcode.NOOP, opaque=3),
    ]
    session.receive(packets[0] + packets[1], START_NS)
    assert (state.is_full, state.answers, state.pause.until_ns) == (True, [], START_NS + 100 * MS)
    session.receive(packets[2], START_NS + 50 * MS)
    session.resume(START_NS + 99 * MS)
    assert (state.is_full, state.answers) == (True, [])
    session.resume(START_NS + 100 * MS)
    assert not state.is_full
    frames = peer.decoder.feed(b"".join(state.answers))
    assert [(frame.opaque, frame.status) for frame in frames] == [(1, 0), (2, 0), (3, 0)]


def test_a_delay_can_come_before_an_error(peer):
    fault = peer.state.shared.faults.add(draws=ALWAYS, delay_ms=1, status=Status.EBUSY, count=1)
    peer.session.receive(pack_request(Opcode.NOOP), START_NS)
    peer.session.resume(START_NS + MS)
    (frame,) = peer.decoder.feed(b"".join(peer.state.answers))
    assert (frame.status, fault.met) == (Status.EBUSY, 1), "it is met once, and decided"


def test_what_is_never_answered_is_swallowed(node, peer):
    """BUFFER_ACK with an error: the window stays shut."""
    peer.open()
    peer.control(b"connection_buffer_size", b"100")
    peer.producer.unacked_bytes = 100
    peer.state.shared.faults.add(draws=ALWAYS, opcode=Opcode.DCP_BUFFER_ACK, status=Status.EINVAL)
    ack = pack_request(Opcode.DCP_BUFFER_ACK, extras=(100).to_bytes(4, "big"))
    assert peer.send(ack) == []
    assert peer.producer.unacked_bytes == 100


def test_answers_of_a_client_meet_no_fault(peer):
    peer.open()
    peer.state.shared.faults.add(draws=ALWAYS, disconnects=True)
    peer.send(b"\x81\x5c" + bytes(22))
    assert not peer.state.is_closing


@given(seed=st.integers(), probability=st.floats(0.01, 1))
def test_the_same_seed_meets_the_same_requests(seed, probability):
    def met():
        table = FaultTable()
        table.add(draws=random.Random(seed), status=Status.EBUSY, probability=probability)
        return [table.meet(0, 0) is not None for _ in range(50)]

    first = met()
    assert first == met()
    assert probability < 1 or all(first)


def test_the_first_rule_that_a_request_meets_decides():
    table = FaultTable()
    table.add(draws=SimpleNamespace(random=lambda: 0.9), status=Status.EBUSY, probability=0.5)
    second = table.add(draws=ALWAYS, status=Status.ENOMEM)
    table.add(draws=ALWAYS, status=Status.EINVAL)
    assert table.meet(0, 0) is second
    assert table.clear(second.fault_id) == 1
    assert table.clear(second.fault_id) == 0
    assert table.clear() == 2


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ({}, "do nothing"),
        ({"status": Status.OK}, "must not be acknowledged"),
        ({"status": Status.EBUSY, "disconnects": True}, "either"),
        ({"delay_ms": -1}, "delay"),
        ({"delay_ms": 10**9}, "delay"),
        ({"disconnects": True, "probability": 0}, "probability"),
        ({"disconnects": True, "probability": 1.1}, "probability"),
        ({"disconnects": True, "count": 0}, "count"),
    ],
)
def test_rules_that_make_no_sense(rule, why):
    with pytest.raises(FaultError, match=why):
        FaultTable().add(draws=ALWAYS, **rule)


def test_a_probability_is_told_as_the_fraction_that_it_is():
    fault = FaultTable().add(draws=ALWAYS, disconnects=True, probability=1)
    assert repr(fault.probability) == "1.0"


def test_rules_are_limited():
    table = FaultTable()
    for _ in range(RULES_MAX):
        table.add(draws=ALWAYS, disconnects=True)
    with pytest.raises(FaultError, match="limit"):
        table.add(draws=ALWAYS, disconnects=True)


def test_without_faults_nothing_is_looked_at(peer, monkeypatch):
    monkeypatch.setattr(FaultTable, "meet", lambda *_: pytest.fail("asked"))
    assert get(peer) == Status.OK
    assert peer.ask(Opcode.NOOP).status == Status.OK
