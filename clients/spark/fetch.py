"""Reads the changes of a task on an executor, from the nodes of its partitions.

`clients.spark.fetch_core` makes the decisions; this module has the sockets and the clock. It
reconnects after a lost connection, and the streams continue where they were. A task gives up after
`PATIENCE_S` without a change.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Final

from clients.address import ServerAddress
from clients.errors import TRANSIENT, DcpdError
from clients.link.blocking_link import SyncLink, refresh_map
from clients.link.copies import Copies, check_copies
from clients.link.topology import ClusterMap, ClusterNode, Place, Topology
from clients.spark.fetch_core import Arrived, FetchCore, Stream
from clients.spark.plan import PlanStep

READ_BYTES: Final = 1024 * 1024
PATIENCE_S: Final = 60.0
"""A task gives up after this time without a change. A server restart takes less."""
RETRY_S: Final = 0.1
"""Pause before a connection or stream request is retried."""


class StreamLink(SyncLink):
    """A connection that returns raw bytes after the handshake."""

    def send(self, data: bytes) -> None:
        """Send packets."""
        if data:
            self._write(data)

    def read(self) -> bytes:
        """Return the next bytes. Raises ConnectionLostError, OperationTimeoutError."""
        return self._receive(READ_BYTES)


REFUSED_MAX: Final = 3
"""After so many refusals a copy is passed over."""


def map_of(servers: Sequence[ServerAddress]) -> ClusterMap:
    """Return what is known of the cluster of these servers: nothing but them."""
    named = [ClusterNode(*place) for server in servers for place in server.places]
    return ClusterMap(named, is_tls=servers[0].is_tls)


def fetch(
    servers: tuple[ServerAddress, ...],
    steps: Sequence[PlanStep],
    *,
    history: bool = True,
    xattrs: bool = False,
    collection_ids: tuple[int, ...] = (0,),
    patience_s: float = PATIENCE_S,
    from_replicas: bool = False,
) -> Generator[Arrived, None, bool]:
    """Yield the changes and rollbacks of the steps; return whether each ended where it should.

    Raises DcpdError if it gives up.
    """
    streams = [Stream(step) for step in steps]
    all_of_them = tuple(streams)
    cluster = map_of(servers)
    copies = Copies() if from_replicas else None
    began = time.monotonic()
    while streams:
        left: list[Stream] = []
        problem: DcpdError | None = None
        try:
            topology = refresh_map(cluster, servers[0])
            if copies is not None:
                check_copies(topology, str(servers[0]))
                for stream in streams:
                    stream.is_damaged = False
                    stream.is_last = copies.is_last(topology, stream.vb_id)
                topology = copies.chosen(topology)
            groups, left = _by_node(topology, streams)
            for node, group in groups.items():
                reading = _Reading(
                    servers[0].at(*node), history, collection_ids, patience_s, xattrs=xattrs,
                    from_replicas=from_replicas,
                )  # fmt: skip
                for arrived in reading.run(group):
                    yield arrived
                    began = time.monotonic()  # the time that Spark took does not count
                left += reading.left
                problem = problem or reading.problem
                for stream in reading.left:
                    if copies is not None and stream.is_damaged:
                        copies.leave_out(stream.vb_id, node, time.monotonic())
        except TRANSIENT as error:
            left, problem = streams, error
        streams = left
        if streams:
            if copies is not None:
                passed_over = [stream.vb_id for stream in streams if not stream.is_damaged]
                copies.pass_over(passed_over, time.monotonic())
            if time.monotonic() - began > patience_s:
                raise problem or _stuck(streams[0], patience_s)
            time.sleep(RETRY_S)
    return all(stream.is_exact for stream in all_of_them)


def _by_node(
    topology: Topology, streams: Sequence[Stream]
) -> tuple[dict[Place, list[Stream]], list[Stream]]:
    """Return the streams by the node of their partition, and those without a node."""
    by_vb = {stream.vb_id: stream for stream in streams}
    places, without = topology.by_place(by_vb)
    for vb_id, error in without.items():
        by_vb[vb_id].problem = error
    groups = {place: [by_vb[vb_id] for vb_id in members] for place, members in places.items()}
    return groups, [by_vb[vb_id] for vb_id in without]


def _stuck(stream: Stream, patience_s: float) -> DcpdError:
    problem = stream.problem
    reason = f": {problem.what}" if problem else ": its node sends no more changes"
    return DcpdError(
        f"no progress for {patience_s:g} s at seqno {stream.seqno} of {stream.end_seqno}{reason}",
        vb_id=stream.vb_id,
        node=problem.node if problem else None,
        hint="Check that the partition is active: dcpctl seqnos, dcpctl stream list",
    )


class _Reading:
    """One connection for some streams. Afterwards `left` has the unfinished ones, `problem` why."""

    def __init__(
        self,
        address: ServerAddress,
        history: bool,
        collection_ids: tuple[int, ...],
        patience_s: float,
        *,
        xattrs: bool,
        from_replicas: bool,
    ) -> None:
        self.left: list[Stream] = []
        self.problem: DcpdError | None = None
        self._address = address
        self._history = history
        self._xattrs = xattrs
        self._from_replicas = from_replicas
        self._collection_ids = collection_ids
        self._patience_s = patience_s

    def run(self, streams: list[Stream]) -> Iterator[Arrived]:
        """Yield what arrives until the streams are done or the connection is lost."""
        self.left = streams
        try:
            link = StreamLink(self._address, timeout_s=self._patience_s)
        except TRANSIENT as error:
            self.problem = error
            return
        with link:
            core = FetchCore(
                streams,
                b"spark-" + secrets.token_hex(8).encode(),
                has_collections=link.has_collections,
                collection_ids=self._collection_ids,
                history=self._history,
                xattrs=self._xattrs,
                from_replicas=self._from_replicas,
                node=link.node,
            )
            try:
                link.send(core.begin())
                began = time.monotonic()
                refused = 0
                while not core.is_done:
                    arrived = core.receive(link.read())
                    if arrived.changes is not None or arrived.rollbacks:
                        yield arrived
                        began = time.monotonic()
                    if core.failure is not None:
                        raise core.failure
                    if time.monotonic() - began > self._patience_s:
                        return  # the server answers, but sends no changes
                    if core.is_waiting:
                        refused += 1
                        if self._from_replicas and refused >= REFUSED_MAX:
                            return  # another copy may serve them
                        time.sleep(RETRY_S)
                        core.retry()
                    link.send(core.take_output())
            except TRANSIENT as error:
                self.problem = error
            finally:
                self.left = core.unfinished()
