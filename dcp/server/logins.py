"""Logins of one server: who tries from where, how often it went wrong, how many are in.

Called by sessions (a `PeerLogins` is the `Authenticator` of one connection) and by the admin API.
Users know names and passwords (dcp.server.users); here stand the limits and the audit.

Invariants
- every login that was refused or let in over a key-value port has its line in the audit log;
- whoever fails too often within a minute is refused without a look at the password: the right one
  too, else guessing could go on.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Final, NamedTuple

from dcp.server.audit import AuditLog
from dcp.server.config import is_loopback
from dcp.server.users import Users
from dcp.session.auth import AuthStep
from dcp.session.rights import Rights
from dcp.wire.status import Status

WINDOW_S: Final = 60.0
ALL_NAMES_FACTOR: Final = 10
"""An address may fail this many times as often as one of its users: guessing names counts too."""
PAIRS_MAX: Final = 10_000
_ALL_NAMES: Final = ""


class FailedLogins:
    """Counts failures per (address, user) and per address. Time is an argument.

    Called on the loop and, for the admin interface, in threads: hence the lock.
    """

    def __init__(self, per_minute_max: int) -> None:
        self._max = per_minute_max
        self._failures: dict[tuple[str, str], tuple[float, int]] = {}
        """(address, user) -> (beginning of its minute, failures since)."""
        self._lock = threading.Lock()

    def blocked_s(self, host: str, user: str, now_s: float) -> float:
        """Return how many seconds more such logins are refused, 0 if they are not."""
        return max(
            self._blocked_s((host, user), self._max, now_s),
            self._blocked_s((host, _ALL_NAMES), self._max * ALL_NAMES_FACTOR, now_s),
        )

    def failed(self, host: str, user: str, now_s: float) -> None:
        """Count a failure."""
        with self._lock:
            for pair in ((host, user), (host, _ALL_NAMES)):
                since_s, count = self._failures.pop(pair, (now_s, 0))
                if now_s - since_s >= WINDOW_S:
                    since_s, count = now_s, 0
                if len(self._failures) >= PAIRS_MAX:
                    del self._failures[next(iter(self._failures))]
                self._failures[pair] = (since_s, count + 1)

    def _blocked_s(self, pair: tuple[str, str], failures_max: int, now_s: float) -> float:
        since_s, count = self._failures.get(pair, (0.0, 0))
        return max(0.0, since_s + WINDOW_S - now_s) if count >= failures_max else 0.0


class Peer(NamedTuple):
    """Where a client is and how it came."""

    host: str
    address: str
    """host:port"""
    over: str
    """Which door: kv, kv-tls, admin or admin-tls."""


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
        self._limits = limits
        self._failed = FailedLogins(limits.login_failures_per_minute)
        self._connections: Counter[str] = Counter()
        """User -> key-value connections that are logged in."""

    def peer(self, host: str, address: str, over: str) -> PeerLogins:
        """Return the authenticator for one connection."""
        return PeerLogins(self, Peer(host, address, over))

    def refusal(self, peer: Peer, user: str) -> str:
        """Return why a login is not even looked at, "" if it is."""
        blocked_s = self._failed.blocked_s(peer.host, user, time.monotonic())
        if not blocked_s:
            return ""
        return (
            f"too many wrong logins from {peer.host}; try again in {blocked_s:.0f} s "
            "(setting login_failures_per_minute)"
        )

    def failed(self, peer: Peer, user: str, why: str) -> None:
        """A login went wrong."""
        self._failed.failed(peer.host, user, time.monotonic())
        self.audit.write(
            "login", user=user, peer=peer.address, over=peer.over, result="refused", why=why
        )

    def rights_of_password(self, peer: Peer, user: str, password: str) -> Rights | str:
        """Check a password of the admin API: return rights, or why it is refused. Blocks for ms."""
        why = self.refusal(peer, user)
        if not why:
            if self.users.is_password_of(
                user, password, peer_is_loopback=is_loopback(peer.host)
            ) and (rights := self.users.rights_of(user)):
                return rights
            why = "user or password is wrong; guest works from the server's machine only"
        self.failed(peer, user, why)
        return why

    def enter(self, user: str) -> str:
        """Count a connection of a user; return why it may not enter, "" if it may."""
        limit = self._limits.connections_per_user_max
        if limit and self._connections[user] >= limit:
            return (
                f"user {user!r} has {limit} connections, the limit "
                "(setting connections_per_user_max)"
            )
        self._connections[user] += 1
        return ""

    def leave(self, user: str) -> None:
        """A connection of a user is gone."""
        self._connections[user] -= 1
        if not self._connections[user]:
            del self._connections[user]


class PeerLogins:
    """The logins of one connection: its session's `Authenticator`."""

    def __init__(self, logins: Logins, peer: Peer) -> None:
        self._logins = logins
        self._peer = peer
        self._mechanism = ""
        self._claimed = ""
        self._entered = ""
        """The user this connection is counted for."""

    def mechanisms(self, peer_is_loopback: bool) -> list[str]:
        """Return the mechanisms on offer."""
        return self._logins.users.mechanisms(peer_is_loopback)

    def start(self, mechanism: str, initial: bytes, peer_is_loopback: bool) -> AuthStep:
        """Begin an exchange."""
        self._mechanism = mechanism
        return self._judge(self._logins.users.start(mechanism, initial, peer_is_loopback))

    def step(self, exchange: object, message: bytes) -> AuthStep:
        """Go on with an exchange."""
        return self._judge(self._logins.users.step(exchange, message))

    def leave(self) -> None:
        """The connection is gone, or nobody is logged in on it any more."""
        if self._entered:
            self._logins.leave(self._entered)
            self._entered = ""

    def _judge(self, step: AuthStep) -> AuthStep:
        logins, peer = self._logins, self._peer
        name = self._claimed = step.claimed or self._claimed
        blocked = logins.refusal(peer, name)
        if blocked:
            step = AuthStep(Status.AUTH_ERROR, claimed=name, why=blocked)
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
            logins.audit.write(
                "login", user=name, peer=peer.address, over=peer.over, result="refused",
                why=crowded,
            )  # fmt: skip
            return AuthStep(Status.EBUSY, claimed=name, why=crowded)
        if blocked:
            logins.audit.write(
                "login", user=name, peer=peer.address, over=peer.over, result="refused",
                why=blocked,
            )  # fmt: skip
        else:
            logins.failed(peer, name, step.why or "user or password is wrong, or from elsewhere")
        return step
