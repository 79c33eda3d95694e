"""Keeps web pages of other sites out: the checks of Host, Origin and Sec-Fetch-Site. Pure.

A web page can make its visitor's browser send requests to any machine that the browser can reach.
Two checks stop it:

- Host: with DNS rebinding, the page's own name resolves to our address, so the browser takes us for
  the page's server. It still sends the page's name as Host. Allowed names are localhost, the
  listening address, and the setting admin_hosts. IP addresses are always allowed, because no DNS
  answer can make an address stand for another one.
- Origin and Sec-Fetch-Site: a browser sends them if a page of another origin causes the request.
  Other clients send neither header.

Host is not checked
- over TLS: the browser checks that the certificate is for the name (etcd and Vite do the same);
- for /livez and /readyz: orchestrators probe under names that cannot be foreseen, and a page only
  learns one word.

The port in Host is not compared, because a port forward changes it. A request without Host
(HTTP/1.0) is allowed, because every browser sends one.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final, NamedTuple

from dcp.server.config.setting_values import is_host_name

ANY_HOST: Final = "*"
OWN_SITES: Final = frozenset({"same-origin", "none"})
"""Sec-Fetch-Site of our own pages, and of addresses that a user types. Not same-site: for a
browser, all ports of a host are one site."""
SHOWN_CHARS_MAX: Final = 100
"""Characters of a header that a refusal repeats."""

_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


class Refusal(NamedTuple):
    """Why a request is refused."""

    what: str
    why: str
    try_this: str


class HostRule:
    """The names that clients may use for this server. A name that starts with a dot stands for the
    domain and everything below it; "*" allows any name.
    """

    def __init__(self, listening_host: str, admin_hosts: Iterable[str] = ()) -> None:
        names = {"localhost", ".localhost", listening_host, *admin_hosts}
        self._is_open = ANY_HOST in names
        self._names = frozenset(name.removeprefix(".").lower() for name in names)
        self._suffixes = tuple(name.lower() for name in names if name.startswith("."))

    def allows(self, authority: str) -> bool:
        """Return whether a Host header (NAME or NAME:PORT) names this server."""
        if self._is_open:
            return True
        name = host_of(authority)
        return name in self._names or name.endswith(self._suffixes) or _is_address(name)


def host_of(authority: str) -> str:
    """Return the host of HOST or HOST:PORT, in lower case; "" if the text has another form."""
    text = authority.strip().lower()
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        is_whole = bool(bracket) and _is_address(host)
        port = rest.removeprefix(":")
        is_whole = is_whole and (not rest or rest.startswith(":"))
    else:
        host, _, port = text.partition(":")
        is_whole = True
    if not is_whole or (port and not (port.isascii() and port.isdigit())):
        return ""
    return host.removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def page_refusal(headers: Iterable[tuple[bytes, bytes]], rule: HostRule | None) -> Refusal | None:
    """Return why a request with these headers is refused, None if it is not.

    Names of headers are in lower case, as in ASGI. `rule` None: any Host is allowed.
    """
    found: dict[bytes, list[str]] = {}
    for name, value in headers:
        found.setdefault(name, []).append(value.decode("latin-1"))
    host = next(iter(found.get(b"host", ())), None)
    if rule is not None and host is not None and not rule.allows(host):
        return _wrong_host(host)
    for site in found.get(b"sec-fetch-site", ()):
        if site.strip().lower() not in OWN_SITES:
            return _foreign(f"the browser says that the page's site is {_shown(site)}")
    for origin in found.get(b"origin", ()):
        if host is None or not _is_same(origin, host):
            return _foreign(f"the page's origin is {_shown(origin)}, this is {_shown(host or '')}")
    return None


def _is_same(origin: str, host: str) -> bool:
    """Return whether a page of this origin was served under this Host. The scheme is not compared,
    because a proxy in front of the port may do the TLS.
    """
    scheme, separator, authority = origin.strip().lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    if port is None or not separator:
        return False
    return authority.removesuffix(port) == host.strip().lower().removesuffix(port)


def _wrong_host(host: str) -> Refusal:
    name = host_of(host)
    if not is_host_name(name) or len(name) > SHOWN_CHARS_MAX:
        name = "NAME"
    return Refusal(
        f"this server is not known as {_shown(host)}",
        "the name in the header Host is not in the setting admin_hosts; a web page could make its"
        " own name resolve to this server (DNS rebinding)",
        f"use the server's IP address; if the name is its own: dcpd --admin-hosts {name}",
    )


def _foreign(why: str) -> Refusal:
    return Refusal(
        "the request comes from a web page of another site",
        f"{why}; such a page could use its visitor's login",
        "use a client that is not a web page, such as curl or dcpctl",
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}...")
