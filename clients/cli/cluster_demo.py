"""dcpctl cluster demo: nodes of a cluster as processes of this machine, on loopback.

    DIR/n1, DIR/n2, ...     data folders
    DIR/n1.log, ...         logs
    DIR/demo.json           name -> process id, while the demo runs

A node that was killed with `dcpctl cluster kill` is started again after a while.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final

from clients.cli.output import write_raw
from clients.errors import ConnectError, DcpdError, OperationTimeoutError

STATE_FILE: Final = "demo.json"
RESTART_S: Final = 10.0
"""How long a killed node stays away, so that one can see what the others do."""
STOP_S: Final = 15.0
START_S: Final = 20.0
POLL_S: Final = 0.1
_PORTS: Final = re.compile(
    r"key-value\s+127\.0\.0\.1:(\d+)[\s\S]*admin\s+http://127\.0\.0\.1:(\d+)"
)
_LAST_LINE: Final = "  try "
_SIGNALS: Final = {
    "kill": signal.SIGKILL,
    "pause": signal.SIGSTOP,
    "resume": signal.SIGCONT,
}


class _DemoNode:
    """One process."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._folder = folder
        self.port = self.admin_port = 0
        self.process: subprocess.Popen[str] | None = None
        self.ended_s = 0.0
        """When it was found dead, monotonic; 0: it runs."""

    def start(self, *arguments: str) -> None:
        """Start it, and wait until it listens."""
        with (self._folder / f"{self.name}.log").open("a") as log:
            self.process = process = subprocess.Popen(  # noqa: S603 - our own program
                [
                    sys.executable, "-m", "dcp.server.main",
                    "--data", str(self._folder / self.name), "--port", str(self.port),
                    "--admin-port", str(self.admin_port),
                    "--node-name", self.name, *arguments,
                ],
                stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        text = ""
        assert process.stdout is not None
        for line in process.stdout:
            text += line
            if line.startswith(_LAST_LINE):
                break
        found = _PORTS.search(text)
        if found is None:
            raise ConnectError(
                f"node {self.name} does not start", hint=f"See {self._folder / self.name}.log."
            )
        self.port, self.admin_port = int(found[1]), int(found[2])
        self.ended_s = 0.0

    def status(self) -> dict[str, Any]:
        """Ask the node how the cluster is; {} if it does not answer."""
        connection = HTTPConnection("127.0.0.1", self.admin_port, timeout=2.0)
        try:
            headers = {"Authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="}
            connection.request("GET", "/api/v1/cluster/status", headers=headers)
            found: dict[str, Any] = json.loads(connection.getresponse().read())
            return found
        except (OSError, HTTPException, ValueError):
            return {}
        finally:
            connection.close()


def run_demo(folder_name: str, count: int, copies: int, *, timeout_s: float) -> None:
    """Start the nodes, tell where they are, and keep them until Ctrl-C."""
    folder = Path(folder_name).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = folder / "token"
    nodes = [_DemoNode(folder, f"n{number + 1}") for number in range(count)]
    # SIGTERM ends the demo like Ctrl-C, so that it takes its nodes with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for number, node in enumerate(nodes):
            way = ("--cluster", "init" if number == 0 else "join")
            node.start(*way, "--cluster-token-file", str(token), "--cluster-copies", str(copies))
        _note(folder, nodes)
        _wait_until_served(nodes, min(copies, count), timeout_s)
        lines = [f"{node.name}  127.0.0.1:{node.port}" for node in nodes]
        first = nodes[0].port
        lines.append(f"try  dcpctl --server 127.0.0.1:{first} cluster status")
        lines.append(f"     dcpctl cluster kill n2 --data {folder_name}")
        write_raw(("\n".join(lines) + "\n").encode())
        _keep(folder, nodes)
    finally:
        _stop(nodes)
        with contextlib.suppress(OSError):
            (folder / STATE_FILE).unlink()


def signal_node(folder_name: str, name: str, action: str) -> None:
    """Send a signal to a node of a demo."""
    path = Path(folder_name).absolute() / STATE_FILE
    try:
        pids = json.loads(path.read_text())
    except (OSError, ValueError):
        raise ConnectError(
            f"no demo runs in {folder_name}", hint="dcpctl cluster demo starts one."
        ) from None
    if name not in pids:
        raise ConnectError(f"the demo has no node {name!r}", hint=f"It has {', '.join(pids)}.")
    try:
        os.kill(pids[name], _SIGNALS[action])
    except ProcessLookupError:
        raise DcpdError(f"node {name} does not run") from None


def _note(folder: Path, nodes: list[_DemoNode]) -> None:
    pids = {node.name: node.process.pid for node in nodes if node.process is not None}
    (folder / STATE_FILE).write_text(json.dumps(pids))


def _wait_until_served(nodes: list[_DemoNode], copies: int, timeout_s: float) -> None:
    """Wait until each partition has its copies in sync."""
    give_up_s = time.monotonic() + max(timeout_s, START_S) + 10.0 * len(nodes)
    while time.monotonic() < give_up_s:
        found = nodes[0].status()
        if found.get("in_sync_sizes") == {str(copies): found.get("partitions")}:
            return
        time.sleep(POLL_S)
    raise OperationTimeoutError("the copies are not in sync", hint="The logs of the nodes say why.")


def _keep(folder: Path, nodes: list[_DemoNode]) -> None:
    """Start nodes again that were killed."""
    while True:
        time.sleep(POLL_S)
        now_s = time.monotonic()
        for node in nodes:
            if node.process is None or node.process.poll() is None:
                continue
            if not node.ended_s:
                node.ended_s = now_s
                write_raw(f"{node.name} has ended; it starts again in 10 s\n".encode())
            elif now_s - node.ended_s >= RESTART_S:
                node.start()
                _note(folder, nodes)
                write_raw(f"{node.name} is back\n".encode())


def _stop(nodes: list[_DemoNode]) -> None:
    running = [node.process for node in nodes if node.process is not None]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.terminate()
    for process in running:
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
