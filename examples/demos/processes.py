"""The processes of the flights example: dcpd and the replica are started, killed, started again."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from replica import Replica

from dcpd import DcpdError

READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0
CATCH_UP_TIMEOUT_S = 120.0
PORTS = range(15_000, 30_000)
"""Below the range for outgoing connections. An outgoing connection could take a port of that range
while the server is down, even one of a client that tries to reach the server."""
GUEST = base64.b64encode(b"guest:guest").decode()
"""The built-in user. It works from this machine only."""


class ProcessFailedError(Exception):
    """A process did not start, or ended by itself. The text says why."""


class ServerProcess:
    """A dcpd with its own ports and data folder."""

    def __init__(self, data: Path) -> None:
        self.port, self.admin_port = free_ports(2)
        self._data = data
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, and return when it is ready. After `kill` it uses the same ports and folder."""
        log_path = self._data.with_name("dcpd.log")
        with log_path.open("a") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "dcp.server.main", "--data", str(self._data),
                    "--port", str(self.port), "--admin-port", str(self.admin_port),
                ],
                stdout=subprocess.PIPE, stderr=log, text=True, env=environment(),
            )  # fmt: skip
        assert self._process.stdout is not None
        # It prints its addresses once it is ready, and nothing before.
        if not self._process.stdout.readline():
            self.kill()
            raise ProcessFailedError(f"dcpd did not start: {tail(log_path)}")

    def freeze(self) -> None:
        """Let it stand still: what is sent to it from now on has no answer."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """End it with SIGKILL. Like a crash, this leaves no chance to write anything."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def stop(self) -> None:
        """End it with SIGTERM, as an operator does. It finishes pending work."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.communicate(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def branch(self, vb_id: int, seqno: int) -> None:
        """Branch a partition's history at a seqno: `dcpctl vb branch VB --at SEQNO`."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.admin_port}/api/v1/vbuckets/{vb_id}/branch",
            data=json.dumps({"at": seqno}).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Basic {GUEST}"},
        )
        try:
            # No proxy: the server is on this machine.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=READY_TIMEOUT_S):
                pass
        except urllib.error.HTTPError as error:
            text = f"no branch of partition {vb_id} at {seqno}: {error.read().decode()}"
            raise ProcessFailedError(text) from error
        except OSError as error:
            raise ProcessFailedError(f"the admin port does not answer: {error}") from error


class ReplicaProcess:
    """examples/demos/replica.py in its own process. `file` reads what it wrote."""

    def __init__(self, path: Path) -> None:
        self.file = Replica(path)
        self._path = path
        self._log_path = path.with_name("replica.log")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, server: str) -> None:
        """Follow the server from the file's position until it is killed."""
        self._process = self._run(server)

    def kill(self) -> None:
        """End it with SIGKILL. The file keeps the state of the last transaction."""
        if self._process is not None:
            self.check()
            self._process.kill()
            self._process.wait()
            self._process = None

    def catch_up(self, server: str) -> None:
        """Run it until it has everything that the server has now."""
        with self._run(server, "--until-now") as process:
            try:
                code = process.wait(CATCH_UP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise ProcessFailedError(
                    f"the replica did not catch up within {CATCH_UP_TIMEOUT_S:g} s"
                ) from None
        if code:
            raise ProcessFailedError(f"the replica failed: {tail(self._log_path)}")

    def check(self) -> None:
        """Raise ProcessFailedError if it ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None
            raise ProcessFailedError(f"the replica failed: {tail(self._log_path)}")

    def close(self) -> None:
        """End it in any case, and close the file."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.file.close()

    def _run(self, server: str, *arguments: str) -> subprocess.Popen[bytes]:
        program = Path(__file__).with_name("replica.py")
        with self._log_path.open("a") as log:
            return subprocess.Popen(
                [sys.executable, str(program), server, str(self._path), *arguments],
                stdout=log, stderr=log,
            )  # fmt: skip


def free_ports(count: int) -> list[int]:
    """Return distinct ports that nobody listens on."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise ProcessFailedError(f"no {count} free ports from {PORTS.start} to {PORTS.stop - 1}")


def environment() -> dict[str, str]:
    """Return our environment without dcpd settings, so that dcpd runs with its defaults."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DCPD_")}


def tail(log_path: Path) -> str:
    """Return the last lines of a log."""
    lines = log_path.read_text(errors="replace").strip().splitlines()
    return "\n".join(lines[-8:]) or "it said nothing"


def follow_until_killed(
    name: str,
    doc: str | None,
    file_help: str,
    follow: Callable[[str, Path], Coroutine[Any, Any, None]],
) -> int:
    """Run a command that follows a server into a file; return its exit code."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("server", help="HOST:PORT, or several separated by commas")
    parser.add_argument("file", type=Path, help=file_help)
    options = parser.parse_args()
    try:
        asyncio.run(follow(options.server, options.file))
    except (DcpdError, sqlite3.Error) as error:
        hint = f". {error.hint}" if isinstance(error, DcpdError) and error.hint else ""
        print(f"{name}: {error}{hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
