"""Tries the links between a node that wants to become a member and the members, before it is one.

    newcomer                                   member
      │ connects as its links will, with the address that it will announce
      │ ── X-DIAL-BACK: name, addresses, proof of the secret ──> │
      │ <── connects as its links will, and logs in ──────────── │
      │ <── what came of that ────────────────────────────────── │

So both directions, TLS, the secret and the announced address are tried as they will be used. The
request is sent like a login, because nobody may ask for a connection to an address of his choice
without the cluster's secret. It lets nobody in.

Invariants
- nothing is dialled for a request without the right proof; TRIES_MAX are under way at most;
- a member that refuses, or is refused, ends the join. One that does not answer has until
  `patience_s` to be heard, or to be no longer alive in the metadata store: nodes that are down
  do not count.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple

import msgspec
from scramp import ScramException

from dcp.server.access.link_tls import (
    DIAL_BACK,
    WRONG_SECRET,
    LinkTls,
    LinkTrouble,
    certificate_trouble,
    is_for,
    link_trouble,
    wrong_hosts,
)
from dcp.server.access.users import CLUSTER_USER, is_node_user, node_user
from dcp.server.cluster.joining.enrolment import EnrolmentError
from dcp.server.cluster.member_link import (
    DIAL_S,
    LOGIN_ADVICE,
    TLS_DIAL_S,
    LoginRefusedError,
    NodeLogin,
    refusal_of,
)
from dcp.server.cluster.meta_access import MetaAccess
from dcp.server.cluster.node_map import host_and_port, tls_address_of
from dcp.server.cluster.repair.version_request import VersionsRequest
from dcp.server.observe.housekeeping import Tasks
from dcp.session.access.auth import AuthStep
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, FrameDecoder, RemoteProtocolError, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.coordinator.records import MemberRecord

TRIES_MAX: Final = 16
"""Nodes that one member dials back at a time."""
AT_A_TIME: Final = 8
"""Members that a newcomer tries at a time."""
LOGIN_S: Final = 4.0
"""How long the login at the newcomer may take."""
ANSWER_S: Final = 2 * TLS_DIAL_S + LOGIN_S
"""How long a member may take for its answer."""
AGAIN_S: Final = 0.5
PATIENCE_LEASES: Final = 5
"""For how many leases a member that is alive may be out of reach: one that dies is alive for one
more, or for three with etcd, and a busy machine answers late."""
READ_BYTES: Final = 1 << 16
_TELL_REASONS: Final = pack_request(
    Opcode.HELLO, key=b"dcpd", value=Feature.XERROR.to_bytes(2, "big")
)
"""Asks for the reason of a refusal beside its status."""


class LinkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a newcomer asks of a member."""

    name: str
    address: str
    """HOST:PORT that it will announce."""
    tls_address: str
    """The same with TLS; "": it offers none."""
    proof: bytes = b""

    def proof_with(self, secret: str) -> bytes:
        """Return what shows that the sender knows the secret."""
        text = "\n".join(("dial back", self.name, self.address, self.tls_address))
        return hmac.digest(secret.encode(), text.encode(), hashlib.sha256)


class LinkAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came of it. All fields are empty if the member is let in by the newcomer."""

    what: str = ""
    try_this: str = ""
    is_final: bool = False


class Fault(NamedTuple):
    """Why there is no link."""

    trouble: LinkTrouble
    is_final: bool
    """Whether another attempt would end like this."""


class DialBackRequest:
    """The request of a newcomer, as what is said on a connection."""

    body_bytes_max: Final = READ_BYTES

    def __init__(self, request: LinkRequest) -> None:
        self._request = request
        self.answer: LinkAnswer | None = None

    @property
    def is_in(self) -> bool:
        """Whether the answer has come."""
        return self.answer is not None

    def first(self) -> bytes:
        """Return the packet of the request."""
        value = msgspec.json.encode(self._request)
        return pack_request(Opcode.SASL_AUTH, key=DIAL_BACK.encode(), value=value)

    def take(self, frame: Frame) -> bytes:
        """Take the answer. Raises LoginRefusedError."""
        if frame.status != Status.OK:
            raise refusal_of(frame)
        try:
            self.answer = msgspec.json.decode(frame.value, type=LinkAnswer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LoginRefusedError(f"its answer cannot be read: {error}") from None
        return b""


Login = NodeLogin | DialBackRequest | VersionsRequest
"""What is said on a connection."""


async def fault_of(
    address: str, where: str, login: Login, tls: LinkTls | None, answer_s: float
) -> Fault | None:
    """Connect to HOST:PORT as a link does, and say what `login` says; None: it is done. `where`
    names the node and its address.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        host, port = host_and_port(address)
        context = None if tls is None else tls.context()
        async with asyncio.timeout(DIAL_S if tls is None else TLS_DIAL_S):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=context, server_hostname=host if context else None
            )
        async with asyncio.timeout(answer_s):
            await _say(login, reader, writer)
    except (LoginRefusedError, RemoteProtocolError, ScramException) as error:
        return Fault(LinkTrouble(f"the login at {where} failed: {error}", LOGIN_ADVICE), True)
    except TimeoutError:
        return _unreachable(where, "no answer in time")
    except EOFError:
        why = "it closes the connection"
        if tls is not None and tls.shows_certificate:  # asyncio drops the alert of TLS
            return Fault(certificate_trouble(where, why), False)
        return _unreachable(where, why)
    except (OSError, ValueError) as error:
        trouble = link_trouble(error, where) if isinstance(error, OSError) else None
        return Fault(trouble, True) if trouble else _unreachable(where, str(error))
    finally:
        if writer is not None:
            writer.transport.abort()
    return None


async def _say(login: Login, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    decoder = FrameDecoder(login.body_bytes_max)
    writer.write(_TELL_REASONS + login.first())
    while not login.is_in:
        data = await reader.read(READ_BYTES)
        if not data:
            raise EOFError
        for frame in decoder.feed(data):
            if frame.opcode != Opcode.HELLO:
                writer.write(login.take(frame))


def _unreachable(where: str, why: str) -> Fault:
    advice = (
        "Check that --advertise-host and the port of that node are what other machines reach, and "
        "that no firewall is in between"
    )
    return Fault(LinkTrouble(f"no connection to {where}: {why}", advice), False)


class LinkTries:
    """The side of a member."""

    def __init__(self, access: MetaAccess, tls: LinkTls | None, tasks: Tasks) -> None:
        self._access = access
        self._tls = tls
        self._tasks = tasks
        self._under_way = 0

    def dial_back(
        self, raw: bytes, names: frozenset[str] | None, tell: Callable[[AuthStep], None]
    ) -> AuthStep | asyncio.Task[None]:
        """Take a request; `names` are the hosts of its certificate, if nodes show one. Return its
        refusal, or the task that calls `tell` with the outcome.
        """
        try:
            request = msgspec.json.decode(raw, type=LinkRequest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return AuthStep(Status.EINVAL, claimed=CLUSTER_USER, why=f"no such request: {error}")
        claimed = node_user(request.name)
        if not is_node_user(claimed):
            return AuthStep(Status.EINVAL, claimed=CLUSTER_USER, why="no name of a node")
        proofs = [request.proof_with(secret) for secret in self._access.keyring.secrets]
        if not any(hmac.compare_digest(request.proof, proof) for proof in proofs):
            return AuthStep(Status.AUTH_ERROR, claimed=claimed, why=WRONG_SECRET)
        host = request.address.rpartition(":")[0].strip("[]")
        if names is not None and not is_for(host, names):
            why = wrong_hosts(names, f"the node announces {host}")
            return AuthStep(Status.AUTH_ERROR, claimed=claimed, why=why)
        if self._under_way >= TRIES_MAX:
            why = f"{TRIES_MAX} other links are being tried; try again soon"
            return AuthStep(Status.ETMPFAIL, claimed=claimed, why=why)
        return self._tasks.begin(self._try(request, tell))

    async def _try(self, request: LinkRequest, tell: Callable[[AuthStep], None]) -> None:
        self._under_way += 1
        try:
            answer = await self._answer(request)
        finally:
            self._under_way -= 1
        data = msgspec.json.encode(answer)
        tell(AuthStep(Status.OK, data, claimed=node_user(request.name)))

    async def _answer(self, request: LinkRequest) -> LinkAnswer:
        tls = self._tls
        address = request.address if tls is None else request.tls_address
        where = f"node {request.name}"
        if not address:
            return _answer_of(_without_tls(where))
        where = f"{where} at {address}"
        return _answer_of(await fault_of(address, where, self._access.login(tls), tls, LOGIN_S))


def _answer_of(fault: Fault | None) -> LinkAnswer:
    if fault is None:
        return LinkAnswer()
    return LinkAnswer(
        what=fault.trouble.what, try_this=fault.trouble.try_this, is_final=fault.is_final
    )


def _without_tls(where: str) -> Fault:
    advice = "Start it with --tls-cert, and with the same --cluster-tls"
    return Fault(LinkTrouble(f"{where} offers no TLS", advice), True)


class LinkTrial:
    """The side of a newcomer: a try of each member. `request` says where it is reached now."""

    def __init__(
        self, request: LinkRequest, secret: str, tls: LinkTls | None, patience_s: float
    ) -> None:
        proof = request.proof_with(secret)
        self._request = msgspec.structs.replace(request, proof=proof)
        self._tls = tls
        self._patience_s = patience_s

    async def run(self, alive: Callable[[], Awaitable[Iterable[MemberRecord]]]) -> None:
        """Return when each member that is alive has a link each way. If nobody is alive, somebody
        may just be starting: that has a lease's time. Raises EnrolmentError.
        """
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        give_up_s = begun_s + self._patience_s
        linked: set[str] = set()
        places = asyncio.Semaphore(AT_A_TIME)
        while True:
            found = list(await alive())
            if not found and loop.time() < begun_s + self._patience_s / PATIENCE_LEASES:
                await asyncio.sleep(AGAIN_S)
                continue
            members = [member for member in found if member.member not in linked]
            faults = await asyncio.gather(*(self._fault(each, places) for each in members))
            left = [fault for fault in faults if fault is not None]
            for fault in left:
                if fault.is_final or loop.time() >= give_up_s:
                    raise EnrolmentError(*fault.trouble)
            if not left:
                return
            tried = zip(members, faults, strict=True)
            linked.update(member.member for member, fault in tried if fault is None)
            await asyncio.sleep(AGAIN_S)

    async def _fault(self, member: MemberRecord, places: asyncio.Semaphore) -> Fault | None:
        """Try a link each way; return which one there is not, and why."""
        async with places:
            name = f"node {member.name or member.member}"
            address = member.address if self._tls is None else tls_address_of(member)
            request = DialBackRequest(self._request)
            # One that has just become a member announces its TLS port once it listens.
            fault = _without_tls(name)._replace(is_final=False)
            if address:
                where = f"{name} at {address}"
                found = await fault_of(address, where, request, self._tls, ANSWER_S)
                if found is None:
                    return self._back(name, request)
                fault = found
            return _named(f"this node gets no link to {name}", fault)

    def _back(self, name: str, request: DialBackRequest) -> Fault | None:
        answer = request.answer
        assert answer is not None, "it is done"
        if not answer.what:
            return None
        fault = Fault(LinkTrouble(answer.what, answer.try_this), answer.is_final)
        return _named(f"{name} gets no link to this node", fault)


def _named(direction: str, fault: Fault) -> Fault:
    trouble = fault.trouble
    return fault._replace(trouble=LinkTrouble(f"{direction}: {trouble.what}", trouble.try_this))
