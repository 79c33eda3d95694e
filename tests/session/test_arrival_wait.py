"""Requests for a partition that is handed over to this node wait in their place, for so long."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from dcp.session.replication_port import WAIT_NS_MAX, ArrivalWait, ReplicaSender
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, pack_request
from dcp.wire.message import OpenFlag
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.engine.partition import VbState

VB, SERVED = 3, 4
KEY = b"\0k"
MS = 1_000_000
BEGAN_NS = 10**18


class Port:
    """What sessions know of replication."""

    def __init__(self) -> None:
        self.arriving: set[int] = set()

    def why_fenced(self, vb_id: int) -> str:
        return ""

    def open_feed(self, greeting: bytes, schedule: Callable[[], None]) -> ReplicaSender:
        raise AssertionError("no session of these tests becomes a feed")


class Arriving(MemoryNode):
    """A node that is a partition's master and does not serve it yet."""

    def __init__(self) -> None:
        super().__init__()
        self.port = Port()
        client = self.client()
        for vb_id in (VB, SERVED):
            client.set(vb_id, KEY, b"old")
        self.commit()
        self.engine.partitions[VB].state = VbState.FENCED
        self.port.arriving.add(VB)

    def client(self) -> Peer:
        peer = self.connect()
        peer.joins(self.port)
        peer.hello(Feature.XERROR, Feature.COLLECTIONS, Feature.MUTATION_SEQNO)
        return peer

    def arrive(self) -> None:
        self.engine.partitions[VB].state = VbState.ACTIVE
        self.port.arriving.clear()

    def go_elsewhere(self) -> None:
        self.engine.partitions[VB].state = VbState.REPLICA
        self.port.arriving.clear()


@pytest.fixture
def node() -> Arriving:
    return Arriving()


def put(vb_id: int, opaque: int = 0, value: bytes = b"new") -> bytes:
    return pack_request(
        Opcode.SET, vb_id=vb_id, key=KEY, extras=bytes(8), value=value, opaque=opaque
    )


def get(vb_id: int, opaque: int = 0) -> bytes:
    return pack_request(Opcode.GET, vb_id=vb_id, key=KEY, opaque=opaque)


def receive(peer: Peer, data: bytes) -> list[Frame]:
    peer.session.receive(data, peer.node.now_ns)
    return peer._answers()


def resume(peer: Peer) -> list[Frame]:
    peer.session.resume(peer.node.now_ns)
    return peer._answers()


def told(answers: list[Frame]) -> list[tuple[int, int]]:
    return [(answer.opaque, answer.status) for answer in answers]


# -- one connection --------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [1, 20])
def test_write_waits_and_is_answered_when_partition_is_served(node: Arriving, runs: int) -> None:
    peer = node.client()
    assert receive(peer, b"".join(put(VB, number) for number in range(runs))) == []
    assert peer.state.is_full
    assert resume(peer) == [], "it goes on waiting"
    assert not node.engine.keyspace.has_pending
    node.now_ns += WAIT_NS_MAX - 1
    node.arrive()
    assert told(resume(peer)) == [(number, Status.OK) for number in range(runs)]
    assert not peer.state.is_full
    assert not peer.state.pause.arrival.until_ns


def test_order_is_kept_and_what_comes_before_is_answered(node: Arriving) -> None:
    peer = node.client()
    noop = pack_request(Opcode.NOOP, opaque=1)
    requests = noop + put(SERVED, 2) + put(VB, 3) + get(SERVED, 4) + get(VB, 5) + put(SERVED, 6)
    assert told(receive(peer, requests)) == [(1, Status.OK), (2, Status.OK)]
    assert told(receive(peer, get(SERVED, 7))) == [], "it comes last"
    node.arrive()
    assert told(resume(peer)) == [(number, Status.OK) for number in range(3, 8)]


def test_a_write_is_refused_as_before_when_the_time_is_over(node: Arriving) -> None:
    peer = node.client()
    assert receive(peer, put(VB, 1) + put(SERVED, 2) + get(VB, 3)) == []
    node.now_ns += WAIT_NS_MAX - 1
    assert resume(peer) == []
    node.now_ns += 1
    answers = resume(peer)
    assert told(answers) == [(1, Status.ETMPFAIL), (2, Status.OK), (3, Status.ETMPFAIL)]
    assert "its replicas have not confirmed" in json.loads(answers[0].value)["error"]["context"]
    assert told(receive(peer, put(VB, 4))) == [(4, Status.ETMPFAIL)], "it has waited already"
    node.arrive()
    assert told(receive(peer, put(VB, 5))) == [(5, Status.OK)]


def test_who_has_waited_earns_it_back_in_time(node: Arriving) -> None:
    peer = node.client()
    receive(peer, put(VB))
    node.now_ns += WAIT_NS_MAX
    resume(peer)
    node.now_ns += 10 * MS
    assert receive(peer, put(VB, 1)) == []
    assert peer.state.pause.arrival.until_ns == node.now_ns + 10 * MS
    node.now_ns += 10 * MS
    assert told(resume(peer)) == [(1, Status.ETMPFAIL)]


def test_the_client_is_sent_on_if_the_partition_goes_elsewhere(node: Arriving) -> None:
    peer = node.client()
    assert receive(peer, put(VB, 1)) == []
    node.go_elsewhere()
    assert told(resume(peer)) == [(1, Status.NOT_MY_VBUCKET)]


def test_nothing_of_a_connection_that_is_gone_is_done_later(node: Arriving) -> None:
    peer = node.client()
    receive(peer, put(VB))
    peer.session.drop_received()
    node.arrive()
    assert resume(peer) == []
    assert not node.engine.keyspace.has_pending


# -- who waits -------------------------------------------------------------------------------------


def test_connections_wait_by_themselves(node: Arriving) -> None:
    early, late, other = node.client(), node.client(), node.client()
    assert receive(early, put(VB, 1)) == []
    node.now_ns += 60 * MS
    assert receive(late, put(VB, 2)) == []
    assert told(receive(other, put(SERVED, 3) + get(SERVED, 4))) == [(3, 0), (4, 0)]
    node.now_ns += 40 * MS
    assert told(resume(early)) == [(1, Status.ETMPFAIL)]
    assert resume(late) == []
    node.arrive()
    assert told(resume(late)) == [(2, Status.OK)]


def test_other_requests_do_not_wait(node: Arriving) -> None:
    peer = node.client()
    replica = pack_request(Opcode.GET_REPLICA, vb_id=VB, key=KEY, opaque=1)
    log = pack_request(Opcode.GET_FAILOVER_LOG, vb_id=VB, opaque=2)
    answers = receive(peer, replica + log + put(SERVED, 3) + get(SERVED, 4))
    assert [answer.opaque for answer in answers] == [1, 2, 3, 4]
    consumer = node.client()
    consumer.open(flags=OpenFlag.PRODUCER)
    assert consumer.stream(VB).status in {Status.ETMPFAIL, Status.NOT_MY_VBUCKET}


def test_a_write_with_a_frame_waits_and_so_does_a_counter(node: Arriving) -> None:
    peer = node.client()
    plain = put(VB, 1)
    flex = bytes([Magic.FLEX_REQUEST]) + plain[1:2] + bytes([0, plain[3]]) + plain[4:]
    assert receive(peer, flex) == []
    count = pack_request(Opcode.INCREMENT, vb_id=VB, key=b"\0n", extras=bytes(20), opaque=2)
    assert receive(peer, count) == []
    node.arrive()
    assert told(resume(peer)) == [(1, Status.OK), (2, Status.OK)]


def test_a_partition_fenced_for_another_reason_refuses_at_once(node: Arriving) -> None:
    node.port.arriving.clear()
    assert told(receive(node.client(), put(VB, 1))) == [(1, Status.ETMPFAIL)]


def test_clients_that_name_no_partition_do_not_wait(node: Arriving) -> None:
    peer = node.connect()
    peer.joins(node.port)
    node.port.arriving.add(0)
    store = pack_request(Opcode.SET, key=b"k", extras=bytes(8), opaque=1)
    flush = pack_request(Opcode.FLUSH, opaque=2)
    assert told(receive(peer, store)) == [(1, Status.OK)]
    client = node.client()
    client.session.receive(flush, node.now_ns)
    assert client.state.answers or client.state.unfinished, "it has begun"
    assert not client.state.pause.arrival.until_ns


def test_strangers_are_refused_at_once(node: Arriving) -> None:
    stranger = node.connect(is_loopback=False)
    stranger.joins(node.port)
    stranger.state.hello.hashes_keys = False
    assert told(receive(stranger, put(VB, 1))) == [(1, Status.EACCESS)]


# -- the credit ------------------------------------------------------------------------------------


def test_waits_one_after_the_other_share_the_credit() -> None:
    wait, waited_ns = ArrivalWait(), 0
    for began_ns in range(BEGAN_NS, BEGAN_NS + 40 * 30 * MS, 40 * MS):  # 30 ms in every 40
        if wait.wait(began_ns):
            end_ns = min(began_ns + 30 * MS, wait.until_ns)
            waited_ns += end_ns - began_ns
            wait.end(end_ns)
    assert WAIT_NS_MAX < waited_ns <= WAIT_NS_MAX + 40 * 30 * MS // 2


@pytest.mark.parametrize("jump_ns", [-(10**12), -1, 10**12])
def test_a_clock_that_is_set_ends_the_wait(jump_ns: int) -> None:
    wait = ArrivalWait()
    assert wait.wait(BEGAN_NS)
    assert wait.until_ns == BEGAN_NS + WAIT_NS_MAX
    assert not wait.wait(BEGAN_NS + jump_ns)
    assert not wait.until_ns
