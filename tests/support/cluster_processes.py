"""A cluster of real dcpd processes on loopback, with the embedded metadata store."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Any

from clients.testing import DcpServer, ServerRefusedError
from support.waiting import until


class ClusterProcesses:
    """See the module. The first node owns the metadata store. A context manager."""

    def __init__(self, folder: Path, names: str = "abc", *arguments: str) -> None:
        self.token = folder / "token"
        self._folder = folder
        self._arguments = arguments
        self.nodes: dict[str, DcpServer] = {}
        for name in names:
            self._add(name)
        self._frozen: set[str] = set()

    def __enter__(self) -> ClusterProcesses:
        try:
            for node in self.nodes.values():
                node.start()
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
        for name in tuple(self._frozen):
            self.thaw(name)
        for node in self.nodes.values():
            if node._process is not None:
                node.kill()

    def _add(self, name: str) -> DcpServer:
        node = self.nodes[name] = DcpServer(
            self._folder / name, "--cluster", "join" if self.nodes else "init", "--node-name", name,
            "--cluster-token-file", str(self.token), *self._arguments,
        )  # fmt: skip
        return node

    def join(self, name: str) -> None:
        """Start one more node, and return once it is a member that runs."""
        self._add(name).start()
        until(lambda: name in self.alive())

    def rebalance(self, name: str = "a") -> None:
        """Spread copies and masters evenly, and return once that is done."""
        until(lambda: self._has_plan(name))
        until(lambda: self.status(name)["plan"] is None)
        self.until_even(name)

    def _has_plan(self, name: str) -> bool:
        """Ask for a rebalance. False: it is refused, because the cluster has just changed."""
        try:
            asked = self.nodes[name].ask("POST", "/api/v1/cluster/rebalance", {})
        except ServerRefusedError:
            return False
        assert asked["is_plan"], asked
        return True

    def alive(self, name: str = "a") -> set[str]:
        """Return the members that run, as a node sees them."""
        return {node["name"] for node in self.status(name)["nodes"] if node["is_alive"]}

    def status(self, name: str = "a") -> dict[str, Any]:
        found: dict[str, Any] = self.nodes[name].ask("GET", "/api/v1/cluster/status")
        return found

    def masters(self, name: str = "a") -> dict[str, int]:
        return {node["name"]: node["masters"] for node in self.status(name)["nodes"]}

    def until_in_sync(self, copies: int, name: str = "a") -> None:
        until(lambda: self.status(name)["in_sync_sizes"] == {str(copies): 1024})

    def until_even(self, name: str = "a") -> None:
        """Return once each node is master of its share."""
        share = 1024 // len(self.nodes)
        until(lambda: all(count >= share - 2 for count in self.masters(name).values()))

    def until_no_master(self, of: str, name: str = "a") -> None:
        """Return once a node is master of nothing."""
        until(lambda: self.masters(name)[of] == 0)

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self._frozen.add(name)
        os.kill(self.nodes[name].pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        self._frozen.discard(name)
        os.kill(self.nodes[name].pid, signal.SIGCONT)

    async def in_thread(self, ask: Any, *arguments: Any) -> Any:
        """Run something that waits for the processes beside the event loop."""
        return await asyncio.to_thread(ask, *arguments)
