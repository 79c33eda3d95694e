"""SASL exchanges as a session sees them: a question goes out, an outcome comes back.

A session does not call the authenticator. It leaves a `LoginQuestion` in its state and takes no
command until the shell hands the outcome to `Session.login_checked`. Checking a password takes
milliseconds of processor time, so the outcome may come later.

The server's table of users implements `Authenticator`. An exchange is an opaque object that the
session keeps between SASL_AUTH and SASL_STEP and drops afterwards.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from dcp.session.access.rights import FULL_RIGHTS, Rights


class AuthStep(NamedTuple):
    """The outcome of one SASL message."""

    status: int
    """OK: logged in. AUTH_CONTINUE: send `data` and expect another message. AUTH_ERROR: refused for
    whatever reason. EINVAL: not a message of this mechanism. EBUSY, ETMPFAIL: not now, which says
    nothing about the password."""
    data: bytes = b""
    """What to send to the client."""
    exchange: object | None = None
    """Passed to `Authenticator.step` with the next message; None when the exchange is over."""
    user: str | None = None
    """The user who logged in; set with OK only."""
    rights: Rights = FULL_RIGHTS
    """What the user may do; meaningful with OK only."""
    claimed: str = ""
    """The user name that the client gave, if it gave one."""
    why: str = ""
    """Why the login was refused; "" if a reason would tell the client too much."""


class LoginQuestion(NamedTuple):
    """One SASL message of the client, which the shell hands to the authenticator."""

    mechanism: str
    message: bytes
    exchange: object | None
    """What the authenticator returned for the message before; None: this is the first one."""

    def ask(self, authenticator: Authenticator, *, peer_is_loopback: bool) -> AuthStep | None:
        """Return the outcome; None: the authenticator tells it later."""
        if self.exchange is not None:
            return authenticator.step(self.exchange, self.message)
        return authenticator.start(self.mechanism, self.message, peer_is_loopback)


class Authenticator(Protocol):
    """Checks who a client is. It does not raise for anything that a client sent."""

    def mechanisms(self, peer_is_loopback: bool) -> list[str]:
        """Return the SASL mechanisms on offer, strongest first, by their names on the wire."""

    def start(self, mechanism: str, initial: bytes, peer_is_loopback: bool) -> AuthStep | None:
        """Begin an exchange with the client's first message. None: the outcome comes later."""

    def step(self, exchange: object, message: bytes) -> AuthStep:
        """Go on with an exchange that answered AUTH_CONTINUE."""
