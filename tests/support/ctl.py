"""dcpctl as a process: for nodes that are processes, and beside an event loop that runs nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from clients.testing import DcpServer


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
