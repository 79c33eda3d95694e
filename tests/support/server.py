"""Servers as processes, with and without TLS, and dcpctl as a process beside them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from clients.address import parse_address
from clients.kv.sync_client import SyncKv
from clients.testing import DcpServer
from support.credentials import TestCa


class DcpdProcess(DcpServer):
    """`with DcpdProcess(folder) as server:` gives a ready server and stops it at the end."""

    exit_code: int | None = None
    """The last exit code of the process; negative: the signal."""

    def restart_after_kill(self) -> None:
        """SIGKILL, and start again on the same folder and ports."""
        self.restart()

    def children(self) -> list[int]:
        """Return the server's child processes: the store process."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]

    def _end(self, number: signal.Signals) -> int:
        self.exit_code = super()._end(number)
        return self.exit_code


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


class Ran(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        (line,) = self.out.splitlines()
        return json.loads(line)


async def ctl(
    port: int, *words: str, typed: str | None = None, environment: Mapping[str, str] | None = None
) -> Ran:
    """Run dcpctl against a node of this process. With `typed`, standard input is a terminal at
    which somebody types this.
    """
    fds: tuple[int, ...] = ()
    if typed is not None:
        fds = os.openpty()
        os.write(fds[0], typed.encode())
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "clients.cli", "--server", f"127.0.0.1:{port}", "--timeout", "30",
            *words,
            stdin=fds[1] if fds else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=None if environment is None else {**os.environ, **environment},
        )  # fmt: skip
        out, err = await process.communicate()
    finally:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
    assert b"Traceback" not in err, err.decode()
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


STATUS = "/api/v1/cluster/status"


def dcpctl(node: DcpServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clients.cli", "--server", node.address, "--timeout", "30",
         "cluster", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def done(node: DcpServer, *arguments: str) -> str:
    run = dcpctl(node, *arguments)
    assert run.returncode == 0, run.stderr
    return run.stdout


def refused(node: DcpServer, *arguments: str) -> str:
    run = dcpctl(node, *arguments)
    assert run.returncode != 0, run.stdout
    assert "Traceback" not in run.stderr
    return run.stderr
