"""Links between members: the login, the connection, and which of them a member does not have.

**The login** of a node at another one, as the client: bytes in, bytes out. With the cluster's
secret (SCRAM), which both sides prove to know, or with the certificate that the TLS handshake has
shown (EXTERNAL). The user names the node, so the other side counts wrong logins for each node
(`dcp.server.access.logins`).

**The connection** of a replica to its master's node: dial, log in, then move bytes of the link.

    dial ── connected ── SASL as the cluster's internal user ── the link's bytes, both ways

Both sides prove that they know the cluster's secret (SCRAM, with TLS or without), or that they have
certificates of the nodes' CA (mutual TLS and EXTERNAL). `dcp.server.access.link_tls` has the modes,
`failover.replication.link` the link's rules.

Invariants
- the link gets no byte before the other side has proved who it is;
- whatever ends the connection closes the link; the node core asks for another one.

**The other members are told** to which nodes this one has no link although they run, and why. A
node that is not let in finds that out alone, and people ask any node. So the reason goes into the
metadata store, under the lease of this process: it is gone when the process is.

Invariants
- a trouble ends with the next link to that node, when the node is down, or when nobody has dialled
  it for FORGET_NS: this node does not follow it any more;
- a trouble is logged once, until it is another one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final, cast

import msgspec
from scramp import ScramClient, ScramException

from dcp.server.access.link_tls import (
    EXTERNAL,
    LinkTls,
    LinkTrouble,
    certificate_trouble,
    link_trouble,
)
from dcp.server.access.users import node_user
from dcp.server.cluster.node_map import host_and_port, tls_address_of
from dcp.server.observe.elapsed import elapsed_ns
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.housekeeping import Tasks
from dcp.server.observe.meter import LinkBytes
from dcp.wire.frame import Frame, FrameDecoder, RemoteProtocolError, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.coordinator.cluster_session import ClusterSession
from failover.coordinator.records import KeyKind, LinksRecord, RefusedLink, encode_record
from failover.metadata.metastore import (
    Compare,
    CompareTarget,
    Delete,
    MetaStore,
    Put,
    StoreResult,
    Txn,
    if_unchanged,
)
from failover.replication.link import LinkState, ReplicaLink
from failover.replication.replica import BARRED_REDIAL_NS_MAX

_MECHANISM: Final = "SCRAM-SHA512"
_RFC_MECHANISM: Final = "SCRAM-SHA-512"
LOGIN_ADVICE: Final = (
    "The log of that node has the reason. The secret in cluster.json and --cluster-tls must be the "
    "same on all nodes"
)


class LoginRefusedError(Exception):
    """The other side does not let this node in, or does not know the secret."""


class NodeLogin:
    """See the module. `own_name` is the name of the node that logs in."""

    body_bytes_max: Final = 1 << 16

    def __init__(self, secret: str, own_name: str, *, uses_certificate: bool) -> None:
        self._user = node_user(own_name)
        self._scram = ScramClient([_RFC_MECHANISM], self._user, secret)
        self._uses_certificate = uses_certificate
        self.is_in = False
        """Whether the login is done on both sides."""

    def first(self) -> bytes:
        """Return the packet that begins the login."""
        if self._uses_certificate:
            return pack_request(Opcode.SASL_AUTH, key=EXTERNAL.encode(), value=self._user.encode())
        first = self._scram.get_client_first().encode()
        return pack_request(Opcode.SASL_AUTH, key=_MECHANISM.encode(), value=first)

    def take(self, frame: Frame) -> bytes:
        """Take an answer; return what to send next. Raises LoginRefusedError, ScramException."""
        if self.is_in:
            raise LoginRefusedError("the other side sent more than the end of the login")
        text = frame.value.decode("utf-8", "replace")
        if frame.opcode == Opcode.SASL_AUTH and frame.status == Status.AUTH_CONTINUE:
            self._scram.set_server_first(text)
            final = self._scram.get_client_final().encode()
            return pack_request(Opcode.SASL_STEP, key=_MECHANISM.encode(), value=final)
        if frame.opcode == Opcode.SASL_STEP and frame.status == Status.OK:
            self._scram.set_server_final(text)  # it proves that the other side knows the secret
            self.is_in = True
        elif self._uses_certificate and frame.status == Status.OK:
            self.is_in = True  # the TLS handshake has proved who the other side is
        else:
            raise refusal_of(frame)
        return b""


def refusal_of(frame: Frame) -> LoginRefusedError:
    """Return what an answer says that lets nobody in."""
    text = frame.value.decode("utf-8", "replace")
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        text = str(msgspec.json.decode(frame.value)["error"]["context"])  # with XERROR
    if frame.status == Status.AUTH_ERROR:
        return LoginRefusedError(f"it does not let this node in ({text[:300]})")
    return LoginRefusedError(f"status 0x{frame.status:x} {text[:300]}")


DIAL_S: Final = 1.0
"""How long a connection may take. A node that does not answer is dialled again."""
TLS_DIAL_S: Final = 3.0
"""The same with TLS: both sides compute, and a busy machine takes its time for that."""


class MemberLink(asyncio.Protocol):
    """See the module. `on_bytes` is called after the link has taken bytes, and at its end."""

    def __init__(
        self,
        link: ReplicaLink,
        login: NodeLogin,
        on_bytes: Callable[[], None],
        *,
        tls: LinkTls | None = None,
        name: str = "the node",
        member: str = "",
        traffic: LinkBytes | None = None,
    ) -> None:
        """`tls`: how to dial; None: without TLS. `name` and `member` are those of the other
        node. `traffic` counts the bytes both ways.
        """
        self.link = link
        self._traffic = traffic or LinkBytes()
        self.member = member
        self.trouble: LinkTrouble | None = None
        """Why there is no link, if an operator has to do something; None: there is, or not yet."""
        self._on_bytes = on_bytes
        self._tls = tls
        self.name = name
        self._where = name
        self._login = login
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None

    async def dial(self, address: str) -> None:
        """Connect to HOST:PORT. A failure closes the link, also if the text is no address: another
        node's mistake must not end this one.
        """
        self._where = f"{self.name} at {address}"
        loop = asyncio.get_running_loop()
        try:
            host, port = host_and_port(address)
            tls = None if self._tls is None else self._tls.context()
            limit_s = DIAL_S if tls is None else TLS_DIAL_S
            async with asyncio.timeout(limit_s):
                await loop.create_connection(
                    lambda: self, host, port, ssl=tls, server_hostname=host if tls else None
                )
        except (OSError, TimeoutError, ValueError) as error:
            if isinstance(error, OSError):
                self.trouble = link_trouble(error, self._where)
            reason = str(error) or "no answer in time"
            self.link.unreachable(
                str(self.trouble or f"no connection to {self._where}: {reason}"),
                is_refused=isinstance(error, ConnectionRefusedError),
                is_barred=self.trouble is not None,
            )
            self._on_bytes()

    def cannot_dial(self, why: LinkTrouble) -> None:
        """Give the link up: there is no address to dial."""
        self.trouble = why
        self.link.unreachable(str(why), is_refused=False, is_barred=True)
        self._on_bytes()

    @property
    def is_in(self) -> bool:
        """Whether the login is done on both sides."""
        return self._login.is_in

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.link.state is LinkState.CLOSED and self._transport is None

    # -- asyncio.Protocol --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the login."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._login.first())
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Take what the other side sent."""
        self._traffic.received += len(data)
        if not self.is_in:
            try:
                for frame in self._decoder.feed(data):
                    self._send(self._login.take(frame))
            except (LoginRefusedError, RemoteProtocolError, ScramException) as error:
                why = f"the login at {self._where} failed: {error}"
                self.trouble = LinkTrouble(why, LOGIN_ADVICE)
                self.link.refused(why)
        else:
            self.link.receive(data, elapsed_ns())
        self._on_bytes()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._transport = None
        if not self.is_in and not self.trouble:
            self.trouble = link_trouble(exc, self._where) if isinstance(exc, OSError) else None
            if not self.trouble and self._uses_certificate:  # asyncio drops the alert of TLS
                self.trouble = certificate_trouble(self._where, "it closes the connection")
            if self.trouble:
                self.link.refused(str(self.trouble))
        self.link.closed()
        self._on_bytes()

    # -- what the node calls -----------------------------------------------------------------------

    def cut(self) -> None:
        """End the link, as if the network had."""
        self.link.closed()
        if self._transport is not None:
            self._transport.abort()

    def flush(self) -> None:
        """Send what the link has to send; end the connection of a link that is closed."""
        transport = self._transport
        if transport is None:
            return
        if self.is_in and (data := self.link.bytes_to_send()):
            self._traffic.sent += len(data)
            transport.write(data)
        if self.link.state is LinkState.CLOSED:
            transport.abort()

    def _send(self, data: bytes) -> None:
        assert self._transport is not None
        self._traffic.sent += len(data)
        self._transport.write(data)

    @property
    def _uses_certificate(self) -> bool:
        """Whether this node logs in with its certificate, and not with the secret."""
        return self._tls is not None and self._tls.shows_certificate


FORGET_NS: Final = 3 * BARRED_REDIAL_NS_MAX
WRITE_NS: Final = 1_000_000_000
"""Time between two attempts to write: reasons may change with every dial."""


class OwnLinks:
    """See the module."""

    def __init__(self, session: ClusterSession, meta: MetaStore, log: EventLog) -> None:
        self._session = session
        self._meta = meta
        self._log = log
        self.troubles: dict[str, LinkTrouble] = {}
        """By member, why there is no link to its node."""
        self._tried_ns: dict[str, int] = {}
        self._next_ns = 0

    def failed(self, now_ns: int, member: str, trouble: LinkTrouble) -> None:
        """A link could not be made, and an operator has to do something."""
        assert member != self._session.membership.member
        self._tried_ns[member] = now_ns
        if self.troubles.get(member) != trouble:
            self.troubles[member] = trouble
            self._log.warning("no link to another node", reason=str(trouble))

    def over(self, member: str) -> None:
        """There is a link, or nobody runs there."""
        if self.troubles.pop(member, None) is not None:
            del self._tried_ns[member]

    def tick(self, now_ns: int) -> None:
        """Let time pass: write what the metadata store does not say yet."""
        for member in [each for each, at in self._tried_ns.items() if now_ns - at >= FORGET_NS]:
            self.over(member)
        membership, view = self._session.membership, self._session.view
        if now_ns < self._next_ns or not membership.is_alive or not view.is_loaded:
            return
        key = view.keys.of_member(KeyKind.LINKS, membership.member)
        refused = {member: RefusedLink(*trouble) for member, trouble in self.troubles.items()}
        value = encode_record(LinksRecord(member=membership.member, refused=refused))
        if value == view.value(key) or not (refused or view.mod_revision(key)):
            return
        self._next_ns = now_ns + WRITE_NS
        alive = view.keys.of_member(KeyKind.ALIVE, membership.member)
        compares = (
            # The lease of the alive key: a newer process of this member has another one.
            Compare(alive, CompareTarget.LEASE, membership.lease_id),
            if_unchanged(key, view.mod_revision(key)),
        )
        change = Put(key, value, membership.lease_id) if refused else Delete(key)
        self._meta.submit(Txn(compares, (change,)), _written)


def _written(_result: StoreResult) -> None:
    """Do nothing: the view says whether it was written."""


class MemberLinks:
    """The connections of this node's copies to the nodes of their masters, until each has ended.

    `traffic` counts bytes by the name of the other node.
    """

    def __init__(
        self,
        session: ClusterSession,
        meta: MetaStore,
        tls: LinkTls | None,
        traffic: dict[str, LinkBytes],
        tasks: Tasks,
        log: EventLog,
    ) -> None:
        self._view = session.view
        self._tls = tls
        self._traffic = traffic
        self._tasks = tasks
        self._open: list[MemberLink] = []
        self.own = OwnLinks(session, meta, log)
        """What the other members are told of links that there are not."""
        self.cut_members: set[str] = set()
        """Members that this node dials no more, for tests."""

    def dial(
        self, link: ReplicaLink, member: str, login: NodeLogin, on_bytes: Callable[[], None]
    ) -> None:
        """Connect a link to the node of a member. `on_bytes` is called after the link has taken
        bytes, and at its end.
        """
        stored, tls = self._view.members.get(member), self._tls
        if stored is None or member in self.cut_members:
            link.closed()
            return
        record = stored.content
        name = f"node {record.name or record.member}"
        connection = MemberLink(
            link, login, on_bytes, tls=tls, name=name, member=member,
            traffic=self._traffic[record.name or record.member],
        )  # fmt: skip
        self._open.append(connection)
        address = record.address if tls is None else tls_address_of(record)
        if address:
            self._tasks.begin(connection.dial(address))
        else:
            advice = "Start it with --tls-cert, and with the same --cluster-tls"
            connection.cannot_dial(LinkTrouble(f"{name} offers no TLS", advice))

    def cut_off(self, member: str) -> None:
        """End the link to a node, and dial it no more until `cut_members` has lost it."""
        self.cut_members.add(member)
        for each in self._open:
            if each.member == member:
                each.cut()

    def flush(self) -> None:
        """Send what the links have to send."""
        for each in self._open:
            each.flush()

    def drop_ended(self) -> None:
        """Forget the connections of which nothing more comes."""
        self._open = [each for each in self._open if not self._has_ended(each)]

    def _has_ended(self, connection: MemberLink) -> bool:
        """Whether nothing more comes of a connection; tell once why there is none."""
        if connection.is_in or connection.link.is_refused:  # refused: that node is down now
            self.own.over(connection.member)
        if not connection.is_over:
            return False
        if connection.trouble is not None:
            self.own.failed(elapsed_ns(), connection.member, connection.trouble)
        return True

    def close(self) -> None:
        """End all of them: the node stops."""
        for each in self._open:
            each.link.closed()
            each.flush()
        self._open.clear()
