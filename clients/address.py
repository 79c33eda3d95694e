"""Addresses of servers with credentials: `dcpd://user:password@host:port/bucket` or `host:port`.

Several hosts of a cluster are separated by commas: `dcpd://a,b:11211,c`. A client needs one of them
that answers. The others are found with the cluster's map.

Defaults: port 11210, user and password guest (a server accepts them from loopback only), bucket
`default`. With TLS it is `dcpds://...` and port 11207; `?tls_ca=FILE` names the CA to trust instead
of the system's, `&tls_cert=FILE` a client certificate with its key.
"""

from __future__ import annotations

from typing import Final, NamedTuple

DEFAULT_PORT: Final = 11210
DEFAULT_BUCKET: Final = "default"
DEFAULT_TLS_PORT: Final = 11207
HOSTS_MAX: Final = 64
"""Most hosts in one address. Clients try them shortly after each other, until one answers."""
_SCHEMES: Final = {
    "dcpd://": False,
    "couchbase://": False,
    "dcpds://": True,
    "couchbases://": True,
}
"""Scheme -> whether it means TLS."""
_PARAMETERS: Final = frozenset({"tls_ca", "tls_cert"})


class ServerAddress(NamedTuple):
    """A server's address and the credentials for it."""

    host: str
    port: int = DEFAULT_PORT
    user: str = "guest"
    password: str = "guest"  # noqa: S105  the built-in user's, loopback only
    bucket: str = DEFAULT_BUCKET
    is_tls: bool = False
    tls_ca: str = ""
    """PEM file of the CA to trust; "": those that the system trusts."""
    tls_cert: str = ""
    """PEM file of the client's certificate and key; "": none."""
    others: tuple[tuple[str, int], ...] = ()
    """Host and port of further nodes of the same cluster."""

    @property
    def node(self) -> str:
        """The address as people write it, without credentials."""
        return ",".join(_written(*place) for place in self.places)

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each node that the address names, in its order."""
        return ((self.host, self.port), *self.others)

    def at(self, host: str, port: int) -> ServerAddress:
        """Return the address of one node, with the same credentials."""
        return self._replace(host=host, port=port, others=())


def parse_address(text: str) -> ServerAddress:
    """Return the address that `text` names. Raises ValueError that says what is wrong."""
    rest = text.strip()
    is_tls = False
    for scheme, means_tls in _SCHEMES.items():
        if rest.startswith(scheme):
            rest, is_tls = rest.removeprefix(scheme), means_tls
            break
    if "://" in rest:
        raise ValueError(f"server address {text!r}: the scheme must be dcpd:// or dcpds:// (TLS)")
    rest, _, query = rest.partition("?")
    rest, _, bucket = rest.partition("/")
    credentials, at_sign, place = rest.rpartition("@")
    default_port = DEFAULT_TLS_PORT if is_tls else DEFAULT_PORT
    parameters = _parameters(query, text, is_tls=is_tls)
    (host, port), *others = _places(place, text, default_port)
    address = ServerAddress(
        host,
        port,
        others=tuple(others),
        bucket=_unquoted(bucket) or DEFAULT_BUCKET,
        is_tls=is_tls,
        tls_ca=parameters.get("tls_ca", ""),
        tls_cert=parameters.get("tls_cert", ""),
    )
    if at_sign:
        user, _, password = credentials.partition(":")
        address = address._replace(user=_unquoted(user), password=_unquoted(password))
    return address


def _unquoted(text: str) -> str:
    """Return a part of an address without its %XX escapes."""
    if "%" not in text:
        return text
    from urllib.parse import unquote  # 3 ms, of the 80 that `dcpctl get` takes

    return unquote(text)


def _parameters(query: str, text: str, *, is_tls: bool) -> dict[str, str]:
    found = {}
    for item in filter(None, query.split("&")):
        name, _, value = item.partition("=")
        if name not in _PARAMETERS:
            known = ", ".join(sorted(_PARAMETERS))
            raise ValueError(f"server address {text!r}: unknown {name!r}; known are {known}")
        if not is_tls:
            raise ValueError(f"server address {text!r}: {name} is for TLS, write dcpds://")
        found[name] = _unquoted(value)
    return found


def _places(hosts: str, text: str, default_port: int) -> list[tuple[str, int]]:
    """Return host and port of each node. A node that is named twice is an error: a typing mistake
    would otherwise go unnoticed until the other nodes are gone.
    """
    places = [_host_and_port(host.strip(), text, default_port) for host in hosts.split(",")]
    if len(places) > HOSTS_MAX:
        raise ValueError(f"server address: {len(places)} hosts; at most {HOSTS_MAX} are taken")
    for place in places:
        if places.count(place) > 1:
            raise ValueError(f"server address {text!r}: {_written(*place)} is named twice")
    return places


def _host_and_port(place: str, text: str, default_port: int) -> tuple[str, int]:
    if place.startswith("["):
        host, bracket, port = place[1:].partition("]")
        if not bracket:
            raise ValueError(f"server address {text!r}: no ] after the IPv6 address")
        if port and not port.startswith(":"):
            raise ValueError(f"server address {text!r}: {port!r} after the IPv6 address")
        port = port.removeprefix(":")
    else:
        host, _, port = place.partition(":")
        if ":" in port:
            raise ValueError(
                f"server address {text!r}: {place!r} has several colons; write an IPv6 address"
                " in brackets, [::1]:11210, and commas between hosts"
            )
    if not host:
        if "," in text:
            raise ValueError(f"server address {text!r}: a host is missing beside a comma")
        raise ValueError(f"server address {text!r}: no host; write HOST:PORT")
    if bad := next((char for char in host if char.isspace() or char in "@;/"), ""):
        raise ValueError(f"server address {text!r}: {bad!r} in the host {host!r}; write HOST:PORT")
    if not port:
        return host, default_port
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"server address {text!r}: {port!r} is not a port (1 to 65535)")
    return host, int(port)


def _written(host: str, port: int) -> str:
    """Return host and port as people write them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address is on this machine, so a password does not leave it."""
    return host == "localhost" or host.startswith("127.") or host in {"::1", "::ffff:127.0.0.1"}
