"""`SyncKv`: a blocking key-value client for dcpctl and small scripts.

    with SyncKv(parse_address("127.0.0.1:11210")) as kv:
        kv.set(b"user:1", b"Ada")

The first operation goes to the named server. If another node serves the partition, or a node is
gone or refuses for a while, the operation is repeated until `timeout_s` is over, with growing
pauses and newer maps of the cluster. `clients.kv.call` has the rules. A write that may have been
applied is not repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from random import Random
from types import TracebackType
from typing import Final, NamedTuple, TypeVar

from clients.address import ServerAddress
from clients.errors import (
    CasMismatchError,
    DcpdError,
    NotFoundError,
    OperationTimeoutError,
    error_from_status,
)
from clients.kv.call import Call
from clients.kv.reaction import RETRY_STATUSES, is_answer
from clients.kv.routing import FetchMap, Place, Result, Router, Send, place_of
from clients.link.blocking_link import TIMEOUT_MIN_S, SyncLink
from clients.link.topology import ClusterNode, Topology, single_node
from clients.link.version_log import may_be_longer, version_log_group, versions_of
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

CONNECT_LIMIT_S: Final = 5.0
"""How long one connection attempt may take. Meanwhile nobody can be asked whether the partition has
moved, so this is less than the usual timeout of a call."""

_jitter: Final = Random().random  # noqa: S311 - not for secrets
_T = TypeVar("_T")

LOOK_UPS_MAX: Final = 6
LOOK_UP_PAUSE_S: Final = 0.02
"""How often, and with what pause, a document is read with its XATTRs while it keeps changing."""


class Lookups(NamedTuple):
    """The answer to look-ups in one document."""

    cas: int
    results: list[tuple[int, bytes]]
    """Status and value of each."""


class SyncKv:
    """A blocking key-value client; a context manager.

    Each operation goes to the node that serves its partition, and is retried until the timeout.
    """

    def __init__(self, address: ServerAddress, *, timeout_s: float = 10.0) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._links: dict[Place, SyncLink] = {}
        self._router = Router(ClusterNode(address.host, address.port), is_tls=address.is_tls)

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
        for attempt in range(LOOK_UPS_MAX):
            if attempt:
                time.sleep(LOOK_UP_PAUSE_S)
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
        reply = self._command(Opcode.GET_FAILOVER_LOG, "get failover log", vb_id=vb_id)
        frame = _expect(Frame, reply)
        return parsed(parse_failover_log, frame.value, self._router.name_of(vb_id))

    def version_log(self, vb_id: int) -> list[tuple[int, int]]:
        """Return all of a partition's versions, where the server tells more than `failover_log`."""
        shown = self.failover_log(vb_id)
        if not may_be_longer(shown):
            return shown
        group = version_log_group(vb_id)
        reply = self._command(Opcode.STAT, "get version log", key=group, vb_id=vb_id)
        if isinstance(reply, NotFoundError):
            return shown  # the server does not know the group
        return list(versions_of(_expect(list, reply), vb_id)) or shown

    def get_all_vb_seqnos(self) -> dict[int, int]:
        """Return the high seqno of every active partition, over all nodes."""
        seqnos: dict[int, int] = {}
        active = (1).to_bytes(4, "big")
        deadline_s = time.monotonic() + self._timeout_s
        self.topology()
        asked: dict[ClusterNode, tuple[int, int]] = {}
        while (node := self._router.next_node(asked)) is not None:
            reply = self._command(
                Opcode.GET_ALL_VB_SEQNOS, "get all vbucket seqnos", extras=active, node=node,
                deadline_s=deadline_s,
            )  # fmt: skip
            if isinstance(reply, Frame):
                seqnos.update(parsed(parse_vb_seqnos, reply.value, node.name))
            elif self._router.is_serving(node):
                _expect(Frame, reply)
        return dict(sorted(seqnos.items()))

    def stats(self, group: str = "") -> dict[str, str]:
        """Return the statistics of the named server."""
        reply = self._command(
            Opcode.STAT, f"stat {group!r}", key=group.encode(), node=self._router.seed
        )
        frames = _expect(list, reply)
        return {frame.key.decode(): frame.value.decode(errors="replace") for frame in frames}

    def topology(self) -> Topology:
        """Return the cluster configuration. It is fetched once, and replaced by newer ones."""
        router = self._router
        if router.topology is None:
            seed = router.seed
            reply = self._command(Opcode.GET_CLUSTER_CONFIG, "get cluster config", node=seed)
            frame = _expect(Frame, reply)
            if frame.status == Status.OK and frame.value:
                router.learn(frame.value, seed.host)
            else:
                router.adopt(single_node(seed.host, seed.kv_port))
        assert router.topology is not None
        return router.topology

    def _execute(self, operation: Operation) -> Document | MutationResult:
        begun_s, timeout_s = time.monotonic(), self._timeout_s
        deadline_s = begun_s + timeout_s

        def transmit(send: Send) -> Result:
            link = self._link(send.node, deadline_s)
            opaque = link.take_opaque()
            packet = pack_operations(
                [operation], send.vb_ids, opaque=opaque, has_collections=link.has_collections
            )
            send.sent = 1
            return outcome_of(operation, send.vb_ids[0], link.exchange(packet, opaque), link.node)

        direct = self._router.direct([operation])
        if direct is not None:
            self._attempt(direct, transmit, deadline_s)
            if is_answer(direct.outcomes[0]):
                self._router.note_up(direct.node)
                return _document(direct.outcomes[0])
        call = Call(self._router, [operation], begun_s, timeout_s, direct=direct)
        if direct is not None:
            call.finish(direct, time.monotonic(), _jitter())
        self._run(call, transmit)
        return _document(call.results[0])

    def _command(
        self,
        opcode: Opcode,
        what: str,
        *,
        key: bytes = b"",
        extras: bytes = b"",
        vb_id: int | None = None,
        node: ClusterNode | None = None,
        deadline_s: float | None = None,
    ) -> Result:
        """Send a command to the node of a partition, or to a node; return its reply or an error.

        `what` names it in errors.
        """
        now_s = time.monotonic()
        timeout_s = self._timeout_s if deadline_s is None else max(0.0, deadline_s - now_s)
        operation = (opcode, key, extras, b"", 0)
        call = Call(self._router, [operation], now_s, timeout_s, vb_id=vb_id, node=node)

        def transmit(send: Send) -> Result:
            link = self._link(send.node, call.deadline_s)
            send.sent = 1
            if opcode == Opcode.STAT:
                frames = link.request_stat(key)
            else:
                frames = [link.request(opcode, vb_id=vb_id or 0, extras=extras, key=key)]
            status, name = frames[-1].status if frames else 0, send.node.name
            has_none = opcode == Opcode.GET_CLUSTER_CONFIG and status not in RETRY_STATUSES
            if status and not has_none:
                return error_from_status(
                    status, what, body=frames[-1].value, vb_id=vb_id, node=name
                )
            return frames if opcode == Opcode.STAT else frames[0]

        self._run(call, transmit)
        result = call.results[0]
        assert result is not None, "every operation has an outcome"
        return result

    def _run(self, call: Call, transmit: Callable[[Send], Result]) -> None:
        """Do what the call says until it is done."""
        while not call.is_done:
            actions = call.step(time.monotonic(), _jitter())
            for action in actions:
                if isinstance(action, FetchMap):
                    call.mapped(action, self._fetch(action, call.deadline_s), time.monotonic())
                    continue
                self._attempt(action, transmit, call.deadline_s)
                call.finish(action, time.monotonic(), _jitter())
            if not actions and not call.is_done:
                time.sleep(max(0.0, call.wake_s() - time.monotonic()))

    @staticmethod
    def _attempt(send: Send, transmit: Callable[[Send], Result], deadline_s: float) -> None:
        """Send one operation; fill in its outcome."""
        try:
            send.outcomes[0] = transmit(send)
        except OperationTimeoutError as error:
            # If the time is over, the call says what was not answered.
            if time.monotonic() < deadline_s:
                send.outcomes[0] = error
        except DcpdError as error:
            send.outcomes[0] = error

    def _fetch(self, fetch: FetchMap, deadline_s: float) -> bytes | DcpdError:
        """Return the configuration of a node, b"" if it has none."""
        try:
            link = self._link(fetch.node, min(fetch.until_s, deadline_s))
            frame = link.request(Opcode.GET_CLUSTER_CONFIG)
        except DcpdError as error:
            return error
        return frame.value if frame.status == Status.OK else b""

    def _link(self, node: ClusterNode, deadline_s: float) -> SyncLink:
        """Return the connection to a node, whose next request may take until the deadline.

        Raises ConnectError, OperationTimeoutError, AuthenticationError.
        """
        place = place_of(node)
        link = self._links.get(place)
        if link is not None and not link.is_usable:
            link.close()
            link = None
        if link is None:
            left_s = max(deadline_s - time.monotonic(), TIMEOUT_MIN_S)
            link = self._links[place] = SyncLink(
                self.address.at(*place), timeout_s=min(left_s, CONNECT_LIMIT_S)
            )
        link.set_deadline(deadline_s)
        return link


def _document(outcome: object) -> Document | MutationResult:
    """Return the outcome of a document operation; raise it if it is an error."""
    if isinstance(outcome, DcpdError):
        raise outcome
    assert isinstance(outcome, Document | MutationResult)
    return outcome


def _expect(kind: type[_T], outcome: object) -> _T:
    """Return the outcome as the expected type; raise it if it is an error."""
    if isinstance(outcome, DcpdError):
        raise outcome
    assert isinstance(outcome, kind)
    return outcome
