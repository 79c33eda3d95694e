"""`SyncKv`: a blocking key-value client for dcpctl and small scripts.

    with SyncKv(parse_address("127.0.0.1:11210")) as kv:
        kv.set(b"user:1", b"Ada")

An operation goes to the named server first. If another node serves the partition (NOT_MY_VBUCKET),
the configuration says which, and the operation goes there. After a temporary refusal it is sent
again, with growing pauses. There are up to `ATTEMPTS_MAX` attempts. If a node cannot be reached,
the next operation starts at the named server again, because partitions may have moved.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple

from clients.address import ServerAddress
from clients.errors import (
    CasMismatchError,
    ConnectError,
    DcpdError,
    NotMyVbucketError,
    OperationTimeoutError,
    TemporaryError,
    error_from_status,
)
from clients.link.blocking_link import SyncLink
from clients.operation import (
    BODY_LOOKUP,
    LOOKUPS_MAX,
    Document,
    MutationResult,
    Operation,
    delete_operation,
    get_operation,
    lookup_operation,
    outcome_of,
    pack_operations,
    parsed,
    results_of,
    store_operation,
    xattr_lookup,
)
from dcp.wire.frame import Frame
from dcp.wire.message import parse_failover_log, parse_vb_seqnos
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.model.ids import vbucket_of

if TYPE_CHECKING:
    from clients.link.topology import ClusterNode, Topology

ATTEMPTS_MAX: Final = 6
BACKOFF_S: Final = 0.02
"""Pause before the second attempt; doubles with each."""


class Lookups(NamedTuple):
    """The answer to look-ups in one document."""

    cas: int
    results: list[tuple[int, bytes]]
    """Status and value of each."""


class SyncKv:
    """See the module; a context manager."""

    def __init__(self, address: ServerAddress, *, timeout_s: float = 10.0) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._links: dict[tuple[str, int], SyncLink] = {}
        self._topology: Topology | None = None

    def __enter__(self) -> SyncKv:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all connections."""
        self.close()

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def get(self, key: bytes) -> Document:
        """Return a document. Raises NotFoundError."""
        outcome = self._execute(get_operation(key))
        assert isinstance(outcome, Document)
        return outcome

    def get_with_xattrs(self, key: bytes) -> tuple[Document, dict[str, bytes]]:
        """Return a document and its XATTRs: name -> JSON text. System ones are among them if the
        user may read them. Raises NotFoundError, CasMismatchError if it changes all the time.
        """
        import json

        changed = CasMismatchError("the document changes all the time", node=self.address.node)
        for attempt in range(ATTEMPTS_MAX):
            if attempt:
                time.sleep(BACKOFF_S)
            asked = (xattr_lookup(b"$document.flags"), xattr_lookup(b"$XTOC"), BODY_LOOKUP)
            found = self._look_up(key, asked)
            flags, names, body = (value for _, value in found.results)
            xattrs: dict[str, bytes] = {}
            left: list[str] = json.loads(names)
            try:
                while left:
                    chunk, left = left[:LOOKUPS_MAX], left[LOOKUPS_MAX:]
                    lookups = [xattr_lookup(name.encode()) for name in chunk]
                    texts = self._look_up(key, lookups, found.cas).results
                    xattrs |= zip(chunk, (text for _, text in texts), strict=True)
            except CasMismatchError as error:
                changed = error  # between two requests
            else:
                return Document(body, found.cas, int(flags)), xattrs
        raise changed

    def _look_up(self, key: bytes, lookups: Iterable[bytes], cas: int = 0) -> Lookups:
        outcome = self._execute(lookup_operation(key, lookups, cas))
        assert isinstance(outcome, Document)
        return Lookups(outcome.cas, parsed(results_of, outcome.value, self.address.node))

    def store(
        self,
        opcode: Opcode,
        key: bytes,
        value: bytes,
        *,
        flags: int = 0,
        expiry_s: int = 0,
        cas: int = 0,
    ) -> MutationResult:
        """Do a SET, ADD or REPLACE."""
        outcome = self._execute(store_operation(opcode, key, value, flags, expiry_s, cas))
        assert isinstance(outcome, MutationResult)
        return outcome

    def set(self, key: bytes, value: bytes) -> MutationResult:
        """Store a document."""
        return self.store(Opcode.SET, key, value)

    def delete(self, key: bytes, *, cas: int = 0) -> MutationResult:
        """Delete a document. Raises NotFoundError or CasMismatchError."""
        outcome = self._execute(delete_operation(key, cas))
        assert isinstance(outcome, MutationResult)
        return outcome

    def failover_log(self, vb_id: int) -> list[tuple[int, int]]:
        """Return a partition's versions as (vb_uuid, seqno at which it began), newest first."""
        node = self.topology().node_of(vb_id)
        frame = self._link((node.host, node.kv_port)).request(Opcode.GET_FAILOVER_LOG, vb_id=vb_id)
        _check(frame, "get failover log", node.name, vb_id)
        return parsed(parse_failover_log, frame.value, node.name)

    def get_all_vb_seqnos(self) -> dict[int, int]:
        """Return the high seqno of every active partition, over all nodes."""
        seqnos: dict[int, int] = {}
        for node in self.topology().nodes:
            frame = self._link((node.host, node.kv_port)).request(
                Opcode.GET_ALL_VB_SEQNOS, extras=(1).to_bytes(4, "big")
            )
            _check(frame, "get all vbucket seqnos", node.name)
            seqnos.update(parsed(parse_vb_seqnos, frame.value, node.name))
        return dict(sorted(seqnos.items()))

    def stats(self, group: str = "") -> dict[str, str]:
        """Return the statistics of the named server."""
        frames = self._seed().request_stat(group.encode())
        if frames and frames[-1].status:
            _check(frames[-1], f"stat {group!r}", self.address.node)
        return {frame.key.decode(): frame.value.decode(errors="replace") for frame in frames}

    def topology(self) -> Topology:
        """Return the cluster configuration. It is fetched once."""
        if self._topology is None:
            from clients.link.topology import parse_topology, single_node

            host, port = self.address.host, self.address.port
            frame = self._seed().request(Opcode.GET_CLUSTER_CONFIG)
            known = frame.status == Status.OK and frame.value
            self._topology = (
                parse_topology(frame.value, host, is_tls=self.address.is_tls)
                if known
                else single_node(host, port)
            )
        return self._topology

    def _execute(self, operation: Operation) -> Document | MutationResult:
        place = (self.address.host, self.address.port)
        if self._topology is not None:
            place = self._place_of(operation)
        for attempt in range(ATTEMPTS_MAX):
            if attempt:
                time.sleep(BACKOFF_S * 2 ** (attempt - 1))
            outcome = self._send(place, operation)
            if isinstance(outcome, NotMyVbucketError):
                self._learn(outcome, place[0])
                place = self._place_of(operation)
            elif not isinstance(outcome, TemporaryError):
                break
        if isinstance(outcome, DcpdError):
            raise outcome
        return outcome

    def _send(
        self, place: tuple[str, int], operation: Operation
    ) -> Document | MutationResult | DcpdError:
        link = self._link(place)
        count = self._topology.num_vbuckets if self._topology is not None else None
        vb_id = vbucket_of(operation[1], count) if count else vbucket_of(operation[1])
        opaque = link.take_opaque()
        packet = pack_operations(
            [operation], [vb_id], opaque=opaque, has_collections=link.has_collections
        )
        return outcome_of(operation, vb_id, link.exchange(packet, opaque), link.node)

    def _learn(self, refusal: NotMyVbucketError, host: str) -> None:
        """Adopt the configuration in a refusal, or fetch it."""
        from clients.link.topology import parse_topology

        if not refusal.config:
            self._topology = None
            self.topology()
            return
        topology = parse_topology(refusal.config, host, is_tls=self.address.is_tls)
        if topology.is_newer_than(self._topology):
            self._topology = topology

    def _place_of(self, operation: Operation) -> tuple[str, int]:
        topology = self.topology()
        node: ClusterNode = topology.node_of(vbucket_of(operation[1], topology.num_vbuckets))
        return node.host, node.kv_port

    def _seed(self) -> SyncLink:
        return self._link((self.address.host, self.address.port))

    def _link(self, place: tuple[str, int]) -> SyncLink:
        link = self._links.get(place)
        if link is not None and not link.is_usable:
            link.close()
            link = None
        if link is None:
            try:
                link = SyncLink(self.address.at(*place), timeout_s=self._timeout_s)
            except (ConnectError, OperationTimeoutError):
                self._topology = None
                raise
            self._links[place] = link
        return link


def _check(frame: Frame, operation: str, node: str, vb_id: int | None = None) -> None:
    if frame.status:
        raise error_from_status(frame.status, operation, body=frame.value, vb_id=vb_id, node=node)
