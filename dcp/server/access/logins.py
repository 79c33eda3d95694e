"""Logins of one server: failures by address and user, connections by user.

Called by sessions (a `PeerLogins` is the `Authenticator` of one connection) and by the admin API.
`dcp.server.access.users` knows names and passwords; this module has the limits and the audit.

Invariants
- each refused login, and each successful one on a key-value port, has a line in the audit log;
- after too many failures within a minute, logins are refused whatever their password, or guessing
  could go on. This is checked before a password is derived, and again when the outcome is known;
- nodes of the cluster are counted each for itself, by address and name: one with a wrong secret
  locks out neither its neighbours at the same address, nor a node of its name elsewhere. A right
  certificate is let in whatever was counted: its check is over before the login;
- passwords are derived in threads (dcp.server.access.password_checks), which do nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from dcp.server.access.audit import AuditLog
from dcp.server.access.link_tls import DIAL_BACK, EXTERNAL, WRONG_SECRET, NodeDoor
from dcp.server.access.password_checks import Outcome, PasswordChecks, Ticket
from dcp.server.access.users import (
    CLUSTER_USER,
    PLAIN,
    PasswordCheck,
    Users,
    is_node_user,
    read_plain,
)
from dcp.server.config.sources import is_loopback
from dcp.session.access.auth import AuthStep
from dcp.session.access.rights import Rights
from dcp.wire.status import Status

WINDOW_S: Final = 60.0
KV_TLS: Final = "kv-tls"
ALL_NAMES_FACTOR: Final = 10
"""An address may fail this many times as often as one of its users, because names can be guessed,
too."""
PAIRS_MAX: Final = 10_000
NODES_MAX: Final = 1_000
"""Nodes at one address are not counted together, so names that somebody makes up are forgotten
first, and apart from those of users."""
_ALL_NAMES: Final = ""
TOO_MANY_CHECKS: Final = "too many passwords wait to be checked; try again soon"


class FailedLogins:
    """Counts failures per (address, user) and per address. Time is an argument."""

    def __init__(
        self, per_minute_max: int, pairs_max: int = PAIRS_MAX, *, counts_addresses: bool = True
    ) -> None:
        self._max = per_minute_max
        self._pairs_max = pairs_max
        self._counts_addresses = counts_addresses
        self._failures: dict[tuple[str, str], tuple[float, int]] = {}
        """(address, user) -> (beginning of its minute, failures since)."""

    def blocked_s(self, host: str, user: str, now_s: float) -> float:
        """Return for how many more seconds such logins are refused, 0 if they are not."""
        return max(
            self._blocked_s((host, user), self._max, now_s),
            self._blocked_s((host, _ALL_NAMES), self._max * ALL_NAMES_FACTOR, now_s),
        )

    def failed(self, host: str, user: str, now_s: float) -> None:
        """Count a failure."""
        for pair in ((host, user), (host, _ALL_NAMES))[: 1 + self._counts_addresses]:
            since_s, count = self._failures.pop(pair, (now_s, 0))
            if now_s - since_s >= WINDOW_S:
                since_s, count = now_s, 0
            if len(self._failures) >= self._pairs_max:
                del self._failures[next(iter(self._failures))]
            self._failures[pair] = (since_s, count + 1)

    def _blocked_s(self, pair: tuple[str, str], failures_max: int, now_s: float) -> float:
        since_s, count = self._failures.get(pair, (0.0, 0))
        return max(0.0, since_s + WINDOW_S - now_s) if count >= failures_max else 0.0


class Peer(NamedTuple):
    """A client's address, and the port that it used."""

    host: str
    address: str
    """host:port"""
    over: str
    """The kind of port: kv, kv-tls, admin or admin-tls."""
    certificate: Mapping[str, Any] = {}
    """What it showed in its TLS handshake, as ssl tells it. {}: none, or one of another CA."""


class LoginLimits(NamedTuple):
    """Limits of logins; settings of the same names."""

    login_failures_per_minute: int
    connections_per_user_max: int
    """0: no limit."""


class Logins:
    """See the module."""

    def __init__(self, users: Users, audit: AuditLog, limits: LoginLimits) -> None:
        self.users = users
        self.audit = audit
        self.limits = limits
        self._failed = FailedLogins(limits.login_failures_per_minute)
        self._failed_nodes = FailedLogins(
            limits.login_failures_per_minute, NODES_MAX, counts_addresses=False
        )
        self._checks = PasswordChecks(self._is_blocked)
        self.nodes = NodeDoor()
        self._connections: Counter[str] = Counter()
        """User -> key-value connections that are logged in."""

    @property
    def checks_under_way(self) -> int:
        """Passwords that are being checked or wait for their check."""
        return len(self._checks)

    def peer(
        self, host: str, address: str, over: str, certificate: Mapping[str, Any] | None = None
    ) -> PeerLogins:
        """Return the authenticator for one connection."""
        return PeerLogins(self, Peer(host, address, over, certificate or {}))

    def refusal(self, peer: Peer, user: str, *, is_node: bool = False) -> str:
        """Return why a login is refused without a check, "" if it is not."""
        counted = self._failed_nodes if is_node else self._failed
        blocked_s = counted.blocked_s(peer.host, user, time.monotonic())
        if not blocked_s:
            return ""
        whose = f"of node {user.partition('/')[2]!r} " if is_node else ""
        return (
            f"too many wrong logins {whose}from {peer.host}; try again in {blocked_s:.0f} s "
            "(setting login_failures_per_minute)"
        )

    def failed(self, peer: Peer, user: str, why: str, *, is_node: bool = False) -> None:
        """Count a failed login, and audit it."""
        counted = self._failed_nodes if is_node else self._failed
        counted.failed(peer.host, user, time.monotonic())
        self.refused(peer, user, why)

    def refused(self, peer: Peer, user: str, why: str) -> None:
        """Audit a refused login. Only `failed` counts it as a failure."""
        self.audit.write(
            "login", user=user, peer=peer.address, over=peer.over, result="refused", why=why
        )

    def check_password(
        self, peer: Peer, user: str, password: str, tell: Callable[[AuthStep], None]
    ) -> AuthStep | Ticket:
        """Return the outcome of a login with a password if it is known at once. Otherwise return a
        ticket; `tell` gets the outcome later, unless the ticket is dropped.
        """
        if why := self.refusal(peer, user):
            return AuthStep(Status.AUTH_ERROR, claimed=user, why=why)
        check = self.users.check_of(user, password, peer_is_loopback=is_loopback(peer.host))
        if isinstance(check, bool):
            return self.users.plain_step(user, is_right=check)
        ticket = self._checks.submit(
            peer.host, check, lambda outcome: tell(self._concluded(peer, check, outcome))
        )
        if ticket is None:
            return AuthStep(Status.ETMPFAIL, claimed=user, why=TOO_MANY_CHECKS)
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Drop a check: nobody waits for its outcome any more."""
        self._checks.drop(ticket)

    async def close(self) -> None:
        """Begin no more checks, and wait for those under way."""
        await self._checks.close()

    async def rights_of_password(self, peer: Peer, user: str, password: str) -> Rights | str:
        """Check a password of the admin API: return rights, or why it is refused."""
        told: asyncio.Future[AuthStep] = asyncio.get_running_loop().create_future()

        def tell(step: AuthStep) -> None:
            if not told.done():
                told.set_result(step)

        step = self.check_password(peer, user, password, tell)
        if isinstance(step, Ticket):
            ticket = step
            try:
                step = await told
            finally:
                self.drop(ticket)  # the request may have been cancelled
        if step.status == Status.OK:
            return step.rights
        if step.why:
            self.refused(peer, user, step.why)
            return step.why
        why = "user or password is wrong; guest works from the server's machine only"
        self.failed(peer, user, why)
        return why

    def _is_blocked(self, host: str, user: str) -> bool:
        return self._failed.blocked_s(host, user, time.monotonic()) > 0

    def _concluded(self, peer: Peer, check: PasswordCheck, outcome: Outcome) -> AuthStep:
        if outcome is None:
            why = self.refusal(peer, check.user)
            return AuthStep(Status.AUTH_ERROR, claimed=check.user, why=why)
        is_right = self.users.conclude(check, matches=outcome)
        return self.users.plain_step(check.user, is_right=is_right)

    def enter(self, user: str) -> str:
        """Count a connection of a user; return why it may not enter, "" if it may."""
        limit = self.limits.connections_per_user_max
        if limit and user != CLUSTER_USER and self._connections[user] >= limit:
            return (
                f"user {user!r} has {limit} connections, the limit "
                "(setting connections_per_user_max)"
            )
        self._connections[user] += 1
        return ""

    def leave(self, user: str) -> None:
        """Count down the connections of a user."""
        self._connections[user] -= 1
        if not self._connections[user]:
            del self._connections[user]


class PeerLogins:
    """The logins of one connection: its session's `Authenticator`."""

    def __init__(self, logins: Logins, peer: Peer) -> None:
        self._logins = logins
        self.peer = peer
        self.out_since_ns = 0
        """Since when nobody is logged in, if so; monotonic. The connection sets it."""
        self._mechanism = ""
        self._claimed = ""
        self._entered = ""
        """The user this connection is counted for."""
        self._ticket: Ticket | None = None
        """A password of this connection that is being checked."""
        self._dialling: asyncio.Task[None] | None = None
        """A link that is being tried for this connection."""
        self.on_outcome: Callable[[AuthStep], None] = _not_waiting
        """Called with the outcome that `start` did not know yet."""

    def mechanisms(self, peer_is_loopback: bool) -> list[str]:
        """Return the mechanisms on offer."""
        mechanisms = self._logins.users.mechanisms(peer_is_loopback)
        if self._logins.nodes.takes_certificates(self.peer.certificate):
            mechanisms.insert(0, EXTERNAL)
        if self._logins.nodes.tries_links:
            mechanisms.append(DIAL_BACK)
        return mechanisms

    def start(self, mechanism: str, initial: bytes, peer_is_loopback: bool) -> AuthStep | None:
        """Begin an exchange. None: `on_outcome` gets the answer."""
        assert self._ticket is None, "a session waits for the outcome of a login"
        self._mechanism = mechanism
        if mechanism == EXTERNAL:
            return self._judge(self._as_node(initial.decode("ascii", "replace")))
        if mechanism == DIAL_BACK:
            return self._dial_back(initial)
        if mechanism != PLAIN:
            return self._judge(self._logins.users.start(mechanism, initial, peer_is_loopback))
        login = read_plain(initial)
        if isinstance(login, AuthStep):
            return self._judge(login)
        step = self._logins.check_password(self.peer, login.user, login.password, self._checked)
        if isinstance(step, AuthStep):
            return self._judge(step)
        self._ticket = step
        return None

    def _as_node(self, user: str) -> AuthStep:
        """Return the outcome of a login as a node of the cluster, with a certificate."""
        logins = self._logins
        claimed = user if is_node_user(user) else CLUSTER_USER
        if why := logins.nodes.certificate_refusal(self.peer.certificate):
            return AuthStep(Status.AUTH_ERROR, claimed=claimed, why=why)
        return logins.users.plain_step(CLUSTER_USER, is_right=True)._replace(claimed=claimed)

    def _dial_back(self, request: bytes) -> AuthStep | None:
        """Begin to try a link to a node that wants to become a member."""
        peer, nodes = self.peer, self._logins.nodes
        begun = nodes.dial_back(
            request, peer.certificate, is_tls=peer.over == KV_TLS, tell=self._dialled
        )
        if isinstance(begun, AuthStep):
            self._audit_try(begun)
            return begun
        self._dialling = begun
        return None

    def _dialled(self, step: AuthStep) -> None:
        self._dialling = None
        self._audit_try(step)
        self.on_outcome(step)

    def _audit_try(self, step: AuthStep) -> None:
        """Audit a try of a link. It lets nobody in, and a wrong proof counts as a wrong secret."""
        logins, peer = self._logins, self.peer
        if step.status == Status.OK:
            logins.audit.write(
                "login", user=step.claimed, peer=peer.address, over=peer.over,
                mechanism=DIAL_BACK, result="tried",
            )  # fmt: skip
        elif step.why == WRONG_SECRET:
            logins.failed(peer, step.claimed, step.why, is_node=True)
        else:
            logins.refused(peer, step.claimed, step.why)

    def step(self, exchange: object, message: bytes) -> AuthStep:
        """Continue an exchange."""
        return self._judge(self._logins.users.step(exchange, message))

    def leave(self) -> None:
        """Note that the connection is gone, or nobody is logged in on it any more."""
        if self._ticket is not None:
            self._logins.drop(self._ticket)
            self._ticket = None
        if self._dialling is not None:
            self._dialling.cancel()
            self._dialling = None
        if self._entered:
            self._logins.leave(self._entered)
            self._entered = ""

    def _checked(self, step: AuthStep) -> None:
        self._ticket = None
        self.on_outcome(self._judge(step))

    def _judge(self, step: AuthStep) -> AuthStep:
        logins, peer = self._logins, self.peer
        name = self._claimed = step.claimed or self._claimed
        is_node = is_node_user(name) and self._mechanism != PLAIN
        blocked = ""
        if self._mechanism != EXTERNAL:
            blocked = logins.refusal(peer, name, is_node=is_node)
        if blocked:
            step = AuthStep(Status.AUTH_ERROR, claimed=name, why=blocked)
        elif (
            is_node
            and self._mechanism != EXTERNAL
            and (why := logins.nodes.secret_refusal(is_tls=peer.over == KV_TLS))
        ):
            step = AuthStep(Status.AUTH_ERROR, claimed=name, why=why)
        elif step.status == Status.AUTH_CONTINUE:
            return step
        self.leave()
        if step.status == Status.OK and step.user is not None:
            crowded = logins.enter(step.user)
            if not crowded:
                self._entered = step.user
                logins.audit.write(
                    "login", user=step.user, peer=peer.address, over=peer.over,
                    mechanism=self._mechanism, result="ok",
                )  # fmt: skip
                return step
            step = AuthStep(Status.EBUSY, claimed=name, why=crowded)
        if step.why:  # the password was not checked, or does not matter
            logins.refused(peer, name, step.why)
        elif is_node:
            logins.failed(peer, name, WRONG_SECRET, is_node=True)
        else:
            logins.failed(peer, name, "user or password is wrong, or from elsewhere")
        return step


def _not_waiting(_step: AuthStep) -> None:
    """Do nothing: no login is under way."""
