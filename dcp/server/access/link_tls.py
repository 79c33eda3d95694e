"""TLS of the links between the nodes of a cluster: how a node dials, and who may come in.

    setting cluster_tls   a node dials              and is let in
    off                   the plain port            with SCRAM and the cluster's secret
    on                    the TLS port              the same, over TLS only
    mutual                the TLS port, with its    with that certificate (SASL EXTERNAL): from
                          own certificate           the nodes' CA, for the host of a member

Invariants
- certificates of the other side are checked against the CA of the nodes alone (cluster_ca), and
  against the host that the node was dialled at;
- with `mutual` the secret opens nothing.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Collection, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, NamedTuple

from dcp.server.access.certificates import TlsError, reason_of
from dcp.server.access.users import CLUSTER_USER
from dcp.server.access.users_file import Stamp, stamp_of
from dcp.server.config.settings import Settings
from dcp.session.access.auth import AuthStep
from dcp.wire.status import Status

OFF: Final = "off"
ON: Final = "on"
MUTUAL: Final = "mutual"
EXTERNAL: Final = "EXTERNAL"
DIAL_BACK: Final = "X-DIAL-BACK"
"""Not a login, but asked for like one: try a link to a node that wants to become a member
(dcp.server.cluster.joining.link_try)."""
WRONG_SECRET: Final = "the secret is not that of this cluster"  # noqa: S105 - a reason
_NO_PASSWORD: Final = ""
_EXPIRED: Final = 10
"""OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED."""
_WRONG_NAME: Final = frozenset({62, 64})
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""


DialBack = Callable[
    [bytes, "frozenset[str] | None", Callable[[AuthStep], None]], "AuthStep | asyncio.Task[None]"
]
"""Takes a request, the hosts of the certificate if nodes show one, and who is told the outcome."""


class LinkTrouble(NamedTuple):
    """Why a node has no link to another one, and what to try. `str` has both."""

    what: str
    try_this: str

    def __str__(self) -> str:
        return f"{self.what}. {self.try_this}"


_GIVE_ONE_MODE: Final = "Give all nodes the same --cluster-tls"


class LinkTls:
    """See the module. `context` is the one to dial with; it follows changes of the files."""

    def __init__(self, settings: Settings) -> None:
        """Load the files. Raises TlsError."""
        assert settings.tls_cert is not None, "checked with the settings"
        assert settings.cluster_ca is not None, "checked with the settings"
        self._ca = settings.cluster_ca
        self._own: tuple[Path, Path] | None = None
        if settings.cluster_tls == MUTUAL:
            self._own = settings.tls_cert, settings.tls_key or settings.tls_cert
        self._stamps = self._read_stamps()
        self._context = self._load()

    @property
    def shows_certificate(self) -> bool:
        """Whether this node logs in with its certificate."""
        return self._own is not None

    def context(self) -> ssl.SSLContext:
        """Return the context for a connection to another node. Files that have become unusable
        change nothing; `Access` tells about them.
        """
        stamps = self._read_stamps()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._context = self._load()
            except TlsError:
                return self._context
        return self._context

    def _read_stamps(self) -> list[Stamp | None]:
        return [stamp_of(path) for path in (self._ca, *(self._own or ()))]

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(self._ca)
        except OSError as error:
            raise TlsError(
                f"--cluster-ca {self._ca} cannot be used: {reason_of(error)}; it must be the CA of "
                "the nodes' certificates (PEM)"
            ) from error
        if self._own is not None:
            cert, key = self._own
            try:
                context.load_cert_chain(cert, key, password=lambda: _NO_PASSWORD)
            except OSError as error:
                raise TlsError(
                    f"certificate {cert} and key {key} cannot be used: {reason_of(error)}"
                ) from error
        return context


def link_trouble(error: OSError, where: str) -> LinkTrouble | None:
    """Return why no TLS connection to a node could be made; None for errors that are not TLS's.
    `where` names the node and its address.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        advice = "Let --cluster-ca of this node be the CA of that node's --tls-cert"
        if error.verify_code == _EXPIRED:
            advice = "Renew it on that node (--tls-cert)"
        elif error.verify_code in _WRONG_NAME:
            advice = "Issue it for the host that the node advertises (--advertise-host)"
        what = f"the certificate of {where} is not accepted: {error.verify_message}"
        return LinkTrouble(what.rstrip("."), advice)
    if not isinstance(error, ssl.SSLError):
        return None
    reason = (getattr(error, "reason", "") or str(error)).replace("_", " ").lower()
    if "alert" in reason:
        return certificate_trouble(where, reason)
    return LinkTrouble(f"{where} does not speak TLS at that port: {reason}", _GIVE_ONE_MODE)


def certificate_trouble(where: str, reason: str) -> LinkTrouble:
    """Return that a node does not accept the certificate of this one."""
    return LinkTrouble(
        f"{where} does not accept the certificate of this node: {reason}",
        "Let it be valid, and from the CA that --cluster-ca of that node names",
    )


class NodeDoor:
    """Says which connections may log in as a node of the cluster. Closed on a node alone."""

    def __init__(self) -> None:
        self._mode = ""
        self._hosts: Callable[[], Collection[str]] = tuple
        self._dial_back: DialBack | None = None
        self.trying = asyncio.Lock()
        """Held by a node alone while members try their links to it."""

    def open(
        self, mode: str, hosts: Callable[[], Collection[str]], dial_back: DialBack | None = None
    ) -> None:
        """Let nodes in by the setting cluster_tls; `hosts` returns the hosts of the members,
        `dial_back` tries links to nodes that want to become one. The mode "" closes the door.
        """
        self._mode, self._hosts, self._dial_back = mode, hosts, dial_back

    @property
    def tries_links(self) -> bool:
        """Whether `dial_back` is on offer."""
        return self._dial_back is not None

    def dial_back(
        self,
        request: bytes,
        certificate: Mapping[str, Any],
        *,
        is_tls: bool,
        tell: Callable[[AuthStep], None],
    ) -> AuthStep | asyncio.Task[None]:
        """Begin to try a link to a node that wants to become a member. Return its refusal, or the
        task that calls `tell` with the outcome.
        """
        assert self._dial_back is not None, "it is on offer"
        names = hosts_of(certificate) if self._mode == MUTUAL else None
        if (not certificate or names is None) and (why := self.secret_refusal(is_tls=is_tls)):
            return AuthStep(Status.AUTH_ERROR, claimed=CLUSTER_USER, why=why)
        return self._dial_back(request, names, tell)

    def takes_certificates(self, certificate: Mapping[str, Any]) -> bool:
        """Whether SASL EXTERNAL is on offer to who showed this certificate."""
        return self._mode == MUTUAL and bool(certificate)

    def secret_refusal(self, *, is_tls: bool) -> str:
        """Return why the secret opens nothing here; "": it does."""
        if self._mode == MUTUAL:
            return (
                "nodes of this cluster log in with certificates (--cluster-tls mutual here). "
                f"{_GIVE_ONE_MODE}"
            )
        if self._mode == ON and not is_tls:
            return (
                f"nodes of this cluster connect with TLS (--cluster-tls on here). {_GIVE_ONE_MODE}"
            )
        return ""

    def certificate_refusal(self, certificate: Mapping[str, Any]) -> str:
        """Return why a certificate of the right CA opens nothing; "": it is a member's."""
        names = hosts_of(certificate)
        if any(is_for(host, names) for host in self._hosts()):
            return ""
        return wrong_hosts(names, "no member of this cluster has such a host")


def wrong_hosts(names: Collection[str], why: str) -> str:
    """Return why a certificate for these hosts opens nothing."""
    shown = ", ".join(sorted(names)) or "no host"
    return (
        f"the certificate is for {shown}, and {why}. Issue it for the host that the node advertises"
    )


def hosts_of(certificate: Mapping[str, Any]) -> frozenset[str]:
    """Return the hosts that a certificate is for, as `ssl.SSLObject.getpeercert` tells them."""
    names = certificate.get("subjectAltName", ())
    return frozenset(name.lower() for kind, name in names if kind in {"DNS", "IP Address"})


def is_for(host: str, names: Collection[str]) -> bool:
    """Whether a certificate with these names is for a host."""
    host = host.lower()
    try:
        address = ip_address(host)
    except ValueError:
        return host in names or f"*.{host.partition('.')[2]}" in names
    return any(_address_of(name) == address for name in names)


def _address_of(name: str) -> object:
    try:
        return ip_address(name)
    except ValueError:
        return None
