"""Where copies and masters should be, as a flow of least cost. Pure.

**The largest flow of least cost in a network** (`FlowNetwork`). Primal-dual: find the distances by
cost from the source, push as much as possible along shortest paths (Dinic's algorithm), and repeat
while the sink can be reached. With costs of 0 and 1 and a larger one a few rounds are enough, so
1,024 partitions on 50 nodes take less than a second.

Invariants
- the flow so far has the least cost for its size: no cycle of negative cost is left to push along
- the order of `add_edge` decides between flows of one cost, so the same calls give the same flow

**Which nodes should have the copies of each partition, and which should be master.**

Who calls it: the coordinator, for a rebalance, a new node, or one that is drained.

What a plan has
- the copies of a partition are on different nodes, and on different racks if there are enough. With
  fewer racks than copies they are spread over the racks as evenly as the racks' sizes permit
- each node has the same number of copies, and of masters, to within one. Racks come first: the
  nodes of a small rack may have more than others, or fewer
- of all such plans it is one that adds the fewest copies, of these one that drops the copies of the
  fewest masters that could stay masters, and of the masters one that moves fewest
- the same nodes and partitions give the same plan, in whatever order they are given

Racks count only if every node names one: a node without a rack may be in any.

The plan is two flows of least cost: from partitions over racks to nodes, and then from partitions
to one of their nodes. In the first one a copy that stays master costs nothing, another copy that is
there costs 1, and a new one costs more than all of these together. A node's share of masters limits
how many of them stay. Partitions that look alike are one vertex, because the coordinator plans on
its event loop: the time for a plan grows with the kinds of chains and hardly with the number of
partitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeVar

_UNREACHED: Final = 1 << 60


class FlowNetwork:
    """Vertices are numbers that `add_vertex` returns. An edge and its reverse have ids 2n, 2n+1."""

    def __init__(self) -> None:
        self._edges_of: list[list[int]] = []
        self._target: list[int] = []
        self._room: list[int] = []
        self._cost: list[int] = []

    def add_vertex(self) -> int:
        """Return a new vertex."""
        self._edges_of.append([])
        return len(self._edges_of) - 1

    def add_edge(self, source: int, target: int, capacity: int, cost: int = 0) -> int:
        """Return a new edge; its cost is not negative."""
        assert capacity >= 0
        assert cost >= 0
        edge = len(self._target)
        self._target += [target, source]
        self._room += [capacity, 0]
        self._cost += [cost, -cost]
        self._edges_of[source].append(edge)
        self._edges_of[target].append(edge + 1)
        return edge

    def flow_of(self, edge: int) -> int:
        """Return how much flows through an edge."""
        return self._room[edge + 1]

    def push(self, source: int, sink: int) -> int:
        """Push as much as possible at the least cost; return how much that was."""
        pushed = 0
        while True:
            distance = self._distances(source)
            if distance[sink] == _UNREACHED:
                return pushed
            while True:
                levels = self._levels(source, sink, distance)
                if levels[sink] < 0:
                    break
                pushed += self._push_along(source, sink, distance, levels)

    def _distances(self, source: int) -> list[int]:
        """Return the least cost from the source to each vertex (Bellman-Ford with a queue)."""
        distance = [_UNREACHED] * len(self._edges_of)
        distance[source] = 0
        queue = deque([source])
        is_queued = bytearray(len(self._edges_of))
        while queue:
            vertex = queue.popleft()
            is_queued[vertex] = 0
            for edge in self._edges_of[vertex]:
                target = self._target[edge]
                cost = distance[vertex] + self._cost[edge]
                if self._room[edge] and cost < distance[target]:
                    distance[target] = cost
                    if not is_queued[target]:
                        is_queued[target] = 1
                        queue.append(target)
        return distance

    def _levels(self, source: int, sink: int, distance: list[int]) -> list[int]:
        """Return how many edges of shortest paths lead to each vertex; -1: none do."""
        levels = [-1] * len(self._edges_of)
        levels[source] = 0
        queue = deque([source])
        while queue and levels[sink] < 0:
            vertex = queue.popleft()
            for edge in self._edges_of[vertex]:
                target = self._target[edge]
                if (
                    levels[target] < 0
                    and self._room[edge]
                    and distance[target] == distance[vertex] + self._cost[edge]
                ):
                    levels[target] = levels[vertex] + 1
                    queue.append(target)
        return levels

    def _push_along(self, source: int, sink: int, distance: list[int], levels: list[int]) -> int:
        """Push along shortest paths of rising levels until there is none left."""
        pushed = 0
        next_edge = [0] * len(self._edges_of)
        path: list[int] = []
        vertex = source
        while True:
            if vertex == sink:
                amount = min(self._room[edge] for edge in path)
                for edge in path:
                    self._room[edge] -= amount
                    self._room[edge ^ 1] += amount
                pushed += amount
                path.clear()
                vertex = source
                continue
            edges = self._edges_of[vertex]
            while next_edge[vertex] < len(edges):
                edge = edges[next_edge[vertex]]
                target = self._target[edge]
                if (
                    self._room[edge]
                    and levels[target] == levels[vertex] + 1
                    and distance[target] == distance[vertex] + self._cost[edge]
                ):
                    path.append(edge)
                    vertex = target
                    break
                next_edge[vertex] += 1
            else:  # a dead end: do not come here again
                if not path:
                    return pushed
                vertex = self._target[path.pop() ^ 1]
                next_edge[vertex] += 1


Chain = tuple[str, ...]
"""The members that have a partition, its preferred master first."""

_Look = TypeVar("_Look", bound=Hashable)

_OVERFLOW_COST: Final = 1 << 20
"""A master above its node's share: more than all other costs of a plan together."""


class PlacementError(Exception):
    """There is no plan; the text says why."""


class PlannedMove(NamedTuple):
    """A partition whose chain changes."""

    vb_id: int
    present: Chain
    wanted: Chain

    @property
    def added(self) -> Chain:
        """Members that get a copy."""
        return tuple(member for member in self.wanted if member not in self.present)

    @property
    def dropped(self) -> Chain:
        """Members that lose theirs."""
        return tuple(member for member in self.present if member not in self.wanted)


class PlacementPlan(NamedTuple):
    """What is wanted, and how it differs from what there is."""

    wanted: dict[int, Chain]
    moves: tuple[PlannedMove, ...]


class _Group(NamedTuple):
    """Nodes that share a number of copies evenly."""

    members: tuple[str, ...]
    copies: int


def plan_placement(
    racks: Mapping[str, str], copies: int, present: Mapping[int, Chain]
) -> PlacementPlan:
    """Plan chains of `copies` members; of fewer if there are fewer members.

    `racks` has the rack of each member that may have copies; others lose theirs.

    Raises:
        PlacementError: there is no member.
    """
    assert copies >= 1
    if not racks:
        raise PlacementError("there is no node that may have copies; add one, or drain fewer")
    members = sorted(racks)
    count = min(copies, len(members))
    rack_of = {member: racks[member] for member in members}
    if not all(rack_of.values()):
        rack_of = {member: member for member in members}
    vb_ids = sorted(present)
    holders = _place(vb_ids, rack_of, count, present)
    masters = _choose_masters(members, holders, present)
    wanted = {vb_id: _chain(holders[vb_id], masters[vb_id], present[vb_id]) for vb_id in vb_ids}
    moves = (PlannedMove(vb_id, present[vb_id], wanted[vb_id]) for vb_id in vb_ids)
    return PlacementPlan(wanted, tuple(move for move in moves if move.wanted != move.present))


def copies_per_rack(rack_sizes: Iterable[int], copies: int) -> int:
    """Return how many copies of a partition one rack may have: 1 if there are enough racks."""
    sizes = tuple(rack_sizes)
    assert sum(sizes) >= copies, "there are as many nodes as copies"
    per_rack = 1
    while sum(min(size, per_rack) for size in sizes) < copies:
        per_rack += 1
    return per_rack


# ---- Copies


def _place(
    vb_ids: list[int], rack_of: dict[str, str], copies: int, present: Mapping[int, Chain]
) -> dict[int, set[str]]:
    """Return the members that have each partition."""
    nodes_in: dict[str, list[str]] = {}
    for member, rack in rack_of.items():
        nodes_in.setdefault(rack, []).append(member)
    per_rack = copies_per_rack(map(len, nodes_in.values()), copies)
    network = FlowNetwork()
    source, sink = network.add_vertex(), network.add_vertex()
    vertex_of = {member: network.add_vertex() for member in rack_of}
    masters_of = _masters_that_stay(network, vertex_of, len(vb_ids))
    new_cost = len(vb_ids) + 2  # one new copy outweighs that every master stays
    holders: dict[int, set[str]] = {vb_id: set() for vb_id in vb_ids}
    alike = _alike(
        vb_ids, len(rack_of),
        lambda vb_id: (frozenset(rack_of.keys() & set(present[vb_id])), present[vb_id][:1]),
    )  # fmt: skip
    dealt: list[tuple[list[int], list[tuple[str, int]]]] = []
    for ((held, first), turn), same in alike.items():
        vertex = network.add_vertex()
        network.add_edge(source, vertex, copies * len(same))
        edges: list[tuple[str, int]] = []
        for rack in _turned(sorted(nodes_in), turn):
            in_rack = vertex
            if len(nodes_in[rack]) > 1:
                in_rack = network.add_vertex()
                network.add_edge(vertex, in_rack, per_rack * len(same))
            for member in _turned(nodes_in[rack], turn):
                if first == (member,):
                    to, cost = network.add_vertex(), 0
                    network.add_edge(to, masters_of[member], len(same))
                    network.add_edge(to, vertex_of[member], len(same), 1)
                else:
                    to, cost = vertex_of[member], 1 if member in held else new_cost
                edges.append((member, network.add_edge(in_rack, to, len(same), cost)))
        dealt.append((same, edges))
    for group in _fair_groups(nodes_in, per_rack, len(vb_ids), copies):
        _limit(network, group, vertex_of, sink)
    pushed = network.push(source, sink)
    assert pushed == copies * len(vb_ids), "fair shares leave room for every copy"
    for same, edges in dealt:
        for vb_id, member in _deal(same, edges, network):
            holders[vb_id].add(member)
    return holders


def _masters_that_stay(
    network: FlowNetwork, vertex_of: dict[str, int], partitions: int
) -> dict[str, int]:
    """Return a vertex for each member: copies flow through it that stay masters, no more of them
    than the member's share of masters.
    """
    share = -(-partitions // len(vertex_of))
    masters_of: dict[str, int] = {}
    for member, vertex in vertex_of.items():
        masters_of[member] = network.add_vertex()
        network.add_edge(masters_of[member], vertex, share)
    return masters_of


def _alike(
    vb_ids: list[int], turns: int, look: Callable[[int], _Look]
) -> dict[tuple[_Look, int], list[int]]:
    """Return the partitions that look alike, by their look and by where they begin. A plan treats
    them alike, so the flow has one vertex for all of them.
    """
    alike: dict[tuple[_Look, int], list[int]] = {}
    for number, vb_id in enumerate(vb_ids):
        alike.setdefault((look(vb_id), number % turns), []).append(vb_id)
    return alike


def _deal(
    same: list[int], edges: list[tuple[str, int]], network: FlowNetwork
) -> Iterator[tuple[int, str]]:
    """Yield which of the partitions that look alike gets which member.

    They are dealt like cards, round and round. A member gets one copy of each at most, because no
    more than that flows to it; and neither does a rack get too many, because its members follow one
    another.
    """
    at = 0
    for member, edge in edges:
        for _ in range(network.flow_of(edge)):
            yield same[at % len(same)], member
            at += 1


def _turned(names: list[str], number: int) -> list[str]:
    """Begin elsewhere for each partition, so that those of one node are spread over all others."""
    at = number % len(names)
    return names[at:] + names[:at]


def _fair_groups(
    nodes_in: dict[str, list[str]], per_rack: int, partitions: int, copies: int
) -> list[_Group]:
    """Share out the copies: racks that cannot take a fair share take what they can.

    A rack has at most `per_rack` copies of a partition, and a node one.
    """
    left_copies, left_nodes = partitions * copies, sum(map(len, nodes_in.values()))
    room = {rack: partitions * min(per_rack, len(nodes)) for rack, nodes in nodes_in.items()}
    groups: list[_Group] = []
    free: list[str] = []
    for rack in sorted(nodes_in, key=lambda name: (room[name] / len(nodes_in[name]), name)):
        nodes = nodes_in[rack]
        if not free and room[rack] * left_nodes < left_copies * len(nodes):
            groups.append(_Group(tuple(nodes), room[rack]))
            left_copies -= room[rack]
            left_nodes -= len(nodes)
        else:
            free += nodes
    groups.append(_Group(tuple(sorted(free)), left_copies))
    return groups


def _limit(network: FlowNetwork, group: _Group, vertex_of: dict[str, int], sink: int) -> None:
    """Let each node of a group take its share, and some of them one more."""
    share, more = divmod(group.copies, max(1, len(group.members)))
    extra = network.add_vertex()
    for member in group.members:
        network.add_edge(vertex_of[member], sink, share)
        network.add_edge(vertex_of[member], extra, 1)
    network.add_edge(extra, sink, more)


# ---- Masters


def _choose_masters(
    members: list[str], holders: dict[int, set[str]], present: Mapping[int, Chain]
) -> dict[int, str]:
    """Return the preferred master of each partition: one of its holders, evenly."""
    network = FlowNetwork()
    source, sink = network.add_vertex(), network.add_vertex()
    vertex_of = {member: network.add_vertex() for member in members}
    alike = _alike(
        list(holders), len(members), lambda vb_id: (frozenset(holders[vb_id]), present[vb_id][:1])
    )
    dealt: list[tuple[list[int], list[tuple[str, int]]]] = []
    for ((nodes, first), turn), same in alike.items():
        vertex = network.add_vertex()
        network.add_edge(source, vertex, len(same))
        edges: list[tuple[str, int]] = []
        for member in _turned(sorted(nodes), turn):
            cost = 0 if first == (member,) else 1
            edges.append((member, network.add_edge(vertex, vertex_of[member], len(same), cost)))
        dealt.append((same, edges))
    _limit(network, _Group(tuple(members), len(holders)), vertex_of, sink)
    if network.push(source, sink) < len(holders):
        # Racks can leave a node too few copies for its share of masters.
        for member in members:
            network.add_edge(vertex_of[member], sink, len(holders), _OVERFLOW_COST)
        network.push(source, sink)
    return {vb_id: member for same, edges in dealt for vb_id, member in _deal(same, edges, network)}


def _chain(holders: set[str], master: str, present: Chain) -> Chain:
    """Put the master first, then those that are there in their order, then new ones."""
    stay = [member for member in present if member in holders and member != master]
    new = sorted(holders - {master, *stay})
    return (master, *stay, *new)
