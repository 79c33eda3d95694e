"""What is wrong with an etcd, in one line: what, why, and what to try. Pure.

Who calls it: the client of etcd, with what gRPC and etcd say.
"""

from __future__ import annotations

from typing import Final

VERSION_MIN: Final = (3, 4)
VERSION_GOOD: Final = (3, 5)
"""etcd 3.4 has known bugs of watches and leases, and gets no more fixes."""

_ADVICE: Final = {
    "CERTIFICATE_VERIFY_FAILED": (
        "its certificate is not signed by the CA that was given. Give the CA of etcd's server"
        " certificate (etcd's --cert-file)"
    ),
    "Hostname Verification Check failed": (
        "its certificate is for another host name. Use a name or address that is in the"
        " certificate as the endpoint"
    ),
    "TSI_DATA_CORRUPTED": (
        "it does not accept the client certificate, or asks for one. Give a certificate and key"
        " that etcd's --trusted-ca-file has signed"
    ),
    "Handshake read failed": "it speaks no TLS. Leave the CA out, or give etcd a certificate",
    "WRONG_VERSION_NUMBER": "it speaks no TLS. Leave the CA out, or give etcd a certificate",
    "Connection refused": "nothing listens there. Start etcd, or correct the endpoint",
    "Domain name not found": "its name is not known. Correct the endpoint",
    "Socket closed": "it closed the connection. If it speaks TLS, give its CA",
    "Connection reset": "it closed the connection. If it speaks TLS, give its CA",
    "invalid user ID or password": "the user or the password is wrong. Correct them",
    "user name is empty": "it asks for a user. Give the user and the password of dcpd",
    "authentication is not enabled": (
        "a user was given, but etcd knows no users. Leave the user out, or run: etcdctl auth enable"
    ),
    "permission denied": (
        "the user may not read and write there. Run: etcdctl role grant-permission ROLE"
        " --prefix=true readwrite PREFIX"
    ),
    "no leader": ("this member has no leader: most members are down or cut off. Start them again"),
    "Deadline Exceeded": "it did not answer in time. It may be overloaded, frozen or cut off",
}
"""Part of gRPC's or etcd's text -> what it means and what to try."""
_DENIALS: Final = (
    "CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed", "TSI_DATA_CORRUPTED",
    "Handshake read failed", "WRONG_VERSION_NUMBER", "invalid user ID or password",
    "user name is empty", "authentication is not enabled", "permission denied",
)  # fmt: skip
"""Those after which trying again does not help."""


def trouble_of(endpoint: str, details: str) -> str:
    """Say in one line what is wrong with an endpoint."""
    for part, advice in _ADVICE.items():
        if part in details:
            return f"etcd at {endpoint}: {advice}"
    return f"etcd at {endpoint}: {' '.join(details.split())[:300] or 'no reason was given'}"


def is_denial(details: str) -> bool:
    """Return whether an endpoint does not let this client in, whatever the client tries."""
    return any(part in details for part in _DENIALS)


def version_trouble(endpoint: str, version: str) -> str:
    """Say that etcd is too old; empty if it is not."""
    if _number(version) >= VERSION_MIN:
        return ""
    return (
        f"etcd at {endpoint}: it is version {version or 'unknown'}, and 3.4 or newer is needed."
        " Update it, 3.5 or newer is best"
    )


def version_warning(version: str) -> str:
    """Say that etcd is old; empty if it is not."""
    if _number(version) >= VERSION_GOOD:
        return ""
    return (
        f"etcd is version {version}, which has known bugs of watches and leases. Use 3.5 or newer"
        " for anything but tests"
    )


def history_trouble(endpoint: str, *, is_another: bool, revision: int, seen: int) -> str:
    """Say that etcd is not the one that this process knew."""
    what = "it is another cluster of etcd" if is_another else f"it is at revision {revision}"
    return (
        f"etcd at {endpoint}: its history went back: {what}, and this node has seen revision"
        f" {seen}. It was restored from a copy or replaced. Partitions whose record is older than"
        " what nodes have seen stay as they are. Put the newer one back, or build the records anew:"
        " dcpctl cluster meta restore"
    )


def _number(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()
