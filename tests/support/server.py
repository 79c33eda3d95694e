"""Servers as processes, with and without TLS, alone or in a cluster, and dcpctl beside them."""

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
from clients.testing import DcpServer, ServerRefusedError
from support.cluster_here import PARTITIONS
from support.credentials import TestCa
from support.waiting import until
from tests.soak.cluster.members import EmbeddedMembers


class DcpdProcess(DcpServer):
    """`with DcpdProcess(folder) as server:` gives a ready server and stops it at the end."""

    start_timeout_s = 120.0
    exit_code: int | None = None
    """The last exit code of the process; negative: the signal."""

    def restart_after_kill(self) -> None:
        """SIGKILL, and start again on the same folder and ports."""
        self.restart()

    def children(self) -> list[int]:
        """Return the server's child processes: the store process."""
        found: list[int] = []
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                found += map(int, (task / "children").read_text().split())
        return found

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


def command(node: DcpServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run dcpctl."""
    program = [sys.executable, "-m", "clients.cli", "--server", node.address]
    return subprocess.run([*program, *arguments], capture_output=True, text=True, check=False)


def printed(node: DcpServer, *arguments: str) -> str:
    """Run dcpctl; return what it prints."""
    run = command(node, *arguments)
    assert run.returncode == 0, run.stderr
    return run.stdout


def dcpctl(node: DcpServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `dcpctl cluster`."""
    return command(node, "--timeout", "30", "cluster", *arguments)


def done(node: DcpServer, *arguments: str) -> str:
    run = dcpctl(node, *arguments)
    assert run.returncode == 0, run.stderr
    return run.stdout


def refused(node: DcpServer, *arguments: str) -> str:
    run = dcpctl(node, *arguments)
    assert run.returncode != 0, run.stdout
    assert "Traceback" not in run.stderr
    return run.stderr


class ClusterProcesses(EmbeddedMembers):
    """A cluster of real dcpd processes on loopback, with the embedded metadata store, which the
    first node owns. A context manager.
    """

    def __init__(
        self, folder: Path, names: str = "abc", *arguments: str, partitions: int = PARTITIONS
    ) -> None:
        super().__init__(folder, names, "--partitions", str(partitions), *arguments)

    def start_all(self) -> None:
        """Start all nodes that do not run."""
        for node in self.nodes.values():
            if not node.runs:
                node.start()

    def join(self, name: str) -> None:
        """Start one more node, and return once it is a member that runs."""
        self.add(name).start()
        until(lambda: name in self.alive())

    def rebalance(self, name: str = "a") -> None:
        """Spread copies and masters evenly, unless they are, and return once that is done."""
        asked = self.insist("rebalance")
        until(lambda: not asked["is_plan"] or self.have_moved(asked))
        self.until_even(name)

    def insist(self, change: str, **body: Any) -> dict[str, Any]:
        """Ask for a change, and ask again while it is refused: the cluster has just changed."""
        asked: dict[str, Any] = {}

        def is_taken() -> bool:
            with contextlib.suppress(ServerRefusedError):
                asked.update(self.ask_to(change, **body))
            return bool(asked)

        until(is_taken)
        return asked

    def until_in_sync(self, copies: int, name: str = "a") -> None:
        """Return once each partition has so many copies in sync."""
        until(lambda: self.are_in_sync(copies, name))

    def until_even(self, name: str = "a") -> None:
        """Return once each node is master of its share."""
        until(lambda: self.are_even(name))

    def until_no_master(self, of: str, name: str = "a") -> None:
        """Return once a node is master of nothing."""
        until(lambda: self.masters(name)[of] == 0)

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self.freeze_process(self.nodes[name].pid)

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        self.thaw_process(self.nodes[name].pid)

    async def in_thread(self, ask: Any, *arguments: Any) -> Any:
        """Run something that waits for the processes beside the event loop."""
        return await asyncio.to_thread(ask, *arguments)
