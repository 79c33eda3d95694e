"""The beginning of every client connection, sans-IO: HELLO, SASL, SELECT_BUCKET, configuration.

    HELLO ─ SASL_AUTH PLAIN ─ SELECT_BUCKET ─ GET_CLUSTER_CONFIG              loopback: one write
    HELLO ─ SASL_LIST_MECHS → SASL_AUTH SCRAM → SASL_STEP → SELECT_BUCKET ─ …  elsewhere

`begin()` returns the first bytes. Each reply goes through `receive`, which returns the next bytes
or b"". When `is_done` is True, the connection can be used. On loopback the password is sent with
PLAIN: it does not leave the machine, and SCRAM costs 15 ms of key derivation. Elsewhere SCRAM
proves the password without sending it, with the strongest hash that the server offers.

Invariant: one reply per request, in order, with the request's opaque.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from struct import pack
from typing import Any, ClassVar, Final

from clients.address import ServerAddress
from clients.errors import AuthenticationError, ConnectError, error_from_status
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, pack_request
from dcp.wire.opcode import Magic, Opcode
from dcp.wire.status import Status

FEATURES: Final = (
    Feature.MUTATION_SEQNO,
    Feature.XERROR,
    Feature.SELECT_BUCKET,
    Feature.COLLECTIONS,
    Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION,
    Feature.DEDUPE_NOT_MY_VBUCKET,
    Feature.XATTR,
    Feature.ALT_REQUEST,
    Feature.SYNC_REPLICATION,
)

CONFIG_PUSH: Final = 0x01
"""Opcode of a request by the server (magic 0x82): a new cluster configuration is its value."""
PUSH_FEATURES: Final = (*FEATURES, Feature.DUPLEX, Feature.CLUSTERMAP_CHANGE_NOTIFICATION)
"""The same, and the server pushes each newer configuration."""

AGENT: Final = b'{"a":"dcpd-python/0.1"}'

_SCRAM_MECHANISMS: Final = {
    "SCRAM-SHA512": "SCRAM-SHA-512",
    "SCRAM-SHA256": "SCRAM-SHA-256",
    "SCRAM-SHA1": "SCRAM-SHA-1",
}
"""Name on this wire -> name in RFC 5802 and 7677, strongest first."""

_AUTH_REFUSED: Final = frozenset({Status.AUTH_ERROR, Status.EACCESS, Status.KEY_ENOENT})


def is_config_push(frame: Frame) -> bool:
    """Whether a frame is a new configuration that the server pushed."""
    is_push = frame.magic == Magic.SERVER_REQUEST and frame.opcode == CONFIG_PUSH
    return is_push and bool(frame.value)


class Handshake:
    """The beginning of one connection."""

    def __init__(
        self,
        address: ServerAddress,
        *,
        is_loopback: bool,
        wants_config: bool = True,
        features: tuple[int, ...] = FEATURES,
    ) -> None:
        self.address = address
        self._wanted = features
        self.features: frozenset[int] = frozenset()
        """The features that the server granted."""
        self.config = b""
        """The bucket's configuration as JSON, b"" if the server has none."""
        self.is_done = False
        self._is_loopback = is_loopback
        self._wants_config = wants_config
        self._expected: deque[tuple[int, int]] = deque()
        self._opaque = 0
        self._scram: Any = None
        self._mechanism = b""

    @property
    def has_collections(self) -> bool:
        """Whether keys carry their collection id."""
        return Feature.COLLECTIONS in self.features

    @property
    def has_durability(self) -> bool:
        """Whether writes may ask for durability."""
        return Feature.SYNC_REPLICATION in self.features

    def begin(self) -> bytes:
        """Return the first bytes to send."""
        features = pack(f">{len(self._wanted)}H", *self._wanted)
        hello = self._ask(Opcode.HELLO, key=AGENT, value=features)
        if not self._is_loopback:
            return hello + self._ask(Opcode.SASL_LIST_MECHS)
        plain = f"\0{self.address.user}\0{self.address.password}".encode()
        self._mechanism = b"PLAIN"
        return hello + self._ask(Opcode.SASL_AUTH, key=b"PLAIN", value=plain) + self._select()

    def receive(self, frame: Frame) -> bytes:
        """Process one reply and return the next bytes to send.

        If it raises AuthenticationError, ConnectError or a StatusError, close the connection.
        """
        if is_config_push(frame):
            self.config = frame.value
            return b""
        if not self._expected or self._expected[0] != (frame.opcode, frame.opaque):
            raise ConnectError(
                f"the server sent an unexpected answer to opcode 0x{frame.opcode:02x}",
                node=self.address.node,
                hint="Check that this is a dcpd port (memcached binary protocol).",
            )
        self._expected.popleft()
        reply = self._steps[frame.opcode](self, frame)
        self.is_done = not self._expected
        return reply

    def _ask(self, opcode: Opcode, key: bytes = b"", value: bytes = b"") -> bytes:
        self._opaque += 1
        self._expected.append((opcode, self._opaque))
        return pack_request(opcode, key=key, value=value, opaque=self._opaque)

    def _select(self) -> bytes:
        select = self._ask(Opcode.SELECT_BUCKET, key=self.address.bucket.encode())
        return select + self._ask(Opcode.GET_CLUSTER_CONFIG) if self._wants_config else select

    # -- one method per reply ------------------------------------------------------------------

    def _on_hello(self, frame: Frame) -> bytes:
        if frame.status == Status.OK:
            value = frame.value
            self.features = frozenset(
                int.from_bytes(value[at : at + 2], "big") for at in range(0, len(value), 2)
            )
        return b""

    def _on_mechanisms(self, frame: Frame) -> bytes:
        self._check(frame, "list of mechanisms")
        offered = frame.value.decode("ascii", "replace").split()
        for name, rfc_name in _SCRAM_MECHANISMS.items():
            if name in offered:
                return self._begin_scram(name, rfc_name)
        raise AuthenticationError(
            f"the server offers {', '.join(offered) or 'no mechanism'}; except on loopback, only"
            " SCRAM is used, so that the password does not cross the network",
            node=self.address.node,
        )

    def _begin_scram(self, name: str, rfc_name: str) -> bytes:
        from scramp import ScramClient

        self._mechanism = name.encode()
        self._scram = ScramClient([rfc_name], self.address.user, self.address.password)
        first = self._scram.get_client_first().encode()
        return self._ask(Opcode.SASL_AUTH, key=self._mechanism, value=first)

    def _on_auth(self, frame: Frame) -> bytes:
        if frame.status == Status.AUTH_CONTINUE and self._scram is not None:
            final = self._scram_step("set_server_first", frame)
            return self._ask(Opcode.SASL_STEP, key=self._mechanism, value=final)
        if self._scram is not None and frame.status == Status.OK:
            raise AuthenticationError(
                "the server accepted without proving that it knows the password",
                node=self.address.node,
            )
        self._check_auth(frame)
        return b""

    def _on_step(self, frame: Frame) -> bytes:
        self._check_auth(frame)
        self._scram_step("set_server_final", frame)
        return self._select()

    def _scram_step(self, method: str, frame: Frame) -> bytes:
        from scramp import ScramException

        try:
            getattr(self._scram, method)(frame.value.decode("utf-8", "replace"))
            if method == "set_server_first":
                final: bytes = self._scram.get_client_final().encode()
                return final
        except ScramException as error:
            raise AuthenticationError(f"SCRAM failed: {error}", node=self.address.node) from error
        return b""

    def _check_auth(self, frame: Frame) -> None:
        if frame.status in _AUTH_REFUSED:
            raise AuthenticationError(
                f"user {self.address.user!r} was refused",
                status=frame.status,
                node=self.address.node,
            )
        self._check(frame, "authentication")

    def _on_select(self, frame: Frame) -> bytes:
        self._check(frame, f"select bucket {self.address.bucket!r}")
        return b""

    def _on_config(self, frame: Frame) -> bytes:
        if frame.status == Status.OK:
            self.config = frame.value
        return b""

    def _check(self, frame: Frame, operation: str) -> None:
        if frame.status != Status.OK:
            raise error_from_status(
                frame.status, operation, body=frame.value, node=self.address.node
            )

    _steps: ClassVar[dict[int, Callable[[Handshake, Frame], bytes]]] = {
        Opcode.HELLO: _on_hello,
        Opcode.SASL_LIST_MECHS: _on_mechanisms,
        Opcode.SASL_AUTH: _on_auth,
        Opcode.SASL_STEP: _on_step,
        Opcode.SELECT_BUCKET: _on_select,
        Opcode.GET_CLUSTER_CONFIG: _on_config,
    }
