"""Where a server is and who asks: `dcpd://user:password@host:port/bucket` or `host:port`.

Defaults: port 11210, user and password guest (a server accepts them from loopback only), bucket
`default`.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import unquote

DEFAULT_PORT: Final = 11210
DEFAULT_BUCKET: Final = "default"
_SCHEMES: Final = ("dcpd://", "couchbase://")


class ServerAddress(NamedTuple):
    """A server's address and the credentials for it."""

    host: str
    port: int = DEFAULT_PORT
    user: str = "guest"
    password: str = "guest"  # noqa: S105  the built-in user's, loopback only
    bucket: str = DEFAULT_BUCKET

    @property
    def node(self) -> str:
        """The address as people write it, without credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def at(self, host: str, port: int) -> ServerAddress:
        """Return another node's address with the same credentials."""
        return self._replace(host=host, port=port)


def parse_address(text: str) -> ServerAddress:
    """Return the address that `text` names. Raises ValueError that says what is wrong."""
    rest = text.strip()
    for scheme in _SCHEMES:
        rest = rest.removeprefix(scheme)
    if "://" in rest:
        raise ValueError(f"server address {text!r}: the scheme must be dcpd://")
    rest, _, bucket = rest.partition("/")
    credentials, at_sign, place = rest.rpartition("@")
    address = ServerAddress(*_host_and_port(place, text), bucket=unquote(bucket) or DEFAULT_BUCKET)
    if at_sign:
        user, _, password = credentials.partition(":")
        address = address._replace(user=unquote(user), password=unquote(password))
    return address


def _host_and_port(place: str, text: str) -> tuple[str, int]:
    if place.startswith("["):
        host, bracket, port = place[1:].partition("]")
        if not bracket:
            raise ValueError(f"server address {text!r}: no ] after the IPv6 address")
        port = port.removeprefix(":")
    else:
        host, _, port = place.partition(":")
    if not host:
        raise ValueError(f"server address {text!r}: no host; write HOST:PORT")
    if not port:
        return host, DEFAULT_PORT
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"server address {text!r}: {port!r} is not a port (1 to 65535)")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own, so that a password does not leave it."""
    return host == "localhost" or host.startswith("127.") or host in {"::1", "::ffff:127.0.0.1"}
