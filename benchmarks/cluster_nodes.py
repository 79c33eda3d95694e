"""Nodes of a cluster as processes, and a load on them, for `benchmarks.cluster`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from benchmarks.peers import descendants
from clients.testing import DcpServer, ServerRefusedError

SETTLE_SECONDS: Final = 120.0
"""A busy machine starts three nodes within 20 s."""
POLL_SECONDS: Final = 0.05
STATUS: Final = "/api/v1/cluster/status"


class ClusterError(Exception):
    """The cluster did not become what the benchmark needs."""


class Nodes:
    """Nodes with the embedded metadata store, which the first one owns. A context manager."""

    def __init__(self, folder: Path, names: str = "abc", *arguments: str) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._arguments = arguments
        self.nodes: dict[str, DcpServer] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> DcpServer:
        """Make one more node, which is not started."""
        way = "join" if self.nodes else "init"
        self.nodes[name] = DcpServer(
            self._folder / name, "--cluster", way, "--node-name", name,
            "--cluster-token-file", str(self._folder / "token"), *self._arguments,
        )  # fmt: skip
        return self.nodes[name]

    def __enter__(self) -> Nodes:
        try:
            for node in self.nodes.values():
                node.start()
            self.settle(len(self.nodes))
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Kill all nodes, also those that stand still."""
        for node in self.nodes.values():
            if node.runs:
                node.kill()

    # -- what the nodes say ------------------------------------------------------------------------

    def status(self, name: str = "a") -> dict[str, Any]:
        """Return the state of the cluster as a node knows it."""
        found: dict[str, Any] = self.nodes[name].ask("GET", STATUS)
        return found

    def masters(self, name: str = "a") -> dict[str, int]:
        """Return how many partitions each node is master of."""
        return {node["name"]: node["masters"] for node in self.status(name)["nodes"]}

    def epochs(self, name: str = "a") -> dict[int, int]:
        """Return the leader epoch of each partition."""
        rows = self.nodes[name].ask("GET", "/api/v1/cluster/map")
        return {row["vb"]: row["epoch"] for row in rows}

    def masters_return_soon(self) -> None:
        """Let nodes get their masters back a second after they are in sync: rounds are short."""
        with suppress(ServerRefusedError):  # an older version waits for a minute
            self.nodes["a"].ask("POST", "/api/v1/cluster/set", {"masters_return_s": 1})

    def rebalance(self) -> bool:
        """Spread copies and masters over all nodes; False: this version cannot."""
        try:
            self.nodes["a"].ask("POST", "/api/v1/cluster/rebalance", {})
        except ServerRefusedError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return False
            raise
        return True

    def settle(self, copies: int, name: str = "a", *, is_even: bool = True) -> None:
        """Return once all copies are in sync and each node is master of its share."""
        self.until(lambda: self.status(name)["in_sync_sizes"] == {str(min(copies, 3)): 1024})
        if not is_even:
            return
        share = 1024 // len(self.nodes)
        self.until(lambda: all(count >= share - 2 for count in self.masters(name).values()))

    @staticmethod
    def until(is_so: Callable[[], bool], seconds: float = SETTLE_SECONDS) -> float:
        """Return once something is so, and how long that took. Raises ClusterError."""
        began = time.monotonic()
        while not is_so():
            if time.monotonic() - began > seconds:
                raise ClusterError(f"it did not come to that within {seconds:.0f} s")
            time.sleep(POLL_SECONDS)
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
            os.kill(pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        for pid in descendants(self.nodes[name].pid):
            os.kill(pid, signal.SIGCONT)


class Load:
    """The process of `benchmarks.cluster_load`."""

    def __init__(
        self, ports: list[int], *, rate: float, seconds: float = 3600.0, without: int = 0
    ) -> None:
        command = [
            sys.executable, "-m", "benchmarks.cluster_load", "--ports", ",".join(map(str, ports)),
            "--rate", str(rate), "--seconds", str(seconds), "--without", str(without),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin_mark(self, port: int) -> None:
        """Send a write to each partition of a node, from this moment on."""
        self._tell(f"mark {port}")

    def end_mark(self) -> list[float]:
        """Return, in milliseconds, how long it took until each of them was answered."""
        gaps: list[float] = self._read()["gaps_ms"]
        return gaps

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
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ClusterError("the load has ended")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def loaded(nodes: Nodes, rate: float, without: str = "") -> Iterator[Load]:
    """Run a load while something happens. `without`: a node whose partitions are told apart."""
    port = nodes.nodes[without].port if without else 0
    load = Load(nodes.ports, rate=rate, without=port)
    try:
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
