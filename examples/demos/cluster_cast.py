"""The processes of the cluster demo: etcd, and dcpd nodes that are killed and frozen."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster_writers import PARTITIONS
from processes import ProcessFailedError, free_ports, tail

from dcpd.testing import DcpServer, ServerRefusedError

PATIENCE_S = 90.0
"""How long to wait for something that takes some seconds."""
MASTERS_RETURN_S = 1.0
"""How long a node is back and in sync before it is master again. A year passes quickly here."""
POLL_S = 0.05
STATUS = "/api/v1/cluster/status"
MAP = "/api/v1/cluster/map"


def say(text: str) -> None:
    """Print a step."""
    print(f"  {time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def until(is_so: Callable[[], object], what: str) -> None:
    """Return once a condition holds. Raises ProcessFailedError."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > give_up_s:
            raise ProcessFailedError(f"within {PATIENCE_S:g} s it did not happen: {what}")
        time.sleep(POLL_S)


class Etcd:
    """Members of one etcd."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._client_ports = free_ports(2 * count)
        self._peer_ports = [self._client_ports.pop() for _ in range(count)]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * count
        self._starting = threading.Lock()
        self._is_over = False

    @property
    def url(self) -> str:
        """The metadata store, as `dcpctl cluster init --meta` wants it."""
        return "etcd://" + ",".join(f"127.0.0.1:{port}" for port in self._client_ports)

    def start_all(self) -> None:
        """Start all members, and return when one of them leads."""
        if shutil.which("etcd") is None:
            raise ProcessFailedError(
                "the command etcd is missing: sudo apt-get install etcd-server"
            )
        for number in range(len(self._processes)):
            self.start(number)
        until(lambda: self.leader() is not None, "etcd has a leader")

    def start(self, number: int) -> None:
        """Start a member on the folder that it has."""
        members = ",".join(f"m{at}=http://127.0.0.1:{p}" for at, p in enumerate(self._peer_ports))
        client = f"http://127.0.0.1:{self._client_ports[number]}"
        peer = f"http://127.0.0.1:{self._peer_ports[number]}"
        with self._starting, (self._folder / f"etcd-m{number}.log").open("ab") as log:
            if self._is_over:
                raise ProcessFailedError("the demo is over")
            self._processes[number] = subprocess.Popen(
                [
                    "etcd", "--name", f"m{number}", "--data-dir", self._folder / f"etcd-m{number}",
                    "--listen-client-urls", client, "--advertise-client-urls", client,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", members, "--logger", "zap",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip

    def leader(self) -> int | None:
        """Return which member leads, if one says so."""
        for number, process in enumerate(self._processes):
            if process is None:
                continue
            url = f"http://127.0.0.1:{self._client_ports[number]}/metrics"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
                if b"\netcd_server_is_leader 1" in answer.read():
                    return number
        return None

    def kill(self, number: int) -> None:
        """End a member with SIGKILL."""
        process, self._processes[number] = self._processes[number], None
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End all members."""
        with self._starting:
            self._is_over = True
        for number in range(len(self._processes)):
            self.kill(number)


class Nodes:
    """dcpd nodes of one cluster."""

    def __init__(self, folder: Path, meta: str) -> None:
        self.servers: dict[str, DcpServer] = {}
        self.running: set[str] = set()
        self._folder = folder
        self._meta = meta
        self._frozen: set[str] = set()
        self._starting = threading.Lock()
        """Held while a node starts: one that starts in another thread is ended too."""
        self._is_over = False

    @property
    def address(self) -> str:
        """Where clients begin: at any of these."""
        return ",".join(server.address for server in self.servers.values())

    def add(self, name: str) -> None:
        """Start one more node: the first one of a cluster, or a new member."""
        token = self._folder / "token"
        joins = ("--cluster", "join", "--cluster-token-file", str(token)) if self.servers else ()
        server = DcpServer(self._folder / name, "--node-name", name, *joins)
        server.port, server.admin_port = free_ports(2)
        self.servers[name] = server
        self.start(name)
        if not joins:
            body = {"copies": 3, "meta": self._meta, "name": name}
            token.touch(mode=0o600)
            token.write_text(server.ask("POST", "/api/v1/cluster/init", body)["token"])
            until(lambda: self.status(name).get("served_here") == PARTITIONS, f"{name} serves")
            self.change("set", masters_return_s=MASTERS_RETURN_S)

    def start(self, name: str) -> None:
        """Start a node on the folder that it has, and return when it is ready."""
        with self._starting:
            if self._is_over:
                raise ProcessFailedError("the demo is over")
            self.servers[name].start()
            self.running.add(name)

    def kill(self, name: str) -> None:
        """End a node with SIGKILL."""
        self.running.discard(name)
        self._frozen.discard(name)
        self.servers[name].kill()

    def freeze(self, name: str) -> None:
        """Stop a node with SIGSTOP: it does nothing, and its connections stay."""
        self.running.discard(name)
        self._frozen.add(name)
        self._signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Let a frozen node go on."""
        self._signal(name, signal.SIGCONT)
        self._frozen.discard(name)
        self.running.add(name)

    def _signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.servers[name].pid, number)

    def close(self) -> None:
        """End all nodes, frozen ones too."""
        with self._starting:
            self._is_over = True
            for name in self.running | self._frozen:
                self.servers[name].kill()
            self.running.clear()
            self._frozen.clear()

    def check(self) -> None:
        """Raise ProcessFailedError if a node ended by itself."""
        for name in self.running:
            stat = Path(f"/proc/{self.servers[name].pid}/stat")
            if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
                raise ProcessFailedError(
                    f"node {name} has ended: {tail(self.servers[name].log_path)}"
                )

    def status(self, name: str) -> dict[str, Any]:
        """Return what a node knows of the cluster; {} if it does not answer."""
        try:
            found: dict[str, Any] = self.servers[name].ask("GET", STATUS)
        except (OSError, ServerRefusedError):
            return {}
        return found

    def view(self) -> dict[str, Any]:
        """Return what any node that runs knows of the cluster."""
        return self.status(min(self.running))

    def map(self) -> list[dict[str, Any]]:
        """Return master and copies of each partition, as any node that runs knows them."""
        rows: list[dict[str, Any]] = self.servers[min(self.running)].ask("GET", MAP)
        return rows

    def change(self, name: str, **body: Any) -> dict[str, Any]:
        """Change the cluster as `dcpctl cluster` does; return when copies and masters have moved.
        The answer says what was moved.
        """
        server = self.servers[min(self.running)]
        done: dict[str, Any] = server.ask("POST", f"/api/v1/cluster/{name}", body)

        def is_over() -> bool:
            self.check()
            status = self.view()
            return bool(
                status
                and status["store"]["revision"] >= done["revision"]
                and status["plan"] is None
            )

        until(is_over, f"{name} {body} is done")
        return done

    def masters(self) -> dict[str, int]:
        """Return how many partitions each node is master of."""
        return {node["name"]: node["masters"] for node in self.view().get("nodes", [])}

    def until_in_sync(self, copies: int = 3) -> None:
        """Return once each partition has so many copies in sync."""
        wanted = {str(copies): PARTITIONS}

        def is_so() -> bool:
            self.check()
            return bool(self.view().get("in_sync_sizes") == wanted)

        until(is_so, f"{copies} copies of all partitions are in sync")

    def until_shared(self) -> None:
        """Return once each node is master of about its share."""
        share = PARTITIONS // len(self.servers) - len(self.servers)

        def is_so() -> bool:
            self.check()
            masters = self.masters()
            return all(masters.get(name, 0) >= share for name in self.servers)

        until(is_so, "each node is master of its share")

    def until_known(self, name: str) -> None:
        """Return once the others know a node, and that it is alive."""

        def is_so() -> bool:
            nodes = self.view().get("nodes", [])
            return any(node["name"] == name and node["is_alive"] for node in nodes)

        until(is_so, f"{name} is a member")

    def until_followed(self, name: str) -> None:
        """Return once a node is master of nothing."""
        until(lambda: self.masters().get(name) == 0, f"others are master instead of {name}")
