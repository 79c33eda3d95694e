"""Where etcd is and how to log in, also as a URL. Pure: it does not need gRPC.

    etcd://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...][?ca=FILE&cert=FILE&key=FILE&password=FILE]

Who calls it: settings, and the client of etcd.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

ETCD_SCHEME: Final = "etcd"
_ENDPOINT: Final = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_PASSWORD: Final = re.compile(r"(//[^:@]*:).*(@)")
_FILES: Final = ("ca", "cert", "key", "password")


class EtcdSettings(NamedTuple):
    """Where etcd is, and how to log in."""

    endpoints: tuple[str, ...]
    """HOST:PORT of each member."""
    prefix: bytes
    """Below this everything is read and written. The user needs rights for it."""
    user: str = ""
    password: str = ""
    ca: bytes = b""
    """Certificates in PEM; empty: no TLS."""
    certificate: bytes = b""
    """The client's own, for etcd's --client-cert-auth."""
    private_key: bytes = b""

    def __repr__(self) -> str:
        """Name the endpoints only: the rest has secrets in it."""
        return f"EtcdSettings({','.join(self.endpoints)})"

    def check(self) -> None:
        """Raise ValueError if the settings cannot work."""
        if not self.endpoints:
            raise ValueError("no endpoint of etcd was given; give HOST:PORT of each member")
        for endpoint in self.endpoints:
            if _ENDPOINT.fullmatch(endpoint) is None:
                raise ValueError(f"etcd endpoint {endpoint!r}: HOST:PORT is expected")
        if bool(self.certificate) != bool(self.private_key):
            raise ValueError("a client certificate for etcd needs its private key, and vice versa")
        if self.certificate and not self.ca:
            raise ValueError("a client certificate for etcd needs TLS; give etcd's CA, too")
        if self.password and not self.user:
            raise ValueError("a password for etcd was given without a user; give both")


def files_of_url(url: str) -> list[str]:
    """Return the names of the files that a URL names; none where it is no URL of etcd."""
    try:
        parts = urlsplit(url)
    except ValueError:  # `settings_of_url` says what is wrong with it
        return []
    named = parse_qsl(parts.query, keep_blank_values=True)
    return [path for option, path in named if option in _FILES]


def settings_of_url(url: str, prefix: bytes, read: Callable[[str], bytes]) -> EtcdSettings:
    """Return the settings of a URL; `read` returns the content of a file.

    Raises:
        ValueError: the URL cannot work.
        OSError: a file cannot be read.
    """
    shown = _PASSWORD.sub(r"\1...\2", url)
    parts = urlsplit(url)
    if parts.scheme != ETCD_SCHEME or not parts.netloc or parts.path not in {"", "/"}:
        raise ValueError(
            f"the metadata store {shown} is not possible; etcd://HOST:PORT,HOST:PORT is"
        )
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    files = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in files:
        if name not in _FILES:
            raise ValueError(f"option {name!r} of {shown}: one of {', '.join(_FILES)} is expected")
    content = {name: read(path) for name, path in files.items()}
    if "password" in content:
        password = content["password"].decode().strip()
    settings = EtcdSettings(
        endpoints=tuple(hosts.split(",")),
        prefix=prefix,
        user=unquote(user),
        password=unquote(password) if "password" not in content else password,
        ca=content.get("ca", b""),
        certificate=content.get("cert", b""),
        private_key=content.get("key", b""),
    )
    settings.check()
    return settings
