"""What a session asks of whoever knows the users: SASL exchanges as plain calls.

Called by the session's SASL commands; implemented by the server's user table. An exchange is an
opaque object that the session keeps between SASL_AUTH and SASL_STEP and drops afterwards.

Checking a password takes milliseconds of a processor, so the outcome of `start` may come later: the
session then takes no command until the shell hands it in with `Session.login_checked`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from dcp.session.rights import FULL_RIGHTS, Rights


class AuthStep(NamedTuple):
    """The outcome of one SASL message."""

    status: int
    """OK (logged in), AUTH_CONTINUE (send `data`, expect another message), AUTH_ERROR (refused,
    whatever the reason), EINVAL (not a message of this mechanism), or EBUSY or ETMPFAIL (not now:
    it says nothing about the password)."""
    data: bytes = b""
    """What goes back to the client."""
    exchange: object | None = None
    """What `Authenticator.step` wants with the next message; None when the exchange is over."""
    user: str | None = None
    """Who logged in; set with OK only."""
    rights: Rights = FULL_RIGHTS
    """What the user may do; counts with OK only."""
    claimed: str = ""
    """Whom the client says it is, where it has said so."""
    why: str = ""
    """Why it was refused, where the client may know; "" where any reason would tell too much."""


class Authenticator(Protocol):
    """Checks who a client is. Never raises for what a client sent."""

    def mechanisms(self, peer_is_loopback: bool) -> list[str]:
        """Return the SASL mechanisms on offer, strongest first, by their names on the wire."""

    def start(self, mechanism: str, initial: bytes, peer_is_loopback: bool) -> AuthStep | None:
        """Begin an exchange with the client's first message. None: the outcome comes later."""

    def step(self, exchange: object, message: bytes) -> AuthStep:
        """Go on with an exchange that answered AUTH_CONTINUE."""
