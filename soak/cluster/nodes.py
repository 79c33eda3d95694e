"""Nodes and members of etcd as processes, behind a network that can be cut.

    client ──┐              ┌── a ──┐
             ├── network ───┼── b ──┼── network ── m0, m1, m2 (etcd)
    nodes  ──┘              └── c ──┘

Every connection of a node leads through the network: the address that it is known by is the
proxy's, and its token names the proxy's ports for etcd.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from clients.testing import ServerRefusedError
from dcp.server.cluster.cluster_file import ClusterToken
from soak.cluster.links import ADVERTISED, BEHIND
from soak.cluster.network import Network
from support.etcd_members import EtcdMembers
from support.server import DcpdProcess
from support.waiting import until

NAMES: Final = ("a", "b", "c")
COPIES: Final = 3
PORTS: Final = range(15_000, 30_000)
"""Below the range for outgoing connections, one of which could take a port while its node is down.
"""
STATUS: Final = "/api/v1/cluster/status"
TIMERS: Final = ("--suspect-after", "1s", "--lease", "10s")
"""Longer than the defaults: three nodes, three members of etcd and the clients share the
processors. With less, an overloaded machine only sees nodes that take each other for dead."""
MASTERS_RETURN_S: Final = 1.0
"""How long a node is in sync before it is master again: the next fault does not wait for long."""
ETCD_TIMES: Final = ("--heartbeat-interval", "100", "--election-timeout", "1000")
"""etcd's own, not the shorter ones of other tests: members have to share the processors here."""
SYNCED_S: Final = 300.0
"""Longest time until all copies are in sync again, on a machine that does other things too."""


class NodeError(Exception):
    """A node does not do what it must; the text says what."""


class FaultyCluster:
    """See the module. A context manager."""

    def __init__(self, folder: Path, disks: dict[str, Path], members: int = 3) -> None:
        self.folder = folder
        self.disks = disks
        """Node -> the disk that its data folder is on, if it has one of its own."""
        self.network = Network()
        self.nodes: dict[str, DcpdProcess] = {}
        self.etcd: EtcdMembers | None = None
        self._members = members
        self._frozen: set[int] = set()
        self._added = 0
        """Nodes that were added instead of lost ones."""
        self._token = ""
        self._draw = random.Random(os.getpid())
        self._starting = threading.Lock()
        """Held while a process starts: one that starts in another thread is ended too."""
        self._is_over = False

    @property
    def member_names(self) -> list[str]:
        """The parties of the network that are members of etcd."""
        return [f"m{number}" for number in range(self._members)]

    # -- begin and end -----------------------------------------------------------------------------

    def __enter__(self) -> FaultyCluster:
        self.network.__enter__()
        try:
            self.etcd = self._start_etcd()
            for name in NAMES:
                self.add(name)
            self.until_in_sync()
            self.until_even()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._starting:
            self._is_over = True
            self.thaw_all()
            for node in self.nodes.values():
                if node._process is not None:
                    node.kill()
            if self.etcd is not None:
                self.etcd.close()
        self.network.__exit__(None, None, None)

    def add(self, name: str) -> None:
        """Start one more node, with an empty folder: the first of a cluster, or a new member."""
        url = self._meta_url(name)
        arguments = ["--node-name", name, *TIMERS]
        if self._token:
            token = ClusterToken.from_text(self._token)
            path = self.folder / f"{name}.token"
            own = ClusterToken(cluster=token.cluster, meta=url, secret=token.secret)
            path.write_text(own.to_text())
            arguments += ["--cluster", "join", "--cluster-token-file", str(path)]
        node = self.nodes[name] = self._new_node(name, arguments)
        node.log_path = self.folder / f"{name}.log"
        self.start(name)
        if not self._token:
            self._token = node.ask(
                "POST", "/api/v1/cluster/init", {"copies": COPIES, "meta": url, "name": name}
            )["token"]
            until(lambda: self.status(name).get("served_here") == 1024)
            self.change("set", masters_return_s=MASTERS_RETURN_S)

    # -- how they are reached; `soak.cluster.packets` does it in another way -----------------------

    def _start_etcd(self) -> EtcdMembers:
        (self.folder / "etcd").mkdir(parents=True)
        return EtcdMembers(self.folder / "etcd", len(self.member_names), ETCD_TIMES)

    def _meta_url(self, name: str) -> str:
        """Return the metadata store for a node: its own doors to the members of etcd."""
        assert self.etcd is not None
        doors = [
            self.network.serve(member, 0, source=name, to_port=port)
            for member, port in zip(self.member_names, self.etcd.ports, strict=True)
        ]
        return "etcd://" + ",".join(f"{BEHIND}:{port}" for port in doors)

    def _new_node(self, name: str, arguments: list[str]) -> DcpdProcess:
        data = self.disks.get(name, self.folder) / name
        node = DcpdProcess(data, "--advertise-host", ADVERTISED, *arguments)
        node.port, node.admin_port = self._free_port(), self._free_port()
        self.network.serve(name, node.port)
        return node

    def _free_port(self) -> int:
        """Return a port that is free at both addresses."""
        taken = {node.port for node in self.nodes.values()}
        while True:
            port = self._draw.choice(PORTS)
            if port in taken:
                continue
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                for host in (BEHIND, ADVERTISED):
                    stack.enter_context(socket.create_server((host, port)))
                return port

    # -- nodes -------------------------------------------------------------------------------------

    def address(self, name: str) -> str:
        """Return where clients reach a node: through the network."""
        return f"{ADVERTISED}:{self.nodes[name].port}"

    def is_running(self, name: str) -> bool:
        """Whether a node's process is there."""
        return self.nodes[name]._process is not None

    def start(self, name: str) -> None:
        """Start a node on the folder that it has."""
        with self._starting:
            if self._is_over:
                raise NodeError("the cluster is over")
            self.nodes[name].start()
        self.network.runs(name, self.nodes[name].pid)

    def start_member(self, number: int) -> None:
        """Start a member of etcd again."""
        with self._starting:
            if self._is_over:
                raise NodeError("the cluster is over")
            assert self.etcd is not None
            self.etcd.start(number)

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self._frozen.discard(self.nodes[name].pid)
        self.nodes[name].kill()

    def wipe(self, name: str) -> None:
        """Remove the folder of a node that does not run."""
        assert not self.is_running(name)
        shutil.rmtree(self.nodes[name].data)

    def store_process(self, name: str) -> int | None:
        """Return the process that writes a node's store."""
        return next(iter(self.nodes[name].children()), None)

    def freeze_process(self, pid: int) -> None:
        """SIGSTOP."""
        os.kill(pid, signal.SIGSTOP)
        self._frozen.add(pid)

    def thaw_process(self, pid: int) -> None:
        """SIGCONT, if the process is still there."""
        self._frozen.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def thaw_all(self) -> None:
        """SIGCONT to all that were frozen."""
        for pid in tuple(self._frozen):
            self.thaw_process(pid)

    # -- what nodes say ----------------------------------------------------------------------------

    def status(self, name: str) -> dict[str, Any]:
        """Return what a node knows of the cluster; {} if it does not answer."""
        try:
            found: dict[str, Any] = self.nodes[name].ask("GET", STATUS)
        except (OSError, ServerRefusedError):
            return {}
        return found

    def partition_map(self, name: str) -> list[dict[str, Any]]:
        """Return the record of each partition, as a node knows it."""
        found: list[dict[str, Any]] = self.nodes[name].ask("GET", "/api/v1/cluster/map")
        return found

    def masters(self, name: str) -> dict[str, int]:
        """Return how many partitions each node is master of, as a node knows it."""
        return {node["name"]: node["masters"] for node in self.status(name).get("nodes", [])}

    def running(self) -> list[str]:
        """Return the nodes that run."""
        return [name for name in self.nodes if self.is_running(name)]

    def with_disks(self) -> list[str]:
        """Return the nodes that have a disk of their own."""
        return [name for name in self.disks if name in self.nodes]

    def replace(self, name: str) -> None:
        """Start a new node instead of one that is lost, and take that one out of the cluster."""
        del self.nodes[name]
        self.disks.pop(name, None)
        self._added += 1
        self.add(f"new-{self._added}")
        self.insist("remove", node=name)

    def ask_to(self, name: str, **body: Any) -> dict[str, Any]:
        """Ask for a change of the cluster. Raises ServerRefusedError, OSError."""
        found: dict[str, Any] = self.nodes[self.running()[0]].ask(
            "POST", f"/api/v1/cluster/{name}", body
        )
        return found

    def change(self, name: str, **body: Any) -> None:
        """Change the cluster, and return when copies and masters have moved."""
        self._until_moved(self.ask_to(name, **body), f"{name} {body}")

    def insist(self, name: str, **body: Any) -> None:
        """The same, and ask again while it is refused: the cluster may not be whole yet."""
        done: list[dict[str, Any]] = []
        last = ""

        def is_taken() -> bool:
            nonlocal last
            try:
                done.append(self.ask_to(name, **body))
            except (OSError, ServerRefusedError) as error:
                last = str(error)
            return bool(done)

        try:
            until(is_taken, SYNCED_S)
        except AssertionError:
            raise NodeError(f"{name} {body} is refused: {last}") from None
        self._until_moved(done[0], f"{name} {body}")

    def _until_moved(self, done: dict[str, Any], what: str) -> None:
        last: dict[str, Any] = {}

        def is_over() -> bool:
            last.update(self.status(self.running()[0]))
            return bool(
                last and last["store"]["revision"] >= done["revision"] and last["plan"] is None
            )

        try:
            until(is_over, SYNCED_S)
        except AssertionError:
            raise NodeError(f"{what} does not end: {last.get('plan')}") from None

    def until_in_sync(self, copies: int = COPIES) -> None:
        """Return once all nodes know that each partition has so many copies in sync."""
        wanted = {str(copies): 1024}
        last: dict[str, Any] = {}

        def is_so() -> bool:
            for name in self.running():
                status = self.status(name)
                last[name] = status.get("in_sync_sizes"), status.get("problems")
                if status.get("in_sync_sizes") != wanted or status.get("without_master"):
                    return False
            return True

        try:
            until(is_so, SYNCED_S)
        except AssertionError:
            raise NodeError(f"the copies are not in sync again: {last}") from None

    def until_even(self) -> None:
        """Return once each node is master of its share."""
        names = self.running()
        share = 1024 // len(names) - len(names)

        def is_so() -> bool:
            masters = self.masters(names[0])
            return all(masters.get(name, 0) >= share for name in names)

        try:
            until(is_so, SYNCED_S)
        except AssertionError:
            raise NodeError(f"masters are not shared evenly: {self.masters(names[0])}") from None
