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
  pauses. `clients.kv.reaction` says which errors end it at once.
- A newer map that came meanwhile ends the pause, up to IMMEDIATE_MAX times.
- After NOT_MY_VBUCKET the map comes from the answer, or the refusing node is asked first and the
  others later. If a node cannot be reached, or a partition has no master, other nodes are asked.
- If a connection takes longer than CONNECT_PATIENCE_S, another node is asked for a newer map. If it
  moves the partitions, they do not wait for that connection any longer.
- If the first server cannot be reached at all, the address is probably wrong: that fails at once.

Invariants
- an operation is in one place: held until a time, in one Send, or it has its result;
- a write that may have been applied is not sent again;
- at the deadline every operation has its result. What finishes later is ignored.

Limits: the operations of a batch are independent. If one of two operations on the same key has to
be repeated, they may change places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from clients.errors import DcpdError, NotMyVbucketError, OperationTimeoutError, TopologyError
from clients.kv.reaction import Reaction, final_error, is_answer, reaction_to
from clients.kv.routing import (
    FETCH_STAGGER_S,
    Action,
    FetchMap,
    Place,
    Result,
    Router,
    Send,
    backoff_s,
    place_of,
)
from clients.link.topology import ClusterNode, Topology, single_node
from clients.operation import Operation, partitions_of
from vbucket.model.ids import NUM_VBUCKETS

IMMEDIATE_MAX: Final = 3
"""A newer map ends the pause only in the first attempts. A node that reports ever newer maps, and
refuses all the same, does not get a request without pauses."""
CONNECT_PATIENCE_S: Final = 1.0
"""How long a connection may take before another node is asked for a newer map. A login takes a few
milliseconds, and on a busy machine up to a second."""


class _Held:
    """Operations that wait for the next attempt."""

    __slots__ = ("attempt", "awaits_map", "due_s", "indexes", "pause_s")

    def __init__(
        self, indexes: Sequence[int], attempt: int, due_s: float, *, awaits_map: bool
    ) -> None:
        self.indexes = indexes
        self.attempt = attempt
        self.pause_s = due_s
        """When the pause ends."""
        self.due_s = due_s
        """When they are sent. A request for the map that is under way may put it off."""
        self.awaits_map = awaits_map


class Call:
    """The operations of one call; see the module.

    A document operation goes to the node of its key's partition. `vb_id` sends all to the node of
    that partition, and `node` to that node.
    """

    __slots__ = ("_deadline_s", "_fetches", "_flights", "_held", "_last", "_left", "_node",
                 "_operations", "_router", "_timeout_s", "_topology", "_vb_id", "_wish",
                 "results")  # fmt: skip

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
        self._held: list[_Held] = []
        self._flights: list[Send] = []
        if direct is None:
            self._held.append(_Held(range(len(operations)), 0, now_s, awaits_map=False))
        else:
            self._flights.append(direct)
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
        if self._router.topology is not self._topology:
            self._reconsider(now_s)
        actions: list[Action] = []
        if self._held:
            self._send_due(now_s, jitter, actions)
        if self._flights:
            self._watch(now_s)
        if self._wish is not None:
            self._fetch(now_s, actions)
        return actions

    def wake_s(self) -> float:
        """Return when to call `step` again if nothing finishes before."""
        wake_s = self._deadline_s
        for held in self._held:
            wake_s = min(wake_s, held.due_s)
        for send in self._flights:
            if not send.sent:
                wake_s = min(wake_s, send.asked_s + CONNECT_PATIENCE_S)
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
                    router.adopt(single_node(fetch.node.host, fetch.node.kv_port))
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
            if attempt and place_of(self._node) not in router.nodes():
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
            self._note(indexes, down.error)
            self._wish = None, place_of(node)
            self._hold(indexes, attempt, down.until_s, awaits_map=True)
            return
        send = Send(node, indexes, vb_ids, attempt, now_s)
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
            self._held.append(_Held(indexes, attempt + 1, due_s, awaits_map=awaits_map))

    def _note(self, indexes: Iterable[int], error: DcpdError) -> None:
        for index in indexes:
            self._last[index] = error

    def _reconsider(self, now_s: float) -> None:
        """A newer map is known: end pauses, and leave connections that it makes useless."""
        topology = self._topology = self._router.topology
        assert topology is not None
        self._wish = None
        for held in self._held:
            if held.awaits_map and held.attempt <= IMMEDIATE_MAX:
                held.due_s = held.pause_s = now_s
        if self._node is not None:
            return
        for send in list(self._flights):
            place = place_of(send.node)
            if not send.sent and any(topology.place_of(vb) != place for vb in send.vb_ids):
                send.is_abandoned = True
                self._flights.remove(send)
                self._held.append(_Held(send.indexes, send.attempt, now_s, awaits_map=True))

    def _watch(self, now_s: float) -> None:
        """Ask for a newer map if a connection takes long."""
        for send in self._flights:
            if not send.sent and now_s >= send.asked_s + CONNECT_PATIENCE_S:
                send.asked_s = now_s
                self._wish = None, place_of(send.node)

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
                held.due_s = max(held.due_s, now_s + FETCH_STAGGER_S)

    # -- outcomes ------------------------------------------------------------------------------

    def _take(self, send: Send, now_s: float, jitter: float) -> None:
        """Store results, and decide about errors."""
        outcomes = send.outcomes
        failed = [
            position
            for position, outcome in enumerate(outcomes)
            if outcome is None or (isinstance(outcome, DcpdError) and not is_answer(outcome))
        ]
        if self._is_all(send.indexes):
            self.results = outcomes
        else:
            for index, outcome in zip(send.indexes, outcomes, strict=True):
                self.results[index] = outcome
        if len(failed) < len(outcomes):
            self._left -= len(outcomes) - len(failed)
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
            reaction = reaction_to(error, self._operations[index][0], was_sent=was_sent)
            if error.status is not None:
                self._router.note_up(send.node)
            if reaction is Reaction.END:
                self._end([index], error, was_sent=was_sent)
            else:
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
        router, place = self._router, place_of(send.node)
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
                with suppress(TopologyError):
                    self._router.learn(error.config, node.host)
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
        was_sent: bool = False,
        note: str = "",
    ) -> None:
        """Give operations an error as their result."""
        for index in indexes:
            operation = self._operations[index]
            self.results[index] = final_error(
                error, operation[0], key=operation[1], vb_id=self._vb_of(index),
                was_sent=was_sent, note=note,
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


def _no_master(topology: Topology, vb_id: int) -> TopologyError:
    """Return the error for a partition that no node serves."""
    try:
        node = topology.node_of(vb_id)
    except TopologyError as error:
        return error
    raise AssertionError(f"{node.name} serves partition {vb_id}")
