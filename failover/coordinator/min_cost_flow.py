"""The largest flow of least cost in a network. Pure.

Who calls it: the placement of copies, which is such a flow: from partitions to nodes.

Primal-dual: find the distances by cost from the source, push as much as possible along shortest
paths (Dinic's algorithm), and repeat while the sink can be reached. With costs of 0 and 1 and a
larger one a few rounds are enough, so 1,024 partitions on 50 nodes take less than a second.

Invariants
- the flow so far has the least cost for its size: no cycle of negative cost is left to push along
- the order of `add_edge` decides between flows of one cost, so the same calls give the same flow
"""

from __future__ import annotations

from collections import deque
from typing import Final

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
