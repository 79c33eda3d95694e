"""Requests into large documents: in steps, in turn, with the same answers and conditions."""

from __future__ import annotations

import struct
import tracemalloc

import pytest

from dcp.session.answers.long_requests import (
    QUEUED_MAX,
    QUEUED_PER_USER_MAX,
    SILENT_NS,
    LongQueue,
    LongRequest,
    Steps,
)
from dcp.session.subdoc.json_scan import INLINE_BYTES, STEP_BYTES
from dcp.session.subdoc.subdoc_commands import ATTEMPTS_MAX
from dcp.wire.frame import Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status
from support.memory_node import MemoryNode, Peer
from support.subdoc_client import (
    ADD,
    MACRO,
    XATTR,
    aware_peer,
    body,
    lookup_value,
    mutation_value,
    results,
)
from vbucket.engine.lifecycle import set_state
from vbucket.engine.partition import VbState

GET, UPSERT, UNIQUE = Opcode.SUBDOC_GET, Opcode.SUBDOC_DICT_UPSERT, Opcode.SUBDOC_ARRAY_ADD_UNIQUE
STEPS = 4
ITEMS = STEPS * STEP_BYTES // 2
ARRAY = b"[" + b"1," * (ITEMS - 1) + b"2]"
DOCUMENT = b'{"n":7,"list":' + ARRAY + b"}"


@pytest.fixture
def node() -> MemoryNode:
    made = MemoryNode()
    aware_peer(made).set(5, b"doc", DOCUMENT)
    aware_peer(made).set(5, b"small", b'{"n":1}')
    made.commit()
    return made


class Slow:
    """A peer whose session is resumed one step at a time."""

    def __init__(self, node: MemoryNode, queue: LongQueue | None = None) -> None:
        self.node = node
        self.peer: Peer = aware_peer(node)
        if queue is not None:
            state = self.peer.state
            state.shared = state.shared._replace(long_queue=queue)

    def begin(self, opcode: int, value: bytes, **parts: int | bytes) -> None:
        """Send a request that is not answered yet."""
        packet = pack_request(opcode, vb_id=5, key=b"doc", value=value, **parts)  # type: ignore[arg-type]
        self.peer.session.receive(packet, self.node.now_ns)
        assert self.peer.state.unfinished is not None

    @property
    def request(self) -> LongRequest:
        """What is not finished."""
        request = self.peer.state.unfinished
        assert isinstance(request, LongRequest)
        return request

    def step(self) -> list[Frame]:
        """Take a step; return the answers."""
        self.peer.session.resume(self.node.now_ns)
        answers = b"".join(self.peer.state.answers)
        self.peer.state.answers.clear()
        return self.peer.decoder.feed(answers)

    def finish(self) -> Frame:
        """Take the other steps; return the answer."""
        for _ in range(1_000):
            if answers := self.step():
                assert self.peer.state.unfinished is None
                return answers[0]
        raise AssertionError("it has no end")


def look_up_all(slow: Slow) -> None:
    slow.begin(
        Opcode.SUBDOC_MULTI_LOOKUP,
        lookup_value((GET, 0, b"list[-1]"), (GET, 0, b"n"), (GET, 0, b"list[%d]" % ITEMS)),
    )


def upsert(value: bytes = b"8") -> bytes:
    return mutation_value((UPSERT, 0, b"n", value))


def test_others_are_answered_between_two_steps(node: MemoryNode) -> None:
    slow, other = Slow(node), aware_peer(node)
    look_up_all(slow)
    steps = 0
    while not (answers := slow.step()):
        steps += 1
        assert body(other, b"small") == b'{"n":1}'
    assert steps >= STEPS
    assert results(answers[0].value) == [(0, b"2"), (0, b"7"), (Status.SUBDOC_PATH_ENOENT, b"")]


def test_answers_keep_the_order_of_the_requests(node: MemoryNode) -> None:
    slow = Slow(node)
    look_up_all(slow)
    behind = pack_request(Opcode.GET, vb_id=5, key=b"small", opaque=9)
    slow.peer.session.receive(behind, node.now_ns)
    assert slow.peer.state.held_bytes >= len(behind)
    answers: list[Frame] = []
    while len(answers) < 2:
        answers += slow.step()
    assert [answer.opcode for answer in answers] == [Opcode.SUBDOC_MULTI_LOOKUP, Opcode.GET]


def test_a_change_keeps_what_others_changed_meanwhile(node: MemoryNode) -> None:
    slow, other = Slow(node), aware_peer(node)
    slow.begin(Opcode.SUBDOC_MULTI_MUTATION, upsert())
    assert not slow.step()
    other.set(5, b"doc", b'{"other":1,' + DOCUMENT[1:])
    assert slow.finish().status == 0
    assert body(other, b"doc") == b'{"other":1,"n":8,' + DOCUMENT[7:]


def test_a_cas_is_compared_when_the_change_is_stored(node: MemoryNode) -> None:
    slow, other = Slow(node), aware_peer(node)
    cas = other.ask(Opcode.GET, vb_id=5, key=b"doc").cas
    slow.begin(Opcode.SUBDOC_MULTI_MUTATION, upsert(), cas=cas)
    assert not slow.step()
    other.set(5, b"doc", DOCUMENT)
    assert slow.finish().status == Status.KEY_EEXISTS
    assert body(other, b"doc") == DOCUMENT


def test_a_lock_that_came_meanwhile_holds(node: MemoryNode) -> None:
    slow, other = Slow(node), aware_peer(node)
    slow.begin(Opcode.SUBDOC_MULTI_MUTATION, upsert())
    assert not slow.step()
    assert (
        other.ask(Opcode.GET_AND_LOCK, vb_id=5, key=b"doc", extras=struct.pack(">I", 15)).status
        == 0
    )
    assert slow.finish().status == Status.LOCKED


def test_a_document_that_is_gone_meanwhile_is_not_found(node: MemoryNode) -> None:
    slow, other = Slow(node), aware_peer(node)
    slow.begin(Opcode.SUBDOC_MULTI_MUTATION, upsert())
    assert not slow.step()
    other.delete(5, b"doc")
    assert slow.finish().status == Status.KEY_ENOENT


def test_a_partition_that_left_meanwhile_is_not_changed(node: MemoryNode) -> None:
    for begin in (look_up_all, lambda slow: slow.begin(Opcode.SUBDOC_MULTI_MUTATION, upsert())):
        slow = Slow(node)
        begin(slow)
        assert not slow.step()
        set_state(node.engine, 5, VbState.REPLICA)
        assert slow.finish().status == Status.NOT_MY_VBUCKET
        set_state(node.engine, 5, VbState.ACTIVE)


def test_one_that_is_always_overtaken_gives_up(node: MemoryNode) -> None:
    slow, other = Slow(node), aware_peer(node)
    slow.begin(Opcode.SUBDOC_MULTI_MUTATION, upsert())
    for times in range(STEPS * 10 * ATTEMPTS_MAX):
        if answers := slow.step():
            assert answers[0].status == Status.ETMPFAIL
            assert times >= ATTEMPTS_MAX
            return
        other.set(5, b"doc", DOCUMENT)
    raise AssertionError("it goes on for ever")


def test_a_removed_user_gets_nothing_more(node: MemoryNode) -> None:
    slow = Slow(node)
    look_up_all(slow)
    slow.peer.state.login.user = "app"
    slow.peer.state.login.rights_changed(None)
    assert slow.finish().status == Status.AUTH_STALE


def test_macros_tell_of_the_change_as_it_is_stored(node: MemoryNode) -> None:
    slow, other = Slow(node), aware_peer(node)
    slow.begin(
        Opcode.SUBDOC_MULTI_MUTATION,
        mutation_value(
            (UPSERT, XATTR | MACRO, b"x", b'"${Mutation.CAS}"'), (UPSERT, 0, b"n", b"8")
        ),
    )
    for _ in range(3):
        slow.step()
        node.now_ns += 1_000_000_000
    answer = slow.finish()
    assert answer.status == 0
    found = other.ask(
        Opcode.SUBDOC_MULTI_LOOKUP, vb_id=5, key=b"doc", value=lookup_value((GET, XATTR, b"x"))
    )
    text = b'"0x%b"' % answer.cas.to_bytes(8, "little").hex().encode()
    assert results(found.value) == [(0, text)]


def test_many_changes_of_a_large_array(node: MemoryNode) -> None:
    slow = Slow(node)
    values = [b"%d" % number for number in range(100, 115)]
    slow.begin(
        Opcode.SUBDOC_MULTI_MUTATION,
        mutation_value(*((UNIQUE, 0, b"list", value) for value in values)),
    )
    passes = 0
    while not (answers := slow.step()):
        passes += 1
    assert answers[0].status == 0
    assert passes < 2 * STEPS + 2 * len(values), "the document is scanned once"
    assert body(slow.peer, b"doc") == DOCUMENT[:-2] + b"," + b",".join(values) + b"]}"
    slow.begin(Opcode.SUBDOC_MULTI_MUTATION, mutation_value((UNIQUE, 0, b"list", b"107")))
    assert slow.finish().value[1:] == Status.SUBDOC_PATH_EEXISTS.to_bytes(2, "big")


def test_a_large_value_takes_steps_too(node: MemoryNode) -> None:
    slow = Slow(node)
    packet = pack_request(
        Opcode.SUBDOC_MULTI_MUTATION, vb_id=5, key=b"new", extras=bytes([ADD]),
        value=mutation_value((UPSERT, 0, b"a", ARRAY)),
    )  # fmt: skip
    slow.peer.session.receive(packet, node.now_ns)
    assert slow.peer.state.held_bytes >= len(ARRAY)
    steps = 0
    while not (answers := slow.step()):
        steps += 1
    assert steps >= STEPS
    assert answers[0].status == 0
    assert body(slow.peer, b"new") == b'{"a":' + ARRAY + b"}"


def test_one_request_at_a_time_takes_steps(node: MemoryNode) -> None:
    queue = LongQueue()
    first, second = Slow(node, queue), Slow(node, queue)
    look_up_all(first)
    look_up_all(second)
    assert not second.step()
    assert second.peer.state.pause.until_ns > node.now_ns
    assert second.request.steps is None, "it has no document yet"
    assert first.finish().status == Status.SUBDOC_MULTI_PATH_FAILURE
    assert not second.step(), "it waits until it may ask again"
    node.now_ns = second.peer.state.pause.until_ns
    assert second.finish().status == Status.SUBDOC_MULTI_PATH_FAILURE
    assert not len(queue)


def test_one_that_does_not_go_on_loses_its_turn(node: MemoryNode) -> None:
    queue = LongQueue()
    first, second = Slow(node, queue), Slow(node, queue)
    look_up_all(first)
    look_up_all(second)
    assert not first.step()
    node.now_ns += 10 * SILENT_NS
    assert not second.step(), "the loop may have been busy"
    assert first.request.steps is not None
    while first.request.steps is not None:
        node.now_ns = second.peer.state.pause.until_ns
        assert not second.step() or first.request.steps is None
    second.peer.state.pause.until_ns = 0
    assert second.finish().status == Status.SUBDOC_MULTI_PATH_FAILURE
    assert first.request.steps is None, "it keeps no document"
    assert first.finish().status == Status.SUBDOC_MULTI_PATH_FAILURE


def test_a_connection_that_is_gone_leaves_the_queue(node: MemoryNode) -> None:
    queue = LongQueue()
    slow = Slow(node, queue)
    look_up_all(slow)
    assert len(queue) == 1
    slow.peer.session.drop_received()
    assert not len(queue)


def never() -> Steps:
    yield


def test_not_too_many_wait() -> None:
    queue = LongQueue()

    def enter(user: str) -> None:
        queue.enter(
            LongRequest(never, 0, 0, 0, b"", held_bytes=0, user=user, durability=None), 1_000
        )

    for _ in range(QUEUED_PER_USER_MAX):
        enter("a")
    with pytest.raises(RefusedError, match="of this user"):
        enter("a")
    for _ in range(QUEUED_MAX - QUEUED_PER_USER_MAX):
        enter("b")
    with pytest.raises(RefusedError, match="try again"):
        enter("c")


def test_results_are_bounded(node: MemoryNode) -> None:
    peer = aware_peer(node)
    limits = peer.state.shared.limits._replace(value_bytes_max=len(DOCUMENT))
    peer.state.shared = peer.state.shared._replace(limits=limits)
    asked = lookup_value(*[(GET, 0, b"list")] * 4, (GET, 0, b"n"))
    answer = peer.ask(Opcode.SUBDOC_MULTI_LOOKUP, vb_id=5, key=b"doc", value=asked)
    found = results(answer.value)
    assert [status for status, _ in found] == [0, 0, Status.E2BIG, Status.E2BIG, 0]
    assert len(answer.value) < 2 * len(DOCUMENT) + 100


def test_memory_stays_within_three_times_the_document(node: MemoryNode) -> None:
    peer = aware_peer(node)
    packet = pack_request(
        Opcode.SUBDOC_MULTI_LOOKUP, vb_id=5, key=b"doc",
        value=lookup_value(*((GET, 0, b"list[%d]" % (at * 1000)) for at in range(16))),
    )  # fmt: skip
    change = pack_request(Opcode.SUBDOC_MULTI_MUTATION, vb_id=5, key=b"doc", value=upsert())
    for request, most in ((packet, 1), (change, 3)):
        tracemalloc.start()
        try:
            assert peer.send(request)[0].status == 0
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes < most * len(DOCUMENT) + 200_000


def test_a_batch_of_small_requests_lets_others_in_between(node: MemoryNode) -> None:
    """A client that pipelines thousands of them takes no more of the loop than one large one."""
    peer = aware_peer(node)
    peer.set(5, b"middle", b"[" + b"1," * (INLINE_BYTES // 2 - 64) + b"1]")
    one = pack_request(
        Opcode.SUBDOC_MULTI_LOOKUP, vb_id=5, key=b"middle", value=lookup_value((GET, 0, b"[-1]"))
    )
    count = 4 * STEP_BYTES // INLINE_BYTES
    peer.session.receive(one * count, node.now_ns)
    assert peer.state.is_full
    assert 0 < len(peer.state.answers) <= STEP_BYTES // INLINE_BYTES + 2
