"""The cluster's map: what a configuration says, and what a client makes of it. Pure.

`Topology` is one configuration: which node serves which partition. `ClusterMap` is what a client
knows: the newest configuration, whom to ask for a newer one, and when to try a node again.
`KvClient` and `SyncKv` (`clients.kv.routing`), consumers, backups and Spark's driver each have one.

A configuration has the format that the official clients parse. `nodes` are the nodes that serve the
bucket, the first entries of `nodesExt` have their ports, and `vBucketMap` refers to nodes by index.
`$HOST` stands for the host that the client used.

Invariants
- `vbucket_map` has one entry per partition: an index into `nodes`, or -1 for none;
- of two configurations, the one with the higher (revEpoch, rev) is newer. The newest one is used,
  from whichever node it came. An older one is used only if no node has a newer one;
- two attempts at the same node are at least a pause apart, and so are two requests for the map.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

from clients.errors import DcpdError, TopologyError
from vbucket.model.ids import NUM_VBUCKETS

STAGGER_S: Final = 0.25
"""How long a node has to answer before the next one is asked too, where any node will do: to begin
with a cluster, and for its map. A stalled node costs this time, a node that refuses none."""
PAUSE_FIRST_S: Final = 0.05
PAUSE_MAX_S: Final = 5.0
"""Pause between two attempts at the same node: doubles from the first to the longest."""
FETCH_GAP_S: Final = 0.05
"""Pause between two FetchMap: a thousand operations that fail together ask once."""
FETCH_LIMIT_S: Final = 2.0
"""How long one FetchMap may take."""

NO_REVISION: Final = (0, 0)
"""Of the map of a server that sends none."""

Place = tuple[str, int]
"""Host and key-value port of a node."""


class ClusterNode(NamedTuple):
    """A node that serves the bucket. `mgmt_port` is the port of the admin HTTP API, 0 if none.

    For a client with TLS, both are TLS ports.
    """

    host: str
    kv_port: int
    mgmt_port: int = 0
    rack: str = ""
    """Where it is (Couchbase's serverGroup); "": the map does not say."""

    @property
    def place(self) -> Place:
        """Where it listens."""
        return self.host, self.kv_port

    @property
    def name(self) -> str:
        """host:port, as errors name it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.kv_port}"


class Topology(NamedTuple):
    """One revision of the cluster configuration."""

    revision: tuple[int, int]
    """(revEpoch, rev)"""
    nodes: tuple[ClusterNode, ...]
    vbucket_map: tuple[int, ...]
    replica_map: tuple[tuple[int, ...], ...] = ()
    """Indexes of the nodes that have replicas of each partition; () if there are none."""

    @property
    def num_vbuckets(self) -> int:
        """Number of partitions."""
        return len(self.vbucket_map)

    @property
    def is_alone(self) -> bool:
        """Whether one node has all partitions and nobody else has a copy. A cluster's map may name
        one node, too: the others are dead, or that node knows nothing of them yet.
        """
        return len(self.nodes) == 1 and not self.replica_map and -1 not in self.vbucket_map

    def node_of(self, vb_id: int) -> ClusterNode:
        """Return the node where the partition is active.

        Raises TopologyError if there is no such node, or no such partition.
        """
        if not 0 <= vb_id < len(self.vbucket_map):
            raise TopologyError(
                f"there is no partition {vb_id}; the server has {len(self.vbucket_map)}",
                hint=f"Partitions are 0 to {len(self.vbucket_map) - 1}.",
            )
        index = self.vbucket_map[vb_id]
        if index < 0:
            raise TopologyError(
                "no node is active for this partition",
                vb_id=vb_id,
                hint="It is being moved, or its node is down. Try again in a moment.",
            )
        return self.nodes[index]

    def place_of(self, vb_id: int) -> Place | None:
        """Return host and port of the node where the partition is active, None for none."""
        index = self.vbucket_map[vb_id] if 0 <= vb_id < len(self.vbucket_map) else -1
        return None if index < 0 else self.nodes[index].place

    def by_place(
        self, vb_ids: Iterable[int]
    ) -> tuple[dict[Place, list[int]], dict[int, TopologyError]]:
        """Return partitions by the place of their node, and why others have no node."""
        places: dict[Place, list[int]] = {}
        without: dict[int, TopologyError] = {}
        for vb_id in vb_ids:
            try:
                places.setdefault(self.node_of(vb_id).place, []).append(vb_id)
            except TopologyError as error:
                without[vb_id] = error
        return places, without

    def replicas_of(self, vb_id: int) -> list[ClusterNode]:
        """Return the nodes that have a replica of the partition."""
        return [self.nodes[index] for index in self.replica_map[vb_id]] if self.replica_map else []

    def is_newer_than(self, other: Topology | None) -> bool:
        """Whether this revision replaces `other`. At the same one, a map of another number of
        partitions does: the node was started on another data folder, and begins to count anew.
        """
        if other is None or self.revision > other.revision:
            return True
        is_anew = self.revision == other.revision != NO_REVISION
        return is_anew and self.num_vbuckets != other.num_vbuckets


def single_node(host: str, kv_port: int, num_vbuckets: int = NUM_VBUCKETS) -> Topology:
    """Return the topology of a server without a configuration: one node, all partitions."""
    return Topology(NO_REVISION, (ClusterNode(host, kv_port),), (0,) * num_vbuckets)


def parse_topology(raw: bytes, origin_host: str, *, is_tls: bool = False) -> Topology:
    """Return the configuration that a node at `origin_host` sent, as bytes of JSON.

    With `is_tls` the nodes have their TLS ports.

    Raises TopologyError, which says what is wrong.
    """
    import json  # here, because dcpctl's usual commands need no configuration

    host = f"[{origin_host}]" if ":" in origin_host else origin_host
    try:
        document = json.loads(raw.replace(b"$HOST", host.encode()))
        nodes = _nodes(document, origin_host, is_tls=is_tls)
        rows = document["vBucketServerMap"]["vBucketMap"]
        vbucket_map = tuple(row[0] if row else -1 for row in rows)
        replica_map = (
            tuple(tuple(index for index in row[1:] if index != -1) for row in rows)
            if any(len(row) > 1 for row in rows)
            else ()
        )
        revision = (int(document.get("revEpoch", 0)), int(document["rev"]))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise TopologyError(
            f"the cluster configuration cannot be read: {type(error).__name__}: {error}",
            node=origin_host,
        ) from error
    if not vbucket_map or not nodes:
        raise TopologyError("the cluster configuration has no partitions", node=origin_host)
    named = chain(vbucket_map, *replica_map)
    if any(not isinstance(index, int) or not -1 <= index < len(nodes) for index in named):
        raise TopologyError(
            f"vBucketMap refers to a node that is not among the {len(nodes)} in `nodes`",
            node=origin_host,
        )
    return Topology(revision, nodes, vbucket_map, replica_map)


def _nodes(document: dict[str, Any], origin_host: str, *, is_tls: bool) -> tuple[ClusterNode, ...]:
    """Return the nodes that serve the bucket, in the order that vBucketMap refers to."""
    serving = document["nodes"]
    extended = document.get("nodesExt") or [{} for _ in serving]
    nodes = []
    for plain, ext in zip(serving, extended, strict=False):
        services = ext.get("services", {})
        host = ext.get("hostname") or ("" if ext.get("thisNode") else _host_of(plain))
        name = (host or origin_host).strip("[]")
        if is_tls:
            port, mgmt_port = services.get("kvSSL"), services.get("mgmtSSL")
            if not port:
                raise ValueError(f"node {name} has no key-value port with TLS")
        else:
            port = services.get("kv") or plain.get("ports", {}).get("direct")
            mgmt_port = services.get("mgmt")
        rack = str(ext.get("serverGroup") or "")
        nodes.append(ClusterNode(name, int(port), int(mgmt_port or 0), rack))
    if len(nodes) != len(serving):
        raise ValueError(f"{len(serving)} nodes, but {len(nodes)} of them in nodesExt")
    return tuple(nodes)


def _host_of(plain: dict[str, Any]) -> str:
    host: str = plain.get("hostname", "").rpartition(":")[0]
    return host


class Pause:
    """The time of the next attempt. Pauses double from `first_s` up to `longest_s`."""

    def __init__(self, longest_s: float = PAUSE_MAX_S, first_s: float = PAUSE_FIRST_S) -> None:
        self.until_s = 0.0
        self.why: DcpdError | None = None
        """The error of the last attempt, where somebody asks for it."""
        self._first_s = self._next_s = first_s
        self._longest_s = longest_s

    def begin(self, now_s: float, jitter: float = 0.0) -> None:
        """Pause, longer each time. `jitter`, random from 0 up to 1, cuts it by up to half."""
        self.until_s = now_s + self._next_s * (1 - jitter / 2)
        self._next_s = min(self._next_s * 2, self._longest_s)

    @property
    def is_short(self) -> bool:
        """Whether the next pause is the shortest."""
        return self._next_s == self._first_s

    def shorten(self) -> None:
        """Make the next pause short again. A pause that has begun stays."""
        self._next_s = self._first_s


class FetchMap(NamedTuple):
    """Ask a node for its configuration. Report an error if there is none until `until_s`."""

    node: ClusterNode
    until_s: float


class ClusterMap:
    """What a client knows of the cluster, and when it asks or tries again.

    Times are of any steady clock, in s. `named` are the nodes that the user named.
    """

    def __init__(
        self,
        named: Sequence[ClusterNode],
        *,
        is_tls: bool = False,
        longest_s: float = PAUSE_MAX_S,
        first_s: float = PAUSE_FIRST_S,
    ) -> None:
        self.named = tuple(named)
        self.topology: Topology | None = None
        """The configuration to go by; None: it is unknown, or out of date."""
        self.newest: Topology | None = None
        """The newest configuration so far. Its nodes are asked if those named are gone."""
        self.is_stale = False
        """A newer configuration is wanted. The known one is used meanwhile."""
        self.avoid: Place | None = None
        """A node that refuses for long: a newer configuration is wanted, from another one."""
        self.pauses: dict[Place, Pause] = {}
        """Node -> pause before the next attempt."""
        self.map_pause = Pause(longest_s, first_s)
        """Before nodes are asked for the map again."""
        self.has_paused = False
        """A pause has begun since all were short."""
        self._is_tls = is_tls
        self._lengths = longest_s, first_s
        self._turn = 0
        self._fetch_after_s = 0.0

    # -- what is known ---------------------------------------------------------------------------

    def adopt(self, topology: Topology, *, is_last_resort: bool = False) -> bool:
        """Go by a configuration if it is newer; return whether it is.

        `is_last_resort`: no node has a newer one, so one that is older than `newest` counts, too.
        Otherwise its node is cut off from the cluster, or late.
        """
        if not topology.is_newer_than(self.topology):
            return False
        newest = self.newest
        if newest is not None and topology.revision < newest.revision and not is_last_resort:
            return False
        self.topology = self.newest = topology
        self.avoid = None
        known = {node.place for node in topology.nodes}
        self.pauses = {place: pause for place, pause in self.pauses.items() if place in known}
        return True

    def learn(self, raw: bytes, host: str, *, is_last_resort: bool = False) -> bool:
        """Adopt a configuration that the node at `host` sent, if it is newer.

        Raises TopologyError if it cannot be read.
        """
        topology = parse_topology(raw, host, is_tls=self._is_tls)
        return self.adopt(topology, is_last_resort=is_last_resort)

    def nodes(self) -> dict[Place, ClusterNode]:
        """Return the nodes of the map, and those that the user named."""
        known = self.topology.nodes if self.topology is not None else ()
        return {node.place: node for node in reversed((*known, *self.named))}

    # -- attempts --------------------------------------------------------------------------------

    def due(
        self, vb_ids: Iterable[int], now_s: float | None, jitter: float, free: Container[Place] = ()
    ) -> tuple[dict[Place, list[int]], dict[int, TopologyError]]:
        """Return the partitions whose node may be tried now, by its place, and why others have no
        node. The nodes' pauses begin; those in `free` need none. `now_s` None: ignore pauses.
        """
        assert self.topology is not None
        places, without = self.topology.by_place(vb_ids)
        self.is_stale = self.is_stale or bool(without)
        for place in [place for place in places if place not in free]:
            if now_s is None:
                break
            if now_s < self.pause_of(place).until_s:
                del places[place]
            else:
                self.pause(place, now_s, jitter)
        return places, without

    def pause_of(self, place: Place) -> Pause:
        """Return the pause of a node."""
        pause = self.pauses.get(place)
        if pause is None:
            pause = self.pauses[place] = Pause(*self._lengths)
        return pause

    def pause(self, place: Place, now_s: float, jitter: float) -> None:
        """Begin the pause of a node."""
        self.pause_of(place).begin(now_s, jitter)
        self.has_paused = True

    def progress(self, place: Place | None, *, is_placed: bool) -> None:
        """A node (None: any) sent data, so its next pause is short again.

        The pause between requests for the map is reset only if all partitions have a node
        (`is_placed`). Progress of other partitions does not help one without a node.
        """
        if is_placed:
            self.map_pause.shorten()
        pauses = self.pauses
        for each in pauses if place is None else pauses.keys() & {place}:
            pauses[each].shorten()
        self.has_paused = not all(each.is_short for each in (self.map_pause, *pauses.values()))

    # -- asking for the map ----------------------------------------------------------------------

    def wants_newer(self, *, is_placed: bool) -> bool:
        """Whether nodes shall be asked for the map. `is_placed`: all partitions have a node."""
        is_unknown = self.topology is None or self.is_stale
        return (is_unknown and not is_placed) or self.avoid is not None

    def to_ask(self, used: Iterable[Place] = ()) -> list[Place]:
        """Return the nodes to ask for the map, in order. Each time another one is the first; one
        that refuses for long is the last. `used`: further nodes that are known.
        """
        newest = self.newest.nodes if self.newest is not None else ()
        known = [node.place for node in self.named], used, [node.place for node in newest]
        places = self._in_turn(list(dict.fromkeys(chain(*known))))
        if self.avoid in places:
            places.append(places.pop(places.index(self.avoid)))
        self.avoid = None
        return places

    def next_fetch(
        self, now_s: float, *, prefer: Place | None, avoid: Place | None
    ) -> FetchMap | None:
        """Return which node to ask for the map; None: nobody now.

        One at a time is asked. If it does not answer within STAGGER_S, the next one may be.
        """
        if now_s < self._fetch_after_s:
            return None
        nodes = self.nodes()
        if prefer not in nodes:
            others = [place for place in nodes if place != avoid]
            if not others:
                return None
            places = [place for place in others if place not in self.pauses] or others
            prefer = self._in_turn(places)[0]
        self._fetch_after_s = now_s + STAGGER_S
        return FetchMap(nodes[prefer], now_s + FETCH_LIMIT_S)

    def fetch_ended(self, now_s: float) -> None:
        """A FetchMap has ended, so the next one may begin soon."""
        self._fetch_after_s = min(self._fetch_after_s, now_s + FETCH_GAP_S)

    def _in_turn(self, places: list[Place]) -> list[Place]:
        at = self._turn % len(places)
        self._turn += 1
        return places[at:] + places[:at]
