"""Logins of browsers: a random token in a cookie stands for a user, until the browser or its user
ends that.

The password is not kept. A session ends when its user is removed or gets another password, and
after SESSION_S. A token alone is not enough: the request must have the header CONSOLE_HEADER, which
a page of another origin cannot send without being asked for its permission first, and that is never
given. So a link or a form elsewhere, also on another port of this host, uses nobody's login.

Invariant: at most SESSIONS_MAX sessions are kept; the oldest one makes room.
"""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple

from dcp.server.access.users import Users
from dcp.session.access.rights import Rights

CONSOLE_HEADER: Final = "x-dcpd-console"
SESSION_S: Final = 12 * 3600.0
"""A day of work. The next day begins with a password."""
SESSIONS_MAX: Final = 1000
_TOKEN_BYTES: Final = 32


class _Session(NamedTuple):
    user: str
    login_mark: bytes
    ends_s: float


class BrowserSessions:
    """See the module. Times are monotonic seconds."""

    def __init__(self, users: Users) -> None:
        self._users = users
        self._open: dict[str, _Session] = {}
        """By token, the oldest one first."""

    def open(self, user: str, now_s: float) -> str:
        """Return the token of a new session of a user who has just logged in."""
        if len(self._open) >= SESSIONS_MAX:
            del self._open[next(iter(self._open))]
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        mark = self._users.login_mark(user)
        self._open[token] = _Session(user, mark, now_s + SESSION_S)
        return token

    def login_of(
        self, token: str, now_s: float, *, peer_is_loopback: bool
    ) -> tuple[str, Rights] | None:
        """Return user and rights, None if the session is over, or was never there."""
        session = self._open.get(token)
        if session is None:
            return None
        mark = self._users.login_mark(session.user, peer_is_loopback=peer_is_loopback)
        rights = self._users.rights_of(session.user)
        if not mark or mark != session.login_mark or rights is None or now_s > session.ends_s:
            self.close(token)
            return None
        return session.user, rights

    def close(self, token: str) -> None:
        """End a session, if there is one."""
        self._open.pop(token, None)
