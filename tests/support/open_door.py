"""An authenticator for tests and simulated nodes."""

from __future__ import annotations

from dcp.session.auth import AuthStep
from dcp.wire.status import Status


class OpenDoor:
    """Lets everybody in as guest."""

    def mechanisms(self, peer_is_loopback: bool) -> list[str]:
        return ["PLAIN"] if peer_is_loopback else []

    def start(self, mechanism: str, initial: bytes, peer_is_loopback: bool) -> AuthStep:
        return AuthStep(Status.OK, b"", None, "guest")

    def step(self, exchange: object, message: bytes) -> AuthStep:
        return AuthStep(Status.AUTH_ERROR, b"", None, None)
