"""Nodes of a cluster as processes, and a load on them, for `benchmarks.cluster`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from benchmarks.cluster_load import KEYS_PER_PARTITION
from benchmarks.peers import Etcd, descendants
from clients.address import parse_address
from clients.kv.client import KvClient
from clients.testing import ServerRefusedError
from dcp.server.cluster.cluster_file import ClusterToken
from tests.soak.cluster.links import ADVERTISED, BEHIND, CLIENT, free_port
from tests.soak.cluster.members import EmbeddedMembers
from tests.soak.cluster.network import Network

SETTLE_SECONDS: Final = 120.0
"""A busy machine starts three nodes within 20 s."""
WHILE_MOVING_SECONDS: Final = 3600.0
"""A gigabyte of documents is copied to a node within minutes."""
POLL_SECONDS: Final = 0.05
MOVED_POLL_SECONDS: Final = 2.0
"""While writes are measured: each status is a look at all partitions by the node that answers."""
ANSWER_SECONDS: Final = 120.0
"""Longest time until the load tells what it was asked for."""
CLUSTER: Final = "dcpd"
"""Its name in tables, where `dcpd` is the one that others are compared with."""
ONE_NODE: Final = "one node"
STORE: Final = "store"
"""The metadata store as a party of the network that can be cut."""


class ClusterError(Exception):
    """The cluster did not become what the benchmark needs."""


class Nodes(EmbeddedMembers):
    """Nodes with the embedded metadata store, which the first one owns. A context manager."""

    host: str = BEHIND
    """Where clients reach the nodes."""

    def __init__(self, folder: Path, names: str = "abc", *arguments: str) -> None:
        folder.mkdir(parents=True)
        super().__init__(folder, names, *arguments)

    def begin(self) -> None:
        """Start all nodes, and return when each has its share."""
        super().begin()
        self.settle(len(self.nodes))

    # -- what the nodes say ------------------------------------------------------------------------

    def epochs(self, name: str = "a") -> dict[int, int]:
        """Return the leader epoch of each partition."""
        return {row["vb"]: row["epoch"] for row in self.partition_map(name)}

    def versions(self) -> dict[int, int]:
        """Return the version (vb_uuid) of each partition."""

        async def ask() -> dict[int, int]:
            address = parse_address(self.nodes["a"].address)
            async with KvClient.connect(address, timeout_s=SETTLE_SECONDS) as kv:
                return {vb_id: (await kv.failover_log(vb_id))[0][0] for vb_id in range(1024)}

        return asyncio.run(ask())

    def coordinator(self) -> str:
        """Return the node that elects masters. Raises ClusterError if there is none."""
        found: list[str] = []

        def is_found() -> bool:
            name = self.status(self.running()[0]).get("coordinator")
            found.extend([name] if name else [])
            return bool(found)

        self.until(is_found)
        return found[-1]

    def masters_return_soon(self) -> None:
        """Let nodes get their masters back a second after they are in sync: rounds are short."""
        with suppress(ServerRefusedError):  # an older version waits for a minute
            self.ask_to("set", masters_return_s=1)

    def change(self, what: str, **body: Any) -> dict[str, Any]:
        """Change the cluster, and try again while it is refused: the cluster has just changed."""
        asked: dict[str, Any] = {}

        def is_taken() -> bool:
            with suppress(ServerRefusedError):
                asked.update(self.ask_to(what, **body))
            return bool(asked)

        self.until(is_taken)
        return asked

    def rebalance(self) -> float:
        """Spread copies and masters over all nodes; return how many seconds that took."""
        asked: dict[str, Any] = {}

        def is_planned() -> bool:
            asked.update(self.change("rebalance"))
            return bool(asked["is_plan"])

        self.until(is_planned)
        return self.until(lambda: self.have_moved(asked), WHILE_MOVING_SECONDS, MOVED_POLL_SECONDS)

    def settle(self, copies: int, name: str = "a", *, is_even: bool = True) -> None:
        """Return once all copies are in sync and each node is master of its share."""
        self.until(lambda: self.are_in_sync(min(copies, 3), name))
        if is_even:
            self.until(lambda: self.are_even(name))

    @staticmethod
    def until(
        is_so: Callable[[], bool],
        seconds: float = SETTLE_SECONDS,
        poll_seconds: float = POLL_SECONDS,
    ) -> float:
        """Return once something is so, and how long that took. Raises ClusterError."""
        began = time.monotonic()
        while not is_so():
            if time.monotonic() - began > seconds:
                raise ClusterError(f"it did not come to that within {seconds:.0f} s")
            time.sleep(poll_seconds)
        return time.monotonic() - began

    @property
    def ports(self) -> list[int]:
        """The key-value ports of all nodes."""
        return [node.port for node in self.nodes.values() if node.runs]

    def processor_ns(self) -> int:
        """Return the processor time of all nodes with their child processes."""
        return sum(processor_ns(node.pid) for node in self.nodes.values())

    # -- what happens to nodes ---------------------------------------------------------------------

    def freeze(self, name: str) -> None:
        """SIGSTOP, also for child processes."""
        for pid in descendants(self.nodes[name].pid):
            self.freeze_process(pid)


class NodesOnEtcd(Nodes):
    """Nodes with one member of etcd behind them, so any of them may die."""

    def __init__(self, folder: Path, names: str = "abc", *arguments: str) -> None:
        super().__init__(folder, names, *arguments)
        self._etcd = Etcd(folder / "etcd")

    def begin(self) -> None:
        """Start etcd and all nodes, and return when each has its share."""
        self._etcd.start()
        names = tuple(self.nodes)
        self._arguments += ("--cluster-meta", f"etcd://127.0.0.1:{self._etcd.port}")
        self.nodes.clear()
        for name in names:
            self.add(name)
        super().begin()

    def end(self) -> None:
        """Kill everything."""
        super().end()
        self._etcd.kill()


class NodesBehindCables(Nodes):
    """Nodes that are reached through the proxy of the fault tests, so that cables can be cut."""

    host = ADVERTISED

    def __init__(self, folder: Path, names: str = "abc", *arguments: str) -> None:
        self._network = Network()
        self._draw = random.Random()
        super().__init__(folder, names, "--advertise-host", ADVERTISED, *arguments)

    def begin(self) -> None:
        """Start the proxy and all nodes, and return when each has its share."""
        self._network.__enter__()
        for name, node in self.nodes.items():
            taken = self.ports
            node.port = free_port(self._draw, taken)
            self._network.serve(name, node.port)
            if name != "a":
                self._write_token(name)
            node.start()
            self._network.runs(name, node.pid)
        self.settle(len(self.nodes))

    def _write_token(self, name: str) -> None:
        """Let a node reach the metadata store through a door of its own."""
        token = ClusterToken.from_text(self.token.read_text())
        scheme, _, place = token.meta.rpartition(":")
        door = self._network.serve(STORE, 0, source=name, to_port=int(place))
        own = ClusterToken(cluster=token.cluster, meta=f"{scheme}:{door}", secret=token.secret)
        path = self.token_path(name)
        path.touch(mode=0o600)
        path.write_text(own.to_text())

    def token_path(self, name: str) -> Path:
        """Return the token with the door of this node."""
        return self.folder / f"{name}.token" if self.nodes else self.token

    def end(self) -> None:
        """Kill everything."""
        super().end()
        self._network.__exit__(None, None, None)

    def cut(self, name: str) -> None:
        """Let a node reach nobody: no node, no client, no metadata store."""
        for other in (*self.nodes, STORE, CLIENT):
            if other != name:
                self._network.cut(name, other)

    def heal(self) -> None:
        """Mend all cables. What was held arrives."""
        self._network.heal()


class Load:
    """The process of `benchmarks.cluster_load`."""

    def __init__(
        self,
        ports: list[int],
        *,
        rate: float,
        seconds: float = 36_000.0,
        host: str = BEHIND,
        without: int = 0,
        keys_per_partition: int = KEYS_PER_PARTITION,
    ) -> None:
        command = [
            sys.executable, "-m", "benchmarks.cluster_load", "--ports", ",".join(map(str, ports)),
            "--host", host, "--rate", str(rate), "--seconds", str(seconds),
            "--without", str(without), "--keys-per-partition", str(keys_per_partition),
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._read_so_far = b""

    def until_begun(self) -> None:
        """Return once it knows the map, and writes."""
        self.begin_mark(0)  # no master's port
        assert self.end_mark() == []

    def begin_mark(self, port: int, since_s: float | None = None) -> None:
        """Send a write to each partition of a node, whose time counts from `since_s` on (in
        seconds of `time.monotonic`; None: now).
        """
        self._tell(f"mark {port} {time.monotonic() if since_s is None else since_s:.6f}")

    def end_mark(self) -> list[float]:
        """Return, in milliseconds, how long it took until each of them was answered."""
        gaps: list[float] = self._read()["gaps_ms"]
        return gaps

    def split(self) -> dict[str, Any]:
        """Return the latencies of what was answered since the last split, or the beginning."""
        self._tell("split")
        window: dict[str, Any] = self._read()["window"]
        return window

    def stop(self) -> dict[str, Any]:
        """End the load; return what it has seen."""
        self._tell("stop")
        result: dict[str, Any] = self._read()["result"]
        self._process.wait()
        return result

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        """Return the next document. Raises ClusterError if none comes."""
        assert self._process.stdout is not None
        until_s = time.monotonic() + ANSWER_SECONDS
        while b"\n" not in self._read_so_far:
            left_s = max(until_s - time.monotonic(), 0)
            if not select.select([self._process.stdout], [], [], left_s)[0]:
                raise ClusterError("writes are not answered any more, or the load stands still")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise ClusterError("the load has ended")
            self._read_so_far += data
        line, _, self._read_so_far = self._read_so_far.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def loaded(
    nodes: Nodes,
    rate: float,
    without: str = "",
    keys_per_partition: int = KEYS_PER_PARTITION,
) -> Iterator[Load]:
    """Run a load while something happens. `without`: a node whose partitions are told apart."""
    port = nodes.nodes[without].port if without else 0
    load = Load(
        nodes.ports, rate=rate, host=nodes.host, without=port, keys_per_partition=keys_per_partition
    )
    try:
        load.until_begun()
        yield load
    finally:
        load.kill()


def processor_ns(pid: int) -> int:
    """Return the processor time of a process with its descendants, to the nanosecond."""
    total = 0
    for process in descendants(pid):
        for task in Path(f"/proc/{process}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total
