"""The login of a node at another one, as the client: bytes in, bytes out. Pure.

With the cluster's secret (SCRAM), which both sides prove to know, or with the certificate that the
TLS handshake has shown (EXTERNAL). The user names the node, so the other side counts wrong logins
for each node (`dcp.server.access.logins`).
"""

from __future__ import annotations

import contextlib
from typing import Final

import msgspec
from scramp import ScramClient

from dcp.server.access.link_tls import EXTERNAL
from dcp.server.access.users import node_user
from dcp.wire.frame import Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

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
