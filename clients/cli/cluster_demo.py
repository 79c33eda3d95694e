"""dcpctl cluster demo: nodes of a cluster as processes of this machine, on loopback.

    DIR/n1, DIR/n2, ...     data folders
    DIR/n1.log, ...         logs
    DIR/demo.json           name -> process id, while the demo runs
    DIR/etcd, ...           with --meta etcd (`demo_etcd`)

A node that was killed with `dcpctl cluster kill` is started again after a while. One that ended by
itself is not: its log says why.
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

import click

from clients.cli.demo_etcd import PORTS_FILE, DemoEtcd
from clients.cli.output import write_raw
from clients.errors import ConnectError, DcpdError, OperationTimeoutError

STATE_FILE: Final = "demo.json"
RESTART_S: Final = 10.0
"""How long a killed node stays away, so that one can see what the others do."""
STOP_S: Final = 15.0
START_S: Final = 20.0
FILL_S: Final = 30.0
"""How long the copies of one node may take, on a machine that is busy with other things."""
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
        self.log_path = folder / f"{name}.log"
        self.port = self.admin_port = 0
        self.process: subprocess.Popen[str] | None = None
        self.ended_s = 0.0
        """When it was found dead, monotonic; 0: it runs."""

    def start(self, *arguments: str) -> None:
        """Start it, and wait until it listens."""
        with self.log_path.open("a") as log:
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
            raise ConnectError(f"node {self.name} does not start", hint=f"See {self.log_path}.")
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


def run_demo(
    folder_name: str, count: int, copies: int, *, meta: str | None, timeout_s: float
) -> None:
    """Start the nodes, tell where they are, and keep them until Ctrl-C. `meta` is embedded or etcd;
    None: embedded, or what the folder has.
    """
    folder = Path(folder_name).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = folder / "token"
    etcd = _etcd_of(folder, folder_name, meta)
    nodes = [_DemoNode(folder, f"n{number + 1}") for number in range(count)]
    # SIGTERM ends the demo like Ctrl-C, so that it takes its nodes with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        store: tuple[str, ...] = ()
        if etcd is not None:
            etcd.start()
            store = ("--cluster-meta", etcd.url)
        for number, node in enumerate(nodes):
            way = ("--cluster", "init", *store) if number == 0 else ("--cluster", "join")
            node.start(*way, "--cluster-token-file", str(token), "--cluster-copies", str(copies))
        _note(folder, nodes)
        _wait_until_served(nodes, timeout_s)
        lines = [f"{node.name}  127.0.0.1:{node.port}" for node in nodes]
        lines += [] if etcd is None else [f"metadata store  {etcd.url}"]
        first = nodes[0].port
        lines.append(f"try  dcpctl --server 127.0.0.1:{first} cluster status")
        lines.append(f"     dcpctl cluster kill n2 --data {folder_name}")
        write_raw(("\n".join(lines) + "\n").encode())
        _keep(folder, nodes)
    finally:
        _stop(nodes)
        if etcd is not None:
            etcd.stop()
        with contextlib.suppress(OSError):
            (folder / STATE_FILE).unlink()


def _etcd_of(folder: Path, shown: str, meta: str | None) -> DemoEtcd | None:
    """Return the etcd of a demo; None: the store is embedded. Raises click.UsageError."""
    has_etcd, is_new = (folder / PORTS_FILE).exists(), not (folder / "n1").exists()
    if meta is None or is_new:
        wants_etcd = has_etcd if meta is None else meta == "etcd"
    else:
        wants_etcd = meta == "etcd"
        if wants_etcd != has_etcd:
            raise click.UsageError(
                f"the demo in {shown} has the other metadata store. Leave --meta out to go on with "
                "it, or name another folder with --data"
            )
    return DemoEtcd(folder) if wants_etcd else None


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
    pid = pids[name]
    if not _is_node(pid, path.parent / name):
        raise DcpdError(f"node {name} does not run", hint="The demo starts it again after 10 s.")
    try:
        os.kill(pid, _SIGNALS[action])
    except ProcessLookupError:
        raise DcpdError(f"node {name} does not run") from None


def _is_node(pid: int, data: Path) -> bool:
    """Whether a process is the node with this data folder: the number may be another's by now."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return not Path("/proc/self").exists()  # a system without /proc
    return os.fsencode(data) in words


def _note(folder: Path, nodes: list[_DemoNode]) -> None:
    pids = {node.name: node.process.pid for node in nodes if node.process is not None}
    (folder / STATE_FILE).write_text(json.dumps(pids))


def _wait_until_served(nodes: list[_DemoNode], timeout_s: float) -> None:
    """Wait until each partition has its copies in sync, and nothing moves any more."""
    give_up_s = time.monotonic() + max(timeout_s, START_S) + FILL_S * len(nodes)
    while time.monotonic() < give_up_s:
        found = nodes[0].status()
        able = sum(not node["is_drained"] for node in found.get("nodes", ()))
        copies = min(found.get("copies", 0), able)
        is_in_sync = found.get("in_sync_sizes") == {str(copies): found.get("partitions")}
        if is_in_sync and not found["plan"] and able == len(nodes):
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
                told = "it starts again in 10 s" if _was_killed(node) else f"see {node.log_path}"
                write_raw(f"{node.name} has ended; {told}\n".encode())
            elif _was_killed(node) and now_s - node.ended_s >= RESTART_S:
                node.start()
                _note(folder, nodes)
                write_raw(f"{node.name} is back\n".encode())


def _was_killed(node: _DemoNode) -> bool:
    """Whether a signal ended a node; otherwise it ended by itself, and would do so again."""
    return node.process is not None and (node.process.returncode or 0) < 0


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
