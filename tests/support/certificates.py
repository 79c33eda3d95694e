"""Certificates for tests, made by trustme."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import trustme


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
