"""Asks the nodes for each partition's seqnos and versions. Used by the driver.

Invariant: the facts of a partition are from one moment. High seqno, purge seqno, history floor and
newest version come in one answer. The failover log is asked for afterwards, and is only used if it
begins with that version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from clients.address import ServerAddress
from clients.errors import (
    TRANSIENT,
    ConnectError,
    TemporaryError,
    TopologyError,
    UnsupportedError,
    error_from_status,
)
from clients.link.blocking_link import SyncLink, refresh_map
from clients.link.topology import ClusterNode, Place, Topology
from clients.position import Versions, may_be_longer, version_log_group, versions_of
from clients.spark.fetch import RETRY_S, fetch, map_of
from clients.spark.options import OptionError
from clients.spark.plan import PartitionFacts, PlanStep
from dcp.wire.frame import RemoteProtocolError
from dcp.wire.message import U64, parse_failover_log, parse_vb_seqnos
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

PATIENCE_S: Final = 30.0
"""How long the driver waits for servers that are down. A restart takes less."""
SURVEYS_MAX: Final = 8
"""Attempts per node, in case a new version begins between the questions."""
LOGS_ONE_BY_ONE_MAX: Final = 32
"""Up to this many failover logs are requested one by one; more come as one statistic."""
SAMPLE_PARTITIONS: Final = 8
SAMPLE_ROWS: Final = 64
"""Sample to estimate the size of changes (option maxBytesPerTrigger)."""
ROW_BYTES: Final = 80
"""Size of a row without key and value."""
NAMED_MAX: Final = 8
"""Maximum partitions in an error text."""
_ACTIVE: Final = (1).to_bytes(4, "big")
_WANTED: Final = {"high_seqno": 0, "purge_seqno": 1, "history_floor": 2, "uuid": 3}

_T = TypeVar("_T")


class Survey:
    """Asks the nodes for the driver. It keeps connections open until `close`."""

    def __init__(
        self,
        servers: tuple[ServerAddress, ...],
        partitions: Iterable[int] | None,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._servers = servers
        self._patience_s = patience_s
        self._chosen = None if partitions is None else frozenset(partitions)
        self._partitions = self._chosen or frozenset()
        """Those that are read: all of the map if none were chosen."""
        self._links: dict[Place, SyncLink] = {}
        self._cluster = map_of(servers)
        self._logs: dict[int, Versions] = {}

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._cluster.topology = None

    def topology(self) -> Topology:
        """Return the current topology."""
        return self._patiently(lambda: refresh_map(self._cluster, self._servers[0]))

    def high_seqnos(self, *, all_of_them: bool = False) -> dict[int, int]:
        """Return the high seqnos of the requested partitions that are active on some node.

        `all_of_them`: wait until all are active. Raises TopologyError after PATIENCE_S.
        """
        return self._patiently(lambda: self._all(self._high_seqnos(), all_of_them=all_of_them))

    def facts(self, *, all_of_them: bool = False) -> list[PartitionFacts]:
        """Return the facts of the requested partitions that are active on some node.

        `all_of_them`: wait until all are active. Raises TopologyError after PATIENCE_S.
        """
        found = self._patiently(lambda: self._all(self._facts(), all_of_them=all_of_them))
        return [found[vb_id] for vb_id in sorted(found)]

    def seqnos_at(self, time_ns: int) -> dict[int, int]:
        """Return, for each partition, the seqno before its first change at or after a time.

        `time_ns` is Unix time in ns. The time of a change is its CAS.
        """
        return self._patiently(lambda: self._seqnos_at(time_ns))

    def collection_ids(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the ids of collections. Raises UnknownCollectionError."""
        return self._patiently(lambda: tuple(self._collection_id(name) for name in names))

    def row_bytes(
        self, steps: Sequence[PlanStep], *, history: bool, collection_ids: tuple[int, ...]
    ) -> float:
        """Estimate the bytes per row of these steps from a sample."""
        largest = sorted(steps, key=lambda step: step.start_seqno - step.end_seqno)
        sample = [
            step._replace(
                end_seqno=min(step.end_seqno, step.start_seqno + SAMPLE_ROWS), rollback_to=None
            )
            for step in largest[:SAMPLE_PARTITIONS]
        ]
        rows = size = 0
        for arrived in fetch(self._servers, sample, history=history, collection_ids=collection_ids):
            if arrived.changes is not None:
                changes = arrived.changes
                rows += len(changes.keys)
                size += changes.keys.nbytes + changes.values.nbytes
        return ROW_BYTES + (size / rows if rows else 0)

    # -- inside --------------------------------------------------------------------------------

    def _patiently(self, ask: Callable[[], _T]) -> _T:
        began = time.monotonic()
        while True:
            try:
                return ask()
            except TRANSIENT:
                self.close()
                if time.monotonic() - began > self._patience_s:
                    raise
                time.sleep(RETRY_S)

    def _nodes(self) -> tuple[ClusterNode, ...]:
        topology = self._cluster.topology or refresh_map(self._cluster, self._servers[0])
        if self._chosen is None:
            self._partitions = frozenset(range(topology.num_vbuckets))
        elif (last := max(self._chosen)) >= (count := topology.num_vbuckets):
            raise OptionError(
                f"option partitions: {last} is not one of this server's {count} partitions, 0 to"
                f" {count - 1}"
            )
        return topology.nodes

    def _link(self, node: ClusterNode) -> SyncLink:
        link = self._links.get(node.place)
        if link is None:
            link = self._links[node.place] = SyncLink(self._servers[0].at(*node.place))
        return link

    def _high_seqnos(self) -> dict[int, int]:
        high: dict[int, int] = {}
        for node in self._nodes():
            high.update(self._active(node))
        return high

    def _active(self, node: ClusterNode) -> dict[int, int]:
        """Return the high seqnos of the requested partitions that are active on a node."""
        frame = self._link(node).request(Opcode.GET_ALL_VB_SEQNOS, extras=_ACTIVE)
        if frame.status:
            raise error_from_status(
                frame.status, "get all seqnos", body=frame.value, node=node.name
            )
        rows = _parsed(parse_vb_seqnos, frame.value, node)
        return {vb_id: seqno for vb_id, seqno in rows.items() if vb_id in self._partitions}

    def _facts(self) -> dict[int, PartitionFacts]:
        found: dict[int, PartitionFacts] = {}
        for node in self._nodes():
            for _ in range(SURVEYS_MAX):
                active = self._active(node)
                told = {vb: row for vb, row in self._told(node).items() if vb in active}
                missing = self._missing(told)
                if not missing:
                    break
                self._learn_logs(node, missing)
            else:
                raise TemporaryError(
                    "new versions begin faster than they can be read", node=node.name
                )
            for vb_id, (high, purge, floor, _) in told.items():
                found[vb_id] = PartitionFacts(vb_id, high, purge, floor, self._logs[vb_id])
        if len(found) < len(self._partitions):
            self._cluster.topology = None  # some are on other nodes, or on none: refresh next time
        return found

    def _all(self, found: dict[int, _T], *, all_of_them: bool) -> dict[int, _T]:
        """Return `found`. With `all_of_them`, raises TopologyError if a partition is missing."""
        missing = sorted(self._partitions.difference(found)) if all_of_them else []
        if missing:
            names = ", ".join(map(str, missing[:NAMED_MAX])) + ", ..." * (len(missing) > NAMED_MAX)
            raise TopologyError(
                f"no node is active for {len(missing)} of {len(self._partitions)} partitions"
                f" ({names})",
                node=", ".join(server.node for server in self._servers),
                hint="Check whether nodes are down: dcpctl status. To read only some partitions,"
                " use the option partitions.",
            )
        return found

    def _told(self, node: ClusterNode) -> dict[int, list[int]]:
        """Return high seqno, purge seqno, history floor and newest version, by partition."""
        rows: dict[int, list[int]] = {}
        for frame in self._link(node).request_stat(b"vbucket-seqno"):
            if frame.status:
                raise error_from_status(
                    frame.status, "stat vbucket-seqno", body=frame.value, node=node.name
                )
            name, _, what = frame.key.decode().partition(":")
            place = _WANTED.get(what)
            if place is not None:
                rows.setdefault(int(name[3:]), [0, 0, -1, 0])[place] = int(frame.value)
        if any(row[2] < 0 for row in rows.values()):
            raise UnsupportedError(
                "the server does not report its history floor",
                node=node.name,
                hint="Upgrade dcpd to the version of this client, or newer.",
            )
        return rows

    def _missing(self, told: dict[int, list[int]]) -> list[int]:
        """Return the partitions whose failover log is unknown or outdated."""
        return [
            vb_id
            for vb_id, row in told.items()
            if vb_id not in self._logs or self._logs[vb_id][0][0] != row[3]
        ]

    def _learn_logs(self, node: ClusterNode, vb_ids: list[int]) -> None:
        link = self._link(node)
        if len(vb_ids) > LOGS_ONE_BY_ONE_MAX:
            rows: dict[int, dict[str, int]] = {}
            for frame in link.request_stat(b"failovers"):
                if frame.status:
                    raise error_from_status(
                        frame.status, "stat failovers", body=frame.value, node=node.name
                    )
                name, _, what = frame.key.decode().partition(":")
                rows.setdefault(int(name[3:]), {})[what] = int(frame.value)
            for vb_id, row in rows.items():
                shown = tuple(
                    (row[f"{index}:id"], row[f"{index}:seq"]) for index in range(row["num_entries"])
                )
                self._logs[vb_id] = self._whole_log(link, vb_id, shown)
            return
        for vb_id in vb_ids:
            frame = link.request(Opcode.GET_FAILOVER_LOG, vb_id=vb_id)
            if frame.status == Status.NOT_MY_VBUCKET:
                raise TemporaryError("the partition is moving", vb_id=vb_id, node=node.name)
            if frame.status:
                raise error_from_status(
                    frame.status, "get failover log", body=frame.value, vb_id=vb_id, node=node.name
                )
            shown = tuple(_parsed(parse_failover_log, frame.value, node))
            self._logs[vb_id] = self._whole_log(link, vb_id, shown)

    def _whole_log(self, link: SyncLink, vb_id: int, shown: Versions) -> Versions:
        """Return all versions of a partition; `shown` are the newest ones."""
        if not may_be_longer(shown):
            return shown
        return versions_of(link.request_stat(version_log_group(vb_id)), vb_id) or shown

    def _seqnos_at(self, time_ns: int) -> dict[int, int]:
        high = self._all(self._high_seqnos(), all_of_them=True)
        topology = self._cluster.topology
        assert topology is not None, "_high_seqnos has set it"
        seqnos = {}
        for vb_id in sorted(high):
            node = topology.node_of(vb_id)
            frames = self._link(node).request_stat(f"seqno-at {vb_id} {time_ns}".encode())
            if frames[-1].status:
                raise error_from_status(
                    frames[-1].status, "stat seqno-at", body=frames[-1].value, node=node.name
                )
            told = {frame.key.decode(): frame.value for frame in frames}
            seqnos[vb_id] = int(told[f"vb_{vb_id}:seqno_at"])
        return seqnos

    def _collection_id(self, name: str) -> int:
        node = self._nodes()[0]
        link = self._link(node)
        frame = link.request(Opcode.GET_COLLECTION_ID, key=name.encode())
        if frame.status:
            raise error_from_status(
                frame.status, f"id of collection {name}", body=frame.value, node=node.name
            )
        number: int = int.from_bytes(frame.extras[U64.size :], "big")
        return number


def _parsed(parse: Callable[[bytes], _T], value: bytes, node: ClusterNode) -> _T:
    """Parse an answer. Raises ConnectError if it is malformed."""
    try:
        return parse(value)
    except RemoteProtocolError as error:
        raise ConnectError(f"the node sent a malformed answer: {error}", node=node.name) from error
