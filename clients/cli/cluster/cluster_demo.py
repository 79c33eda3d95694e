"""dcpctl cluster demo: nodes of a cluster as processes of this machine, on loopback.

    DIR/n1, DIR/n2, ...     data folders
    DIR/n1.log, ...         logs
    DIR/demo.json           name -> process id, while the demo runs
    DIR/etcd, ...           with --meta etcd (`demo_etcd`)

With JSON output it writes one line when all nodes serve, and one when a node ends or is back. What
it waits for meanwhile goes to stderr, a line for each step. On a machine that is busy with other
things the nodes take long. As long as anything becomes better, the demo waits: more nodes take
part, more copies are in sync, or more of the plan is done (`DemoProgress`).

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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from clients.cli.cluster.demo_etcd import PORTS_FILE, DemoEtcd
from clients.cli.output import write_json, write_raw
from clients.errors import ConnectError, DcpdError, OperationTimeoutError
from clients.testing.cluster import DcpCluster, start_together
from clients.testing.control import ControlServer

STATE_FILE: Final = "demo.json"
RESTART_S: Final = 10.0
"""How long a killed node stays away, so that one can see what the others do."""
STOP_S: Final = 15.0
POLL_S: Final = 0.1
EMBEDDED: Final = "embedded"
NODES: Final = 3
NODES_MAX: Final = 9
_PORTS: Final = re.compile(
    r"key-value\s+127\.0\.0\.1:(\d+)[\s\S]*admin\s+http://127\.0\.0\.1:(\d+)"
)
_LAST_LINE: Final = "  try "
_SIGNALS: Final = {
    "kill": signal.SIGKILL,
    "pause": signal.SIGSTOP,
    "resume": signal.SIGCONT,
}
TELL_S: Final = 5.0
"""Time between two lines about the same step."""
STILL_S: Final = 60.0
"""How long nothing has to move before the demo gives up, at least."""


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
        """Start it, and wait until it listens. It ends by itself if that is not possible."""
        with told_while_it_takes(_tell, f"{self.name} starts", self.log_path):
            self._start(*arguments)

    def _start(self, *arguments: str) -> None:
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

    @property
    def runs(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None

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
    folder_name: str,
    count: int | None,
    copies: int,
    *,
    meta: str | None,
    timeout_s: float,
    is_json: bool,
) -> None:
    """Start the nodes, tell where they are, and keep them until Ctrl-C. `meta` is embedded or etcd.
    None for it and for `count`: what the folder has, or embedded and `NODES`.
    """
    folder = Path(folder_name).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = folder / "token"
    etcd = _etcd_of(folder, folder_name, meta)
    nodes = [_DemoNode(folder, name) for name in _names(folder, folder_name, count)]
    # SIGTERM ends the demo like Ctrl-C, so that it takes its nodes with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        store: tuple[str, ...] = ()
        if etcd is not None:
            with told_while_it_takes(_tell, "etcd starts", folder / "etcd.log"):
                etcd.start()
            store = ("--cluster-meta", etcd.url)
        shared = (
            "--cluster-token-file", str(token), "--cluster-copies", str(copies),
            "--cluster-nodes", str(len(nodes)),
        )  # fmt: skip
        ways = [("--cluster", "init", *store), *[("--cluster", "join")] * (len(nodes) - 1)]
        starts = [partial(node.start, *way, *shared) for node, way in zip(nodes, ways, strict=True)]
        start_together(starts, partial(_kill, nodes))
        _note(folder, nodes)
        _wait_until_served(nodes, timeout_s)
        url = EMBEDDED if etcd is None else etcd.url
        if is_json:
            write_json(_document(folder, nodes, url))
        else:
            write_raw(_text(folder_name, nodes, url).encode())
        _keep(folder, nodes, is_json=is_json)
    finally:
        _stop(nodes)
        if etcd is not None:
            etcd.stop()
        with contextlib.suppress(OSError):
            (folder / STATE_FILE).unlink()


def run_controlled(
    folder_name: str, count: int | None, copies: int, port: int, *, is_json: bool
) -> None:
    """Start the nodes, and carry out what is asked at a port of loopback until Ctrl-C. A node that
    was killed stays down until a restart is asked for.
    """
    folder = Path(folder_name).absolute()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _tell(f"the nodes start; logs: {folder}")
    names = _names(folder, folder_name, count)
    cluster = DcpCluster(nodes=len(names), copies=copies, data=folder)
    try:
        server = ControlServer(cluster, port)
    except OSError as error:
        raise ConnectError(
            f"port {port} cannot be used: {error}", hint="Name another one."
        ) from None
    with server, cluster:
        nodes = [_Shown(name, node.port, node.admin_port) for name, node in cluster.nodes.items()]
        if is_json:
            write_json({**_document(folder, nodes, EMBEDDED), "control": server.url})
        else:
            write_raw(f"{_text(folder_name, nodes, EMBEDDED)}control {server.url}\n".encode())
        server.serve_forever()


class _Shown(NamedTuple):
    name: str
    port: int
    admin_port: int


def _document(folder: Path, nodes: Sequence[_DemoNode | _Shown], url: str) -> dict[str, Any]:
    rows = [
        {"name": node.name, "address": f"127.0.0.1:{node.port}", "admin_port": node.admin_port}
        for node in nodes
    ]
    return {"result": "started", "folder": str(folder), "metadata_store": url, "nodes": rows}


def _text(folder_name: str, nodes: Sequence[_DemoNode | _Shown], url: str) -> str:
    lines = [f"{node.name}  127.0.0.1:{node.port}" for node in nodes]
    lines += [] if url == EMBEDDED else [f"metadata store  {url}"]
    lines.append(f"try  dcpctl --server 127.0.0.1:{nodes[0].port} cluster status")
    lines.append(f"     dcpctl cluster kill {nodes[:2][-1].name} --data {folder_name}")
    return "\n".join(lines) + "\n"


def _names(folder: Path, shown: str, count: int | None) -> list[str]:
    """Return the nodes of a demo: those that the folder has, and more if more are wanted."""
    all_names = [f"n{number}" for number in range(1, NODES_MAX + 1)]
    present = [name for name in all_names if (folder / name).is_dir()]
    wanted = all_names[: count or (1 if present else NODES)]
    names = [name for name in all_names if name in present or name in wanted]
    if count is not None and count < len(names):
        click.echo(
            f"dcpctl: {shown} has {', '.join(present)}, and all of them start. --data names another"
            " folder",
            err=True,
        )
    return names


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
    """Wait until each partition has its copies in sync, and no plan is under way, for as long as
    anything moves.
    """
    progress = DemoProgress(time.monotonic(), max(timeout_s, STILL_S))
    while not progress.is_stuck(time.monotonic()):
        running = {node.name for node in nodes if node.runs}
        status = nodes[0].status()
        if _is_served(status, running):
            return
        if line := progress.note(time.monotonic(), status):
            _tell(line)
        time.sleep(POLL_S)
    logs = ", ".join(str(node.log_path) for node in nodes)
    raise OperationTimeoutError(
        f"the copies are not in sync: {progress.text}", hint=f"The logs say why: {logs}."
    )


def _tell(text: str) -> None:
    click.echo(f"dcpctl: {text}", err=True)


def _is_served(status: dict[str, Any], running: set[str]) -> bool:
    """Whether all nodes that run take part, and the rest of `_wait_until_served`. One that is
    drained takes part without copies; one that was removed has ended by itself.
    """
    alive = {node["name"]: node for node in status.get("nodes", ()) if node["is_alive"]}
    able = sum(not node["is_drained"] for node in alive.values())
    if not able or not running <= alive.keys() or status["plan"]:
        return False
    copies = min(status["copies"], able)
    return bool(status["in_sync_sizes"] == {str(copies): status["partitions"]})


def _keep(folder: Path, nodes: list[_DemoNode], *, is_json: bool) -> None:
    """Start nodes again that were killed."""

    def tell(node: _DemoNode, result: str, text: str, **more: Any) -> None:
        if is_json:
            write_json({"result": result, "name": node.name, **more})
        else:
            write_raw(f"{node.name} {text}\n".encode())

    while True:
        time.sleep(POLL_S)
        now_s = time.monotonic()
        for node in nodes:
            if node.process is None or node.process.poll() is None:
                continue
            if not node.ended_s:
                node.ended_s = now_s
                again = _was_killed(node)
                told = "it starts again in 10 s" if again else f"see {node.log_path}"
                more = {"starts_again": again, "log": str(node.log_path)}
                tell(node, "ended", f"has ended; {told}", **more)
            elif _was_killed(node) and now_s - node.ended_s >= RESTART_S:
                node.start()
                _note(folder, nodes)
                tell(node, "back", "is back")


def _was_killed(node: _DemoNode) -> bool:
    """Whether a signal ended a node; otherwise it ended by itself, and would do so again."""
    return node.process is not None and (node.process.returncode or 0) < 0


def _kill(nodes: list[_DemoNode]) -> None:
    for node in nodes:
        if node.process is not None:
            node.process.kill()


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


class DemoProgress:
    """How far a demo is: lines for its user, and when nothing moves any more. `still_s` is how long
    nothing may move.
    """

    def __init__(self, now_s: float, still_s: float = STILL_S) -> None:
        self._still_s = still_s
        self._best = (0, 0, 0)
        self._moved_s = self._told_s = now_s
        self._told = ""

    def note(self, now_s: float, status: dict[str, Any]) -> str:
        """Take what a node says of the cluster; {}: it does not answer. Return a line for the user;
        "": there is nothing new to say.
        """
        alive, in_sync, wanted = counts(status)
        here = (alive, in_sync, _done(status))
        best = (
            max(here[0], self._best[0]),
            max(here[1], self._best[1]),
            max(here[2], self._best[2]),
        )
        if best != self._best:
            self._best, self._moved_s = best, now_s
        text = f"{alive} nodes take part, {in_sync:,} of {wanted:,} copies are in sync"
        if not status:
            text = "n1 does not answer yet"
        if text == self._told or now_s - self._told_s < TELL_S:
            return ""
        self._told, self._told_s = text, now_s
        return text

    def is_stuck(self, now_s: float) -> bool:
        """Whether nothing has moved for too long."""
        return now_s - self._moved_s >= self._still_s

    @property
    def text(self) -> str:
        """What was reached."""
        alive, in_sync, _ = self._best
        return (
            f"nothing has moved for {self._still_s:.0f} s: {alive} nodes take part, and "
            f"{in_sync:,} copies are in sync"
        )


def counts(status: dict[str, Any]) -> tuple[int, int, int]:
    """Return how many nodes take part, how many copies are in sync, and how many are to be."""
    alive = [node for node in status.get("nodes", ()) if node["is_alive"]]
    sizes = status.get("in_sync_sizes", {})
    in_sync = sum(int(size) * number for size, number in sizes.items())
    able = sum(not node["is_drained"] for node in alive)
    return len(alive), in_sync, min(status.get("copies", 0), able) * status.get("partitions", 0)


def _done(status: dict[str, Any]) -> int:
    """Return how many partitions of the plan are done."""
    plan = status.get("plan") or {}
    done = plan.get("done", 0)
    return done if isinstance(done, int) else 0


@contextmanager
def told_while_it_takes(tell: Callable[[str], None], what: str, log: Path) -> Iterator[None]:
    """Tell at once what begins, and again every `TELL_S` while it takes."""
    tell(f"{what}; log: {log}")
    is_done = threading.Event()

    def repeat() -> None:
        seconds = TELL_S
        while not is_done.wait(TELL_S):
            tell(f"{what} ({seconds:.0f} s)")
            seconds += TELL_S

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
