"""A server with TLS ports, and the first bytes of its clients."""

from __future__ import annotations

import contextlib
import re
import ssl
from pathlib import Path

from clients.address import parse_address
from clients.kv.sync_client import SyncKv
from support.certificates import TestCa
from support.server import DcpdProcess


class TlsDcpd(DcpdProcess):
    """A server with TLS ports."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.ca = TestCa(folder)
        cert = str(self.ca.issue("server"))
        ports = ("--tls-port", "0", "--admin-tls-port", "0")
        super().__init__(folder / "data", *ports, "--tls-cert", cert, *arguments)

    @property
    def tls_port(self) -> int:
        found = re.search(r"with TLS\s+127\.0\.0\.1:(\d+)", self.output)
        assert found, self.output
        return int(found[1])

    def client(self) -> SyncKv:
        return SyncKv(parse_address(f"dcpds://127.0.0.1:{self.tls_port}?tls_ca={self.ca.path}"))

    def client_hello(self) -> bytes:
        """The first bytes of a TLS client."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=self.ca.path)
        tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        return outgoing.read()
