"""Nodes and members of etcd as processes, behind a network that can be cut.

    client ──┐              ┌── a ──┐
             ├── network ───┼── b ──┼── network ── m0, m1, m2 (etcd)
    nodes  ──┘              └── c ──┘

Every connection of a node leads through the network: the address that it is known by is the
proxy's, and its token names the proxy's ports for etcd.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any, Final

from clients.testing import ServerRefusedError
from dcp.server.cluster.cluster_file import ClusterToken
from support.etcd_members import EtcdMembers
from support.server import DcpdProcess
from support.waiting import until
from tests.soak.cluster.links import ADVERTISED, BEHIND, free_port
from tests.soak.cluster.members import Members
from tests.soak.cluster.network import Network
from tests.soak.fork_server import EXEC_SHARE, ForkedServer
from vbucket.model.ids import NUM_VBUCKETS, vbucket_of

NAMES: Final = ("a", "b", "c")
COPIES: Final = 3
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


class FaultyCluster(Members[DcpdProcess]):
    """See the module. A context manager."""

    def __init__(
        self,
        folder: Path,
        disks: dict[str, Path],
        members: int = 3,
        *,
        partitions: int = NUM_VBUCKETS,
        is_forked: bool = False,
    ) -> None:
        """`is_forked`: most nodes are forked from a process that has their imports."""
        super().__init__()
        self.folder = folder
        self.disks = disks
        """Node -> the disk that its data folder is on, if it has one of its own."""
        self.network = Network()
        self.etcd: EtcdMembers | None = None
        self.partitions = partitions
        self._is_forked = is_forked
        self._members = members
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

    def begin(self) -> None:
        """Start everything, and return when each node has its share."""
        self.network.__enter__()
        self.etcd = self._start_etcd()
        for name in NAMES:
            self.add(name)
        self.until_in_sync()
        self.until_even()

    def end(self) -> None:
        """Kill everything. What starts in another thread is ended, too."""
        with self._starting:
            self._is_over = True
            super().end()
            if self.etcd is not None:
                self.etcd.close()
        self.network.__exit__(None, None, None)

    def add(self, name: str) -> None:
        """Start one more node, with an empty folder: the first of a cluster, or a new member."""
        url = self._meta_url(name)
        arguments = ["--node-name", name, "--partitions", str(self.partitions), *TIMERS]
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
            until(lambda: self.status(name).get("served_here") == self.partitions)
            self.change("set", masters_return_s=MASTERS_RETURN_S)

    # -- how they are reached; `tests.soak.cluster.packets` does it in another way --------------

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
        kind = ForkedServer if self._is_forked else DcpdProcess
        node = kind(data, "--advertise-host", ADVERTISED, *arguments)
        taken = {port for other in self.nodes.values() for port in (other.port, other.admin_port)}
        node.port = free_port(self._draw, taken)
        node.admin_port = free_port(self._draw, taken | {node.port})
        self.network.serve(name, node.port)
        return node

    # -- nodes -------------------------------------------------------------------------------------

    def vb_of(self, key: bytes) -> int:
        """Return the partition of a key."""
        return vbucket_of(key, self.partitions)

    def address(self, name: str) -> str:
        """Return where clients reach a node: through the network."""
        return f"{ADVERTISED}:{self.nodes[name].port}"

    def everywhere(self) -> str:
        """Return the address of all nodes that there are now, for clients."""
        return "dcpd://" + ",".join(self.address(name) for name in self.nodes)

    def start(self, name: str) -> None:
        """Start a node on the folder that it has."""
        with self._starting:
            if self._is_over:
                raise NodeError("the cluster is over")
            if isinstance(node := self.nodes[name], ForkedServer):
                node.is_forked = self._draw.random() >= EXEC_SHARE
            node.start()
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
        self.thaw_process(self.nodes[name].pid)
        self.nodes[name].kill()

    def wipe(self, name: str) -> None:
        """Remove the folder of a node that does not run."""
        assert not self.nodes[name].runs
        shutil.rmtree(self.nodes[name].data)

    def store_process(self, name: str) -> int | None:
        """Return the process that writes a node's store; None: it is dead, or not there yet."""
        return next((pid for pid in self.nodes[name].children() if is_alive(pid)), None)

    # -- what nodes say ----------------------------------------------------------------------------

    def status(self, name: str = "a") -> dict[str, Any]:
        """Return what a node knows of the cluster; {} if it does not answer."""
        try:
            return super().status(name)
        except (OSError, ServerRefusedError):
            return {}

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
        try:
            until(lambda: self.have_moved(done), SYNCED_S)
        except AssertionError:
            plan = self.status(self.running()[0]).get("plan")
            raise NodeError(f"{what} does not end: {plan}") from None

    def until_in_sync(self, copies: int = COPIES) -> None:
        """Return once all nodes know that each partition has so many copies in sync."""

        def are_so() -> bool:
            return all(self.are_in_sync(copies, name) for name in self.running())

        try:
            until(are_so, SYNCED_S)
        except AssertionError:
            found = {name: self.status(name) for name in self.running()}
            last = {name: (each.get("in_sync_sizes"), each.get("problems"))
                    for name, each in found.items()}  # fmt: skip
            raise NodeError(f"the copies are not in sync again: {last}") from None

    def until_even(self) -> None:
        """Return once each node is master of its share."""
        name = self.running()[0]
        try:
            until(lambda: self.are_even(name), SYNCED_S)
        except AssertionError:
            raise NodeError(f"masters are not shared evenly: {self.masters(name)}") from None


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that was killed and not waited for yet does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return fields.rpartition(")")[2].split()[0] not in {"Z", "X"}
