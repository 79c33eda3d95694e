"""Where an operation goes, and what follows its outcome. Pure: time and randomness are arguments.

`KvClient`, `SyncKv` and simulated clients do the input and output for it:

    call = Call(router, operations, now_s, timeout_s)
    while True:
        for action in call.step(now_s, jitter):
            Send:     write the operations, put the answers into `outcomes`, then call.finish(...)
            FetchMap: ask the node for its configuration, then call.mapped(...)
        if call.is_done: break                # `results` has a result or an error for each
        ... pause until call.wake_s(), or until something has finished

`Router.direct` sends operations that one node serves without a Call, until something fails.

One `Router` (`clients.kv.routing`) belongs to a client: it has the map. One `Call` belongs to a
call of the client: one operation or a batch. Parts of a batch that go to different nodes, or fail
differently, proceed independently.

Rules
- A newer map, the one with the higher (revEpoch, rev), replaces the known one. An operation goes to
  the node that the known map names, and to no other.
- After a refusal or a broken connection an operation is repeated until the deadline, with growing
  pauses. `reaction_to` says which errors end it at once.
- A newer map that came meanwhile ends the pause, up to IMMEDIATE_MAX times.
- After NOT_MY_VBUCKET the map comes from the answer, or the refusing node is asked first and the
  others later. If a node cannot be reached, or a partition has no master, other nodes are asked.
- If a connection or an answer takes longer than `patience_s`, another node is asked for a newer
  map, with growing pauses. What was not sent, and reads, do not wait any longer if that map moves
  their partition. Sent writes wait a few seconds more: a master that was deposed may still answer.
  Then they are ambiguous. Those with a CAS are sent to the new master.
- A read that meets with silence for READ_SILENCE_S is sent again, over a new connection: the old
  one may lead nowhere.
- If the first server cannot be reached at all, the address is probably wrong: that fails at once.

When a write is repeated
- A refusal (NOT_MY_VBUCKET, or a status whose entry in the error map has a retry attribute) says
  that nothing was changed. The write is sent again.
- If the connection broke before the write was sent, it is sent again.
- If it was sent and no answer came, it may have been applied. It is not repeated: a counter would
  count twice, and a SET could undo somebody else's later one. The caller gets AmbiguousWriteError.
- A write with a CAS is the exception. The change gives the document another CAS, so a repetition
  cannot be applied after the first one was. If the repetition succeeds, it was the first. If it is
  refused (CAS mismatch, no such document), nobody knows why, and the caller gets
  AmbiguousWriteError.
- SYNC_WRITE_AMBIGUOUS is that answer from the server: applied, but not confirmed in time.
A read is repeated in all these cases.

An ADD is not safe to repeat: between the two somebody may have deleted the document. Couchbase's
SDKs repeat no write that may have been applied, not even one with a CAS.

Invariants
- an operation is in one place: held until a time, in one Send, or it has its result;
- a write that may have been applied is not sent again, except with a CAS;
- a write whose attempt got no answer ends with a success or with AmbiguousWriteError;
- at the deadline every operation has its result. What finishes later is ignored.

Limits: the operations of a batch are independent. If one of two operations on the same key has to
be repeated, they may change places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from enum import Enum, auto
from typing import Final

from clients.errors import (
    AmbiguousWriteError,
    CasMismatchError,
    ConnectError,
    ConnectionLostError,
    DcpdError,
    ExistsError,
    NotFoundError,
    NotMyVbucketError,
    OperationTimeoutError,
    StatusError,
    TopologyError,
    UnknownCollectionError,
    WrongProtocolError,
)
from clients.kv.routing import (
    PATIENCE_MAX_S,
    Action,
    HeldOperations,
    Result,
    Router,
    Send,
    backoff_s,
    patience_s,
)
from clients.link.topology import STAGGER_S, ClusterNode, FetchMap, Place, Topology, single_node
from clients.operation import Operation, partitions_of
from dcp.wire.opcode import Opcode
from dcp.wire.status import ERROR_TABLE
from vbucket.model.ids import NUM_VBUCKETS

IMMEDIATE_MAX: Final = 3
"""A newer map ends the pause only in the first attempts. A node that reports ever newer maps, and
refuses all the same, does not get a request without pauses."""
ANSWER_GRACE_S: Final = 2.0
ANSWER_GRACE_MAX_S: Final = 5.0
"""How long a sent write waits for its answer after a newer map has named another master: a quarter
of the call's time, within these. A master that hands its partitions over answers within
milliseconds, on a busy machine within seconds. One that stands still may never answer."""
READ_SILENCE_S: Final = 3.0
"""After how long without an answer a read is sent again to the same node. It doubles with each
attempt, so a slow node gets few reads twice. A disk may stall for a second."""
SILENCE_DOUBLINGS_MAX: Final = 6
READS: Final = frozenset(
    {
        Opcode.GET,
        Opcode.GET_REPLICA,
        Opcode.SUBDOC_MULTI_LOOKUP,
        Opcode.GET_CLUSTER_CONFIG,
        Opcode.GET_COLLECTIONS_MANIFEST,
        Opcode.GET_COLLECTION_ID,
        Opcode.GET_ALL_VB_SEQNOS,
        Opcode.GET_FAILOVER_LOG,
        Opcode.STAT,
    }
)
"""Commands that change nothing, so they can be repeated at any time. All others are writes."""
RETRY_ATTRIBUTES: Final = frozenset({"retry-now", "retry-later"})
RETRY_STATUSES: Final = frozenset(
    status for status, (_, _, attributes) in ERROR_TABLE.items() if RETRY_ATTRIBUTES & {*attributes}
)
"""Statuses after which the error map lets a client send the request again. Nothing was changed."""
ANSWERS: Final = (NotFoundError, ExistsError, CasMismatchError)
"""Errors that clients meet in normal work: they cost no more than a result."""


class Call:
    """The operations of one call; see the module.

    A document operation goes to the node of its key's partition. `vb_id` sends all to the node of
    that partition, and `node` to that node.
    """

    __slots__ = ("_checks_direct", "_deadline_s", "_fetches", "_flights", "_held", "_last", "_left",
                 "_node", "_operations", "_router", "_silent", "_timeout_s", "_topology", "_unsure",
                 "_vb_id", "_wish", "results")  # fmt: skip

    def __init__(
        self,
        router: Router,
        operations: Sequence[Operation],
        now_s: float,
        timeout_s: float,
        *,
        vb_id: int | None = None,
        node: ClusterNode | None = None,
        direct: Send | None = None,
    ) -> None:
        """Take the operations. `direct` is their first attempt, if `Router.direct` began it."""
        self.results: list[Result | None] = [None] * len(operations)
        self._router = router
        self._operations = operations
        self._deadline_s = now_s + timeout_s
        self._timeout_s = timeout_s
        self._vb_id = vb_id
        self._node = node
        self._left = len(operations)
        """Operations without a result."""
        self._topology = router.topology
        """The map at the last step."""
        self._held: list[HeldOperations] = []
        self._flights: list[Send] = []
        if direct is None:
            self._held.append(HeldOperations(range(len(operations)), 0, now_s, awaits_map=False))
        else:
            self._flights.append(direct)
            direct.begun_s = direct.asked_s = now_s
            direct.patience_s = patience_s(timeout_s)
        self._checks_direct = direct is not None
        """The map may have changed since the direct attempt began."""
        self._unsure: set[int] = set()
        """Writes that are sent again although they may have been applied."""
        self._silent: set[int] = set()
        """Reads whose last attempt met with silence."""
        self._fetches = 0
        self._last: dict[int, DcpdError] = {}
        """The last error of each operation that is tried again."""
        self._wish: tuple[Place | None, Place | None] | None = None
        """A newer map is wanted: the node to ask first, the node not to ask."""

    @property
    def is_done(self) -> bool:
        """Whether every operation has its result."""
        return not self._left

    @property
    def deadline_s(self) -> float:
        """When the call ends."""
        return self._deadline_s

    def step(self, now_s: float, jitter: float) -> list[Action]:
        """Return what to do now. `jitter` is random, from 0 up to 1."""
        if now_s >= self._deadline_s:
            self._expire(now_s)
            return []
        if self._router.topology is not self._topology or self._checks_direct:
            self._checks_direct = False
            self._reconsider(now_s, jitter)
        actions: list[Action] = []
        if self._held:
            self._send_due(now_s, jitter, actions)
        if self._flights:
            self._watch(now_s, jitter)
        if self._wish is not None:
            self._fetch(now_s, actions)
        return actions

    def wake_s(self) -> float:
        """Return when to call `step` again if nothing finishes before."""
        wake_s = self._deadline_s
        for held in self._held:
            wake_s = min(wake_s, held.due_s)
        for send in self._flights:
            wake_s = min(wake_s, send.asked_s + send.patience_s)
            if send.moved_s is not None:
                wake_s = min(wake_s, send.moved_s + self._grace_s)
        return wake_s

    def finish(self, send: Send, now_s: float, jitter: float) -> None:
        """Take the outcomes of a Send. None in `outcomes` means that there was no answer."""
        if send not in self._flights:
            return  # It was abandoned, or the call is over.
        self._flights.remove(send)
        self._take(send, now_s, jitter)

    def mapped(self, fetch: FetchMap, answer: bytes | DcpdError, now_s: float) -> None:
        """Take the end of a FetchMap: the configuration (b"" if it has none), or an error."""
        router = self._router
        router.fetch_ended(now_s)
        self._fetches -= 1
        if isinstance(answer, bytes):
            try:
                if answer:
                    router.learn(answer, fetch.node.host)
                elif router.topology is None:
                    router.adopt(single_node(*fetch.node.place))
            except TopologyError as error:
                answer = error
        if isinstance(answer, DcpdError) and router.topology is None:
            for held in self._held:
                self._note(held.indexes, answer)
                if not router.was_reached:
                    self._end(held.indexes, answer)
            if not router.was_reached:
                self._held.clear()
        if not self._fetches:
            for held in self._held:
                held.due_s = held.pause_s

    # -- sending -------------------------------------------------------------------------------

    def _send_due(self, now_s: float, jitter: float, actions: list[Action]) -> None:
        due = [held for held in self._held if held.due_s <= now_s]
        if not due:
            return
        if len(due) == len(self._held):
            self._held = []
        else:
            self._held = [held for held in self._held if held.due_s > now_s]
        attempt = max(held.attempt for held in due) if len(due) > 1 else due[0].attempt
        indexes = due[0].indexes
        if len(due) > 1:
            indexes = [index for held in due for index in held.indexes]
        self._route(indexes, attempt, now_s, jitter, actions)

    def _route(
        self,
        indexes: Sequence[int],
        attempt: int,
        now_s: float,
        jitter: float,
        actions: list[Action],
    ) -> None:
        """Send operations to their nodes. Hold those that have none now."""
        router = self._router
        if self._node is not None:
            if attempt and self._node.place not in router.nodes():
                gone = TopologyError("the node is no longer in the cluster", node=self._node.name)
                self._end(indexes, gone)
            else:
                self._launch(self._node, indexes, [0] * len(indexes), attempt, now_s, actions)
            return
        topology = router.topology
        if topology is None and (router.needs_map or self._vb_id is not None):
            self._wish = None, None
            self._hold(indexes, attempt, now_s + backoff_s(attempt, jitter), awaits_map=True)
            return
        vb_ids = self._partitions(indexes)
        if topology is None:
            self._launch(router.seed, indexes, vb_ids, attempt, now_s, actions)
            return
        if self._vb_id is not None and not 0 <= self._vb_id < topology.num_vbuckets:
            self._end(indexes, _no_master(topology, self._vb_id))
            return
        groups = router.group(vb_ids)
        if groups is None:
            self._launch(router.sole_node(), indexes, vb_ids, attempt, now_s, actions)
            return
        for node_index, positions in groups.items():
            group = [indexes[position] for position in positions]
            if node_index < 0:
                self._note(group, _no_master(topology, vb_ids[positions[0]]))
                self._wish = None, None
                self._hold(group, attempt, now_s + backoff_s(attempt, jitter), awaits_map=True)
                continue
            group_vb_ids = [vb_ids[position] for position in positions]
            self._launch(topology.nodes[node_index], group, group_vb_ids, attempt, now_s, actions)

    def _launch(
        self,
        node: ClusterNode,
        indexes: Sequence[int],
        vb_ids: Sequence[int],
        attempt: int,
        now_s: float,
        actions: list[Action],
    ) -> None:
        down = self._router.down(node, now_s)
        if down is not None:
            assert down.why is not None
            self._note(indexes, down.why)
            self._wish = None, node.place
            self._hold(indexes, attempt, down.until_s, awaits_map=True)
            return
        send = Send(node, indexes, vb_ids, attempt, now_s)
        send.patience_s = patience_s(self._timeout_s)
        if self._silent:
            send.is_fresh = not self._silent.isdisjoint(indexes)
            self._silent.difference_update(indexes)
        self._flights.append(send)
        actions.append(send)

    def _partitions(self, indexes: Sequence[int]) -> list[int]:
        if self._vb_id is not None:
            return [self._vb_id] * len(indexes)
        topology = self._router.topology
        count = topology.num_vbuckets if topology is not None else NUM_VBUCKETS
        if self._is_all(indexes):
            return partitions_of(self._operations, count)
        return partitions_of([self._operations[index] for index in indexes], count)

    def _vb_of(self, index: int) -> int | None:
        return None if self._node is not None else self._partitions([index])[0]

    # -- waiting -------------------------------------------------------------------------------

    def _hold(
        self, indexes: Sequence[int], attempt: int, due_s: float, *, awaits_map: bool
    ) -> None:
        if indexes:
            self._held.append(HeldOperations(indexes, attempt + 1, due_s, awaits_map=awaits_map))

    def _note(self, indexes: Iterable[int], error: DcpdError) -> None:
        for index in indexes:
            self._last[index] = error

    def _reconsider(self, now_s: float, jitter: float) -> None:
        """A newer map is known: end pauses, and leave what it makes useless."""
        topology = self._topology = self._router.topology
        if topology is None:
            return
        self._wish = None
        for held in self._held:
            if held.awaits_map and held.attempt <= IMMEDIATE_MAX:
                held.due_s = held.pause_s = now_s
        if self._node is not None:
            return
        for send in list(self._flights):
            place = send.node.place
            moved = [at for at, vb in enumerate(send.vb_ids) if topology.place_of(vb) != place]
            if not moved:
                send.moved_s = None
            elif not send.sent:
                send.is_abandoned = True
                self._flights.remove(send)
                self._held.append(
                    HeldOperations(send.indexes, send.attempt, now_s, awaits_map=True)
                )
            else:
                send.is_cut = True
                waits = set(send.unanswered())
                leave = [at for at in moved if at in waits and self._is_read(send, at)]
                leave += [at for at in range(send.sent, len(send.indexes)) if at not in send.left]
                if send.moved_s is None:
                    send.moved_s = now_s
                self._send_elsewhere(send, leave, now_s, jitter)

    def _watch(self, now_s: float, jitter: float) -> None:
        """Ask for a newer map if a connection or an answer takes long; leave what is hopeless."""
        for send in list(self._flights):
            if send.moved_s is not None and now_s >= send.moved_s + self._grace_s:
                self._end_grace(send, now_s, jitter)
            if now_s < send.asked_s + send.patience_s or send not in self._flights:
                continue
            send.asked_s = now_s
            send.patience_s = min(2 * send.patience_s, PATIENCE_MAX_S)
            self._wish = None, send.node.place
            silence_s = READ_SILENCE_S * (1 << min(send.attempt, SILENCE_DOUBLINGS_MAX))
            if send.sent and self._node is None and now_s >= send.begun_s + silence_s:
                reads = [at for at in send.unanswered() if self._is_read(send, at)]
                self._silent.update(send.indexes[at] for at in reads)
                self._send_elsewhere(send, reads, now_s, jitter)

    def _end_grace(self, send: Send, now_s: float, jitter: float) -> None:
        """The old master of sent writes has not answered, and will not be waited for."""
        topology = self._topology
        assert topology is not None
        place, send.moved_s = send.node.place, None
        again = []
        for at in send.unanswered():
            if topology.place_of(send.vb_ids[at]) == place:
                continue
            index = send.indexes[at]
            what = "no answer from the node before its partition moved to another one"
            error = OperationTimeoutError(what, node=send.node.name)
            if is_repeatable(self._operations[index]):
                self._unsure.add(index)
                self._last[index] = error
                again.append(at)
            else:
                send.left.add(at)
                self._end([index], error, is_unsure=True)
        self._send_elsewhere(send, again, now_s, jitter)

    def _send_elsewhere(
        self, send: Send, positions: list[int], now_s: float, jitter: float
    ) -> None:
        """Repeat operations of a Send, without waiting for their answers any longer."""
        send.left.update(positions)
        if positions:
            attempt = send.attempt
            due_s = now_s if attempt < IMMEDIATE_MAX else now_s + backoff_s(attempt, jitter)
            indexes = [send.indexes[at] for at in positions]
            self._hold(indexes, attempt, due_s, awaits_map=False)
        if send.left and len(send.left) + _answered(send) == len(send.indexes):
            send.is_abandoned = True
            self._flights.remove(send)
            self._take(send, now_s, jitter)

    @property
    def _grace_s(self) -> float:
        return min(max(ANSWER_GRACE_S, self._timeout_s / 4), ANSWER_GRACE_MAX_S)

    def _is_read(self, send: Send, position: int) -> bool:
        return self._operations[send.indexes[position]][0] in READS

    def _fetch(self, now_s: float, actions: list[Action]) -> None:
        assert self._wish is not None
        prefer, avoid = self._wish
        self._wish = None
        fetch = self._router.next_fetch(now_s, prefer=prefer, avoid=avoid)
        if fetch is None:
            return
        self._fetches += 1
        actions.append(fetch)
        for held in self._held:
            if held.awaits_map:
                held.due_s = max(held.due_s, now_s + STAGGER_S)

    # -- outcomes ------------------------------------------------------------------------------

    def _take(self, send: Send, now_s: float, jitter: float) -> None:
        """Store results, and decide about errors."""
        outcomes = send.outcomes
        left, unsure = send.left, self._unsure
        failed = [
            position
            for position, outcome in enumerate(outcomes)
            if (outcome is None or (isinstance(outcome, DcpdError) and not is_answer(outcome)))
            and position not in left
        ]
        if unsure:
            refused = [
                position
                for position, outcome in enumerate(outcomes)
                if isinstance(outcome, DcpdError)
                and is_answer(outcome)
                and send.indexes[position] in unsure
                and position not in left
            ]
            failed += refused
        if self._is_all(send.indexes) and not left:
            self.results = outcomes
        else:
            for position, (index, outcome) in enumerate(zip(send.indexes, outcomes, strict=True)):
                if position not in left:
                    self.results[index] = outcome
        ended = len(outcomes) - len(left) - len(failed)
        if ended:
            self._left -= ended
            self._router.note_up(send.node)
        if failed:
            self._take_failed(send, failed, now_s, jitter)

    def _take_failed(self, send: Send, failed: list[int], now_s: float, jitter: float) -> None:
        groups: dict[Reaction, list[int]] = {}
        for position in failed:
            index = send.indexes[position]
            error = send.outcomes[position] or self._unanswered(send, position)
            assert isinstance(error, DcpdError)
            self.results[index] = None
            was_sent = position < send.sent
            operation = self._operations[index]
            reaction = reaction_to(error, operation, was_sent=was_sent)
            if error.status is not None:
                self._router.note_up(send.node)
            if reaction is Reaction.END:
                is_unsure = was_sent and not isinstance(error, StatusError)
                self._end([index], error, is_unsure=is_unsure)
            else:
                if reaction is Reaction.LOST and was_sent and operation[0] not in READS:
                    self._unsure.add(index)
                self._last[index] = error
                groups.setdefault(reaction, []).append(index)
        for reaction, indexes in groups.items():
            if now_s >= self._deadline_s:
                self._hold(indexes, send.attempt, now_s, awaits_map=False)
            else:
                self._repeat(send, reaction, indexes, now_s, jitter)

    def _repeat(
        self, send: Send, reaction: Reaction, indexes: list[int], now_s: float, jitter: float
    ) -> None:
        """Hold operations for the next attempt, and say who may have a newer map."""
        router, place = self._router, send.node.place
        due_s = now_s + backoff_s(send.attempt, jitter)
        if reaction is Reaction.MOVED:
            self._learn_from(indexes, send.node)
            if router.topology is self._topology:
                self._wish = (None if send.attempt else place), None
        elif reaction is Reaction.LOST:
            self._wish = None, place
        elif reaction is Reaction.UNREACHABLE:
            error = self._last[indexes[0]]
            if not router.was_reached:
                self._end(indexes, error)
                return
            due_s = router.note_down(send.node, error, now_s, jitter)
            self._wish = None, place
        self._hold(indexes, send.attempt, due_s, awaits_map=reaction is not Reaction.AGAIN)

    def _learn_from(self, indexes: list[int], node: ClusterNode) -> None:
        """Adopt the configuration of a refusal. One that cannot be read counts as none."""
        for index in indexes:
            error = self._last[index]
            if isinstance(error, NotMyVbucketError) and error.config:
                self._router.learn_from(error, node.host)
                return  # A node sends the same one in all of its refusals.

    def _unanswered(self, send: Send, position: int) -> DcpdError:
        """Return the error of an operation without an answer."""
        if position < send.sent:
            what = f"no answer within {self._timeout_s:g} s"
        else:
            what = f"no connection within {self._timeout_s:g} s"
        before = self._last.get(send.indexes[position])
        if before is not None:
            what += f", in attempt {send.attempt + 1} after: {before.what}"
        return OperationTimeoutError(what, node=send.node.name)

    def _end(
        self,
        indexes: Iterable[int],
        error: DcpdError,
        *,
        is_unsure: bool = False,
        note: str = "",
    ) -> None:
        """Give operations an error as their result. `is_unsure`: they may have been applied."""
        for index in indexes:
            operation = self._operations[index]
            self.results[index] = final_error(
                error, operation[0], key=operation[1], vb_id=self._vb_of(index),
                is_unsure=is_unsure or index in self._unsure, note=note,
            )  # fmt: skip
            self._left -= 1

    def _expire(self, now_s: float) -> None:
        """The time is over: everything that has no result gets an error."""
        flights, self._flights = self._flights, []
        for send in flights:
            self._take(send, now_s, 0.0)
            self.results = list(self.results)  # later answers do not change them
        held, self._held = self._held, []
        for waiting in held:
            note = f"; {waiting.attempt} attempts in {self._timeout_s:g} s"
            for index in waiting.indexes:
                error = self._last.get(index)
                if error is None:
                    what = f"no cluster configuration within {self._timeout_s:g} s"
                    error = OperationTimeoutError(what, node=self._router.seed.name)
                self._end([index], error, note=note)
        assert self.is_done, "every operation has its result at the deadline"

    def _is_all(self, indexes: Sequence[int]) -> bool:
        """Whether these are all operations, in their order: those of the first attempt are."""
        return type(indexes) is range and len(indexes) == len(self._operations)


def _answered(send: Send) -> int:
    """Return how many operations of a Send have an outcome that counts."""
    return sum(
        outcome is not None and position not in send.left
        for position, outcome in enumerate(send.outcomes)
    )


def _no_master(topology: Topology, vb_id: int) -> TopologyError:
    """Return the error for a partition that no node serves."""
    try:
        node = topology.node_of(vb_id)
    except TopologyError as error:
        return error
    raise AssertionError(f"{node.name} serves partition {vb_id}")


def is_repeatable(operation: Operation) -> bool:
    """Whether an operation may be sent again although it may have been applied."""
    return operation[0] in READS or operation[4] != 0


def is_answer(outcome: object) -> bool:
    """Whether an outcome needs no reaction: a result, or one of the errors that are answers."""
    return outcome is not None and (
        not isinstance(outcome, DcpdError) or isinstance(outcome, ANSWERS)
    )


class Reaction(Enum):
    """What to do after an error."""

    END = auto()
    """Tell the caller."""
    AGAIN = auto()
    """Send it again after a pause, to the same node."""
    MOVED = auto()
    """The node does not serve the partition: send it again where a newer map says."""
    LOST = auto()
    """The connection broke: the node may be gone. Send it again, and ask for a newer map."""
    UNREACHABLE = auto()
    """No connection: as LOST, and the node gets a pause of its own."""


def reaction_to(error: DcpdError, operation: Operation, *, was_sent: bool) -> Reaction:
    """Return what to do after an error. `was_sent`: the node may have received the operation."""
    if isinstance(error, NotMyVbucketError):
        return Reaction.MOVED
    if isinstance(error, UnknownCollectionError) and error.key is not None:
        return Reaction.AGAIN  # The id was refused. The name may have a new id now.
    if isinstance(error, StatusError):
        return Reaction.AGAIN if error.status in RETRY_STATUSES else Reaction.END
    if isinstance(error, WrongProtocolError):
        return Reaction.END  # A port does not change what it speaks.
    if isinstance(error, ConnectError):
        return Reaction.UNREACHABLE
    if isinstance(error, OperationTimeoutError):
        return Reaction.END if was_sent else Reaction.UNREACHABLE
    if isinstance(error, ConnectionLostError):
        is_safe = not was_sent or is_repeatable(operation)
        return Reaction.LOST if is_safe else Reaction.END
    return Reaction.END


def final_error(
    error: DcpdError, opcode: int, *, key: bytes, vb_id: int | None, is_unsure: bool, note: str
) -> DcpdError:
    """Return the error that the caller gets for one operation.

    An answer of the server that was not repeated is returned as it is. Other errors may belong to a
    whole batch, so they are copied. The copy says what `note` says (how often it was tried), where,
    and for a write whether it changed anything. `is_unsure`: an attempt got no answer.
    """
    is_write = opcode not in READS
    if is_write and is_unsure and not isinstance(error, AmbiguousWriteError):
        ambiguous = AmbiguousWriteError(
            f"{error.what}{note}; the change may have been applied",
            status=error.status, key=error.key or key or None,
            vb_id=vb_id if error.vb_id is None else error.vb_id, node=error.node,
        )  # fmt: skip
        ambiguous.cause = error
        return ambiguous
    if isinstance(error, StatusError) and not note:
        return error
    final = copy(error)
    if final.key is None and key:
        final.key = key
    if final.vb_id is None:
        final.vb_id = vb_id
    final.what += note
    if is_write and note and not final.may_have_applied:
        final.what += "; nothing was changed"
    final.args = (final.what,)
    return final
