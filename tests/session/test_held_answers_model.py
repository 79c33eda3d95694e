"""Random requests, commits, deposals and timeouts, against a plain model of single answers.

Every request gets one answer, in order; a quiet change that was successful gets none. An answer
leaves as it is only when what it tells of is committed. It is replaced only while that is not so,
and its master was deposed or its time is over. Nothing that was applied gets ETMPFAIL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import Struct

from hypothesis import given
from hypothesis import strategies as st

from dcp.wire.frame import FLEX_HEADER, FrameDecoder, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode
from support.replicated import (
    HandMadeGuard,
    ReplicatedConnection,
    commit,
    get,
    noop,
    replicate,
    set_,
)

ALONE, FIRST, SECOND = 1, 2, 3
VB_IDS = (ALONE, FIRST, SECOND)
KEYS = (b"\0a", b"\0b")
COUNTER_KEY = b"\0n"
COUNTER = Struct(">QQI").pack(1, 1, 0)
TIMEOUT_NS = 100_000_000
MS = 1_000_000


@dataclass
class Request:
    """What the model knows about one request."""

    opaque: int
    batch: int
    vb_id: int = 0
    seqno: int = 0
    """What it tells of: the partition's changes up to here; 0: nothing."""
    is_change: bool = False
    is_quiet: bool = False
    is_durable: bool = False
    base: int = Status.OK
    due_ns: int = 0
    may_be_replaced: bool = False
    must_be_replaced: bool = False
    was_done: bool = False


@dataclass
class Client:
    """A connection, and what it has asked."""

    connection: ReplicatedConnection
    asked: list[Request] = field(default_factory=list)
    batches: int = 0


class World:
    """A node with three partitions in use, and two clients."""

    def __init__(self, *, acknowledges_as_master: bool) -> None:
        self.as_master = acknowledges_as_master
        self.node = MemoryNode()
        first = ReplicatedConnection(self.node)
        first.ask(*(set_(vb_id, 0, key) for vb_id in VB_IDS for key in KEYS))
        self.node.commit()
        replicate(self.node, FIRST, SECOND)
        self.newest = {(vb_id, key): at + 1 for vb_id in VB_IDS for at, key in enumerate(KEYS)}
        self.high = dict.fromkeys(VB_IDS, len(KEYS))
        self.clients = [
            Client(
                ReplicatedConnection(
                    self.node, acknowledges_as_master=acknowledges_as_master,
                    commit_timeout_ns=TIMEOUT_NS,
                )
            )
            for _ in range(2)
        ]  # fmt: skip
        self.now_ns = 1
        self.opaque = 0
        self.isr_size = 3

    # -- steps -----------------------------------------------------------------------------------

    def ask(self, client_at: int, kinds: list[tuple[str, int, int]]) -> None:
        client = self.clients[client_at]
        client.connection.now_ns = self.now_ns
        packets = [self.request(client, *kind) for kind in kinds]
        client.batches += 1
        client.connection.ask(*packets)
        self.check()

    def request(self, client: Client, kind: str, vb_id: int, number: int) -> bytes:
        self.opaque += 1
        opaque, key = self.opaque, KEYS[number % 2]
        request = Request(opaque, client.batches, vb_id, due_ns=self.now_ns + TIMEOUT_NS)
        client.asked.append(request)
        if kind == "noop":
            return noop(opaque)
        if kind in {"get", "getq"}:
            request.seqno = self.newest[vb_id, key]
            return get(vb_id, opaque, key, Opcode.GET if kind == "get" else Opcode.GETQ)
        if kind == "add":
            request.base = Status.KEY_EEXISTS
            request.seqno = self.high[vb_id]
            return set_(vb_id, opaque, key, Opcode.ADD)
        if kind == "durable" and self.isr_size < 2 and vb_id != ALONE:
            request.base = Status.DURABILITY_IMPOSSIBLE
            return self.durable(request, key, number)
        self.high[vb_id] += 1
        request.seqno, request.is_change = self.high[vb_id], True
        if kind == "count":
            return pack_request(
                Opcode.INCREMENT, vb_id=vb_id, key=COUNTER_KEY, extras=COUNTER, opaque=opaque
            )
        self.newest[vb_id, key] = request.seqno
        if kind == "durable":
            return self.durable(request, key, number)
        request.is_quiet = kind == "setq"
        return set_(vb_id, opaque, key, Opcode.SETQ if request.is_quiet else Opcode.SET)

    def durable(self, request: Request, key: bytes, number: int) -> bytes:
        timeout_ms = (number + 1) * 30
        request.is_durable, request.due_ns = True, self.now_ns + timeout_ms * MS
        framing = b"\x13\1" + timeout_ms.to_bytes(2, "big")
        body = len(framing) + 8 + len(key)
        head = FLEX_HEADER.pack(
            0x08, Opcode.SET, len(framing), len(key), 8, 0, request.vb_id, body, request.opaque, 0
        )
        return head + framing + bytes(8) + key

    def sync(self) -> None:
        self.node.commit()

    def commit(self, vb_id: int) -> None:
        commit(self.node, vb_id)

    def depose(self, vb_id: int) -> None:
        for client in self.clients:
            for request in client.asked:
                if request.vb_id == vb_id and request.seqno:
                    self.may_replace(request)
            client.connection.held.depose({vb_id})

    def pass_time(self, ms: int) -> None:
        self.now_ns += ms * MS
        for client in self.clients:
            for request in client.asked:
                if request.seqno and request.due_ns <= self.now_ns:
                    self.may_replace(request)
            client.connection.held.expire(self.now_ns)

    def shrink(self, isr_size: int) -> None:
        self.isr_size = isr_size
        for vb_id in (FIRST, SECOND):
            guard = self.node.engine.partitions[vb_id].guard
            assert isinstance(guard, HandMadeGuard)
            guard.isr_size = isr_size

    # -- rules -----------------------------------------------------------------------------------

    def is_done(self, request: Request) -> bool:
        part = self.node.engine.partitions[request.vb_id]
        if self.as_master and not request.is_durable:
            return part.synced_seqno >= request.seqno
        is_committed = part.committed_seqno >= request.seqno
        if request.is_durable and isinstance(part.guard, HandMadeGuard):
            return is_committed and part.guard.isr_size >= 2
        return is_committed

    def may_replace(self, request: Request) -> None:
        if not self.is_done(request):
            request.may_be_replaced = True
            # A durable change may have been done before, when its in-sync set was larger.
            request.must_be_replaced |= not request.was_done

    def check(self) -> None:
        """Release, and compare all answers that have left with the model."""
        for client in self.clients:
            for request in client.asked:
                request.was_done |= not request.seqno or self.is_done(request)
            client.connection.release()
            frames = FrameDecoder().feed(client.connection.sent)
            statuses = {frame.opaque: frame.status for frame in frames}
            opaques = [frame.opaque for frame in frames]
            assert opaques == sorted(set(opaques)), "one answer each, in order"
            last = opaques[-1] if opaques else 0
            settled = True
            for request in client.asked:
                status = statuses.get(request.opaque)
                if status is None:
                    is_silent = request.is_quiet and request.opaque < last
                    assert is_silent or request.opaque > last, "no answer is left out"
                    if is_silent:
                        assert request.was_done
                        assert not request.must_be_replaced
                elif status == request.base:
                    assert request.was_done, "it told of what was not committed"
                    assert not request.must_be_replaced
                    assert not request.is_quiet
                else:
                    wanted = Status.ETMPFAIL
                    if request.is_change:
                        wanted = Status.SYNC_WRITE_AMBIGUOUS
                    assert status == wanted
                    assert request.may_be_replaced
                settled &= request.must_be_replaced or self.is_settled_now(request)
            if settled:
                assert not client.connection.held.batches, "nothing waits for what is done"

    def is_settled_now(self, request: Request) -> bool:
        return not request.seqno or self.is_done(request)

    def end(self) -> None:
        """After the last timeout nothing waits."""
        self.pass_time(1000)
        self.check()
        for client in self.clients:
            assert not client.connection.held.batches
            assert client.connection.held.held_bytes == 0
            assert client.connection.held.next_expiry_ns is None
            frames = FrameDecoder().feed(client.connection.sent)
            loud = {request.opaque for request in client.asked if not request.is_quiet}
            assert loud <= {frame.opaque for frame in frames}


KINDS = st.tuples(
    st.sampled_from(
        ("set", "set", "set", "setq", "count", "get", "getq", "add", "durable", "noop")
    ),
    st.sampled_from(VB_IDS),
    st.integers(0, 2),
)
STEPS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 1), st.lists(KINDS, min_size=1, max_size=6)),
    st.tuples(st.just("ask"), st.integers(0, 1), st.lists(KINDS, min_size=1, max_size=6)),
    st.tuples(st.just("sync")),
    st.tuples(st.just("commit"), st.sampled_from((FIRST, SECOND))),
    st.tuples(st.just("depose"), st.sampled_from((FIRST, SECOND))),
    st.tuples(st.just("pass_time"), st.integers(1, 60)),
    st.tuples(st.just("shrink"), st.integers(1, 3)),
)


@given(st.lists(STEPS, max_size=20), st.booleans())
def test_every_answer_is_the_one_of_the_model(
    steps: list[tuple[object, ...]], acknowledges_as_master: bool
) -> None:
    world = World(acknowledges_as_master=acknowledges_as_master)
    for name, *arguments in steps:
        getattr(world, str(name))(*arguments)
        world.check()
    world.end()
