"""Passwords in files, certificates made by trustme, and an authenticator that lets everybody in."""

from __future__ import annotations

import datetime as dt
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import trustme

from dcp.session.access.auth import AuthStep
from dcp.wire.status import Status

_FOLDER = TemporaryDirectory(prefix="dcpd-passwords-")


@cache
def password_file(password: str) -> str:
    """Return the path of a file with this password, which is there until the process ends."""
    path = Path(_FOLDER.name) / f"{abs(hash(password))}"
    path.write_text(f"{password}\n")
    return str(path)


def new_password(password: str) -> tuple[str, str]:
    """Return the option of `dcpctl user add` for a password."""
    return "--new-password-file", password_file(password)


def with_password(password: str) -> tuple[str, str]:
    """Return the option of dcpctl for a password."""
    return "--password-file", password_file(password)


class TestCa:
    """A CA and its certificates, as PEM files in a folder."""

    __test__ = False

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._ca = trustme.CA()
        self.path = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.path))

    def issue(
        self, name: str = "server", *hosts: str, not_after: dt.datetime | None = None
    ) -> Path:
        """Write key and certificate into one file, in one step. Default hosts: 127.0.0.1 and
        localhost.
        """
        path = self._folder / f"{name}.pem"
        new = path.with_suffix(".new")
        hosts = hosts or ("127.0.0.1", "localhost")
        certificate = self._ca.issue_cert(*hosts, not_after=not_after)
        certificate.private_key_and_cert_chain_pem.write_to_path(str(new))
        new.replace(path)
        return path


class OpenDoor:
    """Lets everybody in as guest."""

    def mechanisms(self, peer_is_loopback: bool) -> list[str]:
        return ["PLAIN"] if peer_is_loopback else []

    def start(self, mechanism: str, initial: bytes, peer_is_loopback: bool) -> AuthStep:
        return AuthStep(Status.OK, b"", None, "guest")

    def step(self, exchange: object, message: bytes) -> AuthStep:
        return AuthStep(Status.AUTH_ERROR, b"", None, None)
