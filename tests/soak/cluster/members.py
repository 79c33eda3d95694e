"""Nodes of one cluster as processes: what tests, soaks and benchmarks do with all of them."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from clients.testing import DcpServer
from tests.soak.cluster.starving import Starving

STATUS: Final = "/api/v1/cluster/status"
Process = TypeVar("Process", bound=DcpServer)


class Members(Generic[Process]):
    """Nodes by their names. A context manager that leaves no process behind, frozen or not."""

    def __init__(self) -> None:
        self.nodes: dict[str, Process] = {}
        self._frozen: set[int] = set()
        self._starving: dict[int, Starving] = {}
        """By process."""

    # -- begin and end -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self.begin()
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

    def begin(self) -> None:
        """Start all nodes that there are."""
        for node in self.nodes.values():
            node.start()

    def end(self) -> None:
        """Kill all nodes."""
        self.thaw_all()
        for node in self.nodes.values():
            if node.runs:
                node.kill()

    def running(self) -> list[str]:
        """Return the nodes that run."""
        return [name for name, node in self.nodes.items() if node.runs]

    # -- freezing ----------------------------------------------------------------------------------

    def freeze_process(self, pid: int) -> None:
        """SIGSTOP."""
        os.kill(pid, signal.SIGSTOP)
        self._frozen.add(pid)

    def starve_process(self, pid: int) -> None:
        """Let a process run for a tenth of the time."""
        if pid not in self._starving:
            self._starving[pid] = Starving(pid)

    def thaw_process(self, pid: int) -> None:
        """SIGCONT, if the process is still there, for good."""
        self._frozen.discard(pid)
        if (starving := self._starving.pop(pid, None)) is not None:
            starving.end()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def thaw_all(self) -> None:
        """SIGCONT to all that were frozen or starved."""
        for pid in (*self._frozen, *self._starving):
            self.thaw_process(pid)

    # -- what nodes say ----------------------------------------------------------------------------

    def status(self, name: str = "a") -> dict[str, Any]:
        """Return what a node knows of the cluster. Raises OSError, ServerRefusedError."""
        found: dict[str, Any] = self.nodes[name].ask("GET", STATUS)
        return found

    def partition_map(self, name: str = "a") -> list[dict[str, Any]]:
        """Return the record of each partition, as a node knows it."""
        found: list[dict[str, Any]] = self.nodes[name].ask("GET", "/api/v1/cluster/map")
        return found

    def masters(self, name: str = "a") -> dict[str, int]:
        """Return how many partitions each node is master of, as a node knows it."""
        return {node["name"]: node["masters"] for node in self.status(name).get("nodes", [])}

    def alive(self, name: str = "a") -> set[str]:
        """Return the members that run, as a node sees them."""
        return {node["name"] for node in self.status(name)["nodes"] if node["is_alive"]}

    def ask_to(self, change: str, **body: Any) -> dict[str, Any]:
        """Ask for a change of the cluster. Raises ServerRefusedError, OSError."""
        found: dict[str, Any] = self.nodes[self.running()[0]].ask(
            "POST", f"/api/v1/cluster/{change}", body
        )
        return found

    def have_moved(self, asked: dict[str, Any]) -> bool:
        """Whether the moves of a change that was asked for are over."""
        status = self.status(self.running()[0])
        return bool(
            status and status["store"]["revision"] >= asked["revision"] and status["plan"] is None
        )

    def are_in_sync(self, copies: int, name: str = "a") -> bool:
        """Whether a node knows that each partition has so many copies in sync, and a master."""
        status = self.status(name)
        is_so = status and status["in_sync_sizes"] == {str(copies): status["partitions"]}
        return bool(is_so) and not status.get("without_master")

    def are_even(self, name: str = "a") -> bool:
        """Whether each node that runs is master of its share, and nothing moves."""
        names, status = self.running(), self.status(name)
        masters = {node["name"]: node["masters"] for node in status.get("nodes", [])}
        share = status.get("partitions", 0) // len(names) - len(names)
        return all(masters.get(each, 0) >= share for each in names) and status["plan"] is None


class EmbeddedMembers(Members[DcpServer]):
    """Nodes with the embedded metadata store, which the first one owns."""

    def __init__(self, folder: Path, names: str, *arguments: str) -> None:
        super().__init__()
        self.folder = folder
        self.token = folder / "token"
        self._arguments = arguments
        for name in names:
            self.add(name)

    def add(self, name: str) -> DcpServer:
        """Make one more node, which is not started."""
        way = "join" if self.nodes else "init"
        self.nodes[name] = DcpServer(
            self.folder / name, "--cluster", way, "--node-name", name,
            "--cluster-token-file", str(self.token_path(name)), *self._arguments,
        )  # fmt: skip
        return self.nodes[name]

    def token_path(self, name: str) -> Path:
        """Return which file has the token for a node."""
        return self.token
