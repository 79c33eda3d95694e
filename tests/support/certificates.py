"""Certificates for tests, made by trustme."""

from __future__ import annotations

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

    def issue(self, name: str = "server") -> Path:
        """Write key and certificate of 127.0.0.1 and localhost into one file, in one step."""
        path = self._folder / f"{name}.pem"
        new = path.with_suffix(".new")
        certificate = self._ca.issue_cert("127.0.0.1", "localhost")
        certificate.private_key_and_cert_chain_pem.write_to_path(str(new))
        new.replace(path)
        return path
