"""Where the operations of a client go: its cluster's map, and which nodes cannot be reached. Pure.

Used by `clients.kv.call`, which says what happens when. `Send` and `FetchMap` are what a call asks
its client to do.

Invariant: a node that could not be reached is not tried before its pause is over, by any call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from clients.errors import DcpdError, NotMyVbucketError, TopologyError
from clients.link.topology import ClusterMap, ClusterNode, FetchMap, Pause, Place, Topology
from clients.operation import Operation, Outcome, partitions_of
from dcp.wire.frame import Frame
from vbucket.model.ids import NUM_VBUCKETS

BACKOFF_FIRST_S: Final = 0.02
BACKOFF_MAX_S: Final = 0.5
"""Pause before an operation is repeated: it doubles from the first to the longest. Each is cut by
up to half at random, so that clients that failed together do not return together."""
DOUBLINGS_MAX: Final = 8
PATIENCE_S: Final = 1.0
"""How long a connection or an answer may take before another node is asked for a newer map. A login
takes a few milliseconds, and on a busy machine up to a second. The pauses double."""
PATIENCE_MAX_S: Final = 4.0


def patience_s(timeout_s: float) -> float:
    """Return how long a call with this timeout waits before it asks another node for a newer map.

    Half of a short timeout: calls that end before they ask would go to a silent node for ever.
    """
    return min(PATIENCE_S, timeout_s / 2)


Result = Outcome | Frame | list[Frame]
"""Of a document operation, or of another command the reply (STAT: the replies)."""


class Send:
    """Write these operations to a node.

    Put the answers into `outcomes`, in the order of `indexes`. Before bytes leave, set `sent` to
    the number of operations whose bytes may have left, counted from the first.
    """

    __slots__ = ("asked_s", "attempt", "begun_s", "indexes", "is_abandoned", "is_cut", "is_fresh",
                 "left", "moved_s", "node", "outcomes", "patience_s", "sent", "vb_ids")  # fmt: skip

    def __init__(
        self,
        node: ClusterNode,
        indexes: Sequence[int],
        vb_ids: Sequence[int],
        attempt: int,
        now_s: float,
    ) -> None:
        self.node = node
        self.indexes = indexes
        self.vb_ids = vb_ids
        self.attempt = attempt
        """How often these operations were tried before."""
        self.outcomes: list[Result | None] = [None] * len(indexes)
        self.sent = 0
        self.is_abandoned = False
        """The operations go elsewhere now: write nothing, and wait for no answer."""
        self.is_cut = False
        """Write no more of them; those that were written are waited for."""
        self.is_fresh = False
        """The last attempt met with silence: use a new connection, unless the present one has
        received something meanwhile."""
        self.begun_s = now_s
        self.asked_s = now_s
        """When it began, or when another node was last asked for a map because it takes long."""
        self.patience_s = PATIENCE_S
        """How long after `asked_s` another node is asked."""
        self.left: set[int] = set()
        """Positions whose answer does not count any more: they go elsewhere, or have ended."""
        self.moved_s: float | None = None
        """Since when a newer map gives partitions of sent writes to another node."""

    def unanswered(self) -> list[int]:
        """Return the positions that were sent, have no outcome, and are waited for."""
        return [
            position
            for position in range(self.sent)
            if self.outcomes[position] is None and position not in self.left
        ]


class HeldOperations:
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


Action = Send | FetchMap


def backoff_s(attempt: int, jitter: float) -> float:
    """Return the pause after an attempt (the first is 0). `jitter` is from 0 up to 1."""
    longest_s = min(BACKOFF_FIRST_S * (1 << min(attempt, DOUBLINGS_MAX)), BACKOFF_MAX_S)
    return longest_s * (1 - jitter / 2)


class Router(ClusterMap):
    """The map of one client, with what its calls share: the node that was reached first, and what
    one node serves alone.
    """

    def __init__(
        self,
        seed: ClusterNode,
        others: Sequence[ClusterNode] = (),
        *,
        is_tls: bool = False,
        needs_map: bool = False,
    ) -> None:
        super().__init__(
            (seed, *others), is_tls=is_tls, longest_s=BACKOFF_MAX_S, first_s=BACKOFF_FIRST_S
        )
        self.seed = seed
        """The node that the user named. Of several, the one that answered first."""
        self.needs_map = needs_map
        """Whether nothing is sent before the map is known. Otherwise the seed is tried first."""
        self.was_reached = False
        """A node has answered."""
        self.on_newer: Callable[[], None] | None = None
        """Called when a newer map was adopted: calls that wait may go on by it."""
        self._sole: int | None = None
        """Index of the node that serves all partitions, if there is one."""

    def adopt(self, topology: Topology, *, is_last_resort: bool = False) -> bool:
        """Go by a configuration if it is newer; return whether it is."""
        if not super().adopt(topology, is_last_resort=is_last_resort):
            return False
        self.was_reached = True
        owners = set(topology.vbucket_map)
        self._sole = owners.pop() if len(owners) == 1 and -1 not in owners else None
        if self.on_newer is not None:
            self.on_newer()
        return True

    def learn_from(self, outcome: object, host: str) -> None:
        """Adopt the configuration of a refusal, if it has one that can be read."""
        if isinstance(outcome, NotMyVbucketError) and outcome.config:
            with suppress(TopologyError):
                self.learn(outcome.config, host)

    def next_node(self, asked: dict[ClusterNode, tuple[int, int]]) -> ClusterNode | None:
        """Return a node that has to be asked where all nodes are; None: all were.

        The caller notes in `asked` at which revision of the map it asked each. A newer map makes it
        ask all again: a partition that moved may have been missed at both nodes.
        """
        assert self.topology is not None
        for node in self.topology.nodes:
            if asked.get(node) != self.topology.revision:
                asked[node] = self.topology.revision
                return node
        return None

    def name_of(self, vb_id: int) -> str:
        """Return the name of the node that serves a partition, for errors."""
        place = self.topology.place_of(vb_id) if self.topology is not None else None
        return (ClusterNode(*place) if place is not None else self.seed).name

    def is_serving(self, node: ClusterNode) -> bool:
        """Whether a node is in the map."""
        return self.topology is not None and node in self.topology.nodes

    def direct(self, operations: Sequence[Operation]) -> Send | None:
        """Return the Send of operations that all go to one node: the usual case, without a Call.

        If an outcome is no answer (`clients.kv.call.is_answer`), a Call takes over. None: they
        need a Call from the beginning.
        """
        topology = self.topology
        if self.pauses or (topology is None and self.needs_map):
            return None
        if topology is None:
            node, vb_ids = self.seed, partitions_of(operations, NUM_VBUCKETS)
        else:
            index = self._sole
            if index is None and len(operations) != 1:
                return None
            vb_ids = partitions_of(operations, len(topology.vbucket_map))
            if index is None:
                index = topology.vbucket_map[vb_ids[0]]
                if index < 0:
                    return None
            node = topology.nodes[index]
        return Send(node, range(len(operations)), vb_ids, 0, 0.0)

    # -- used by Call --------------------------------------------------------------------------

    def group(self, vb_ids: Sequence[int]) -> dict[int, list[int]] | None:
        """Return index of a node -> positions of its partitions; None: one node has all."""
        assert self.topology is not None
        if self._sole is not None:
            return None
        groups: dict[int, list[int]] = {}
        vbucket_map = self.topology.vbucket_map
        for position, vb_id in enumerate(vb_ids):
            groups.setdefault(vbucket_map[vb_id], []).append(position)
        return groups

    def sole_node(self) -> ClusterNode:
        """Return the node that serves all partitions."""
        assert self.topology is not None
        assert self._sole is not None
        return self.topology.nodes[self._sole]

    def down(self, node: ClusterNode, now_s: float) -> Pause | None:
        """Return the pause of a node that is not to be tried, None: it may be tried."""
        pause = self.pauses.get(node.place) if self.pauses else None
        return pause if pause is not None and now_s < pause.until_s else None

    def note_down(self, node: ClusterNode, error: DcpdError, now_s: float, jitter: float) -> float:
        """Note that a node could not be reached; return when to try it again."""
        pause = self.pause_of(node.place)
        if now_s >= pause.until_s:  # otherwise another call noted the same failure
            self.pause(node.place, now_s, jitter)
            pause.why = error
        return pause.until_s

    def begin_at(self, place: Place) -> None:
        """Note which of the nodes that the user named has answered first."""
        self.seed = next(node for node in self.named if node.place == place)
        self.was_reached = True

    def note_up(self, node: ClusterNode) -> None:
        """Note that a node answered."""
        self.was_reached = True
        if self.pauses:
            self.pauses.pop(node.place, None)
