"""A cluster of real dcpd processes on loopback, with the embedded metadata store."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from clients.testing import ServerRefusedError
from support.cluster_here import PARTITIONS
from support.waiting import until
from tests.soak.cluster.members import EmbeddedMembers


class ClusterProcesses(EmbeddedMembers):
    """See the module. The first node owns the metadata store. A context manager."""

    def __init__(
        self, folder: Path, names: str = "abc", *arguments: str, partitions: int = PARTITIONS
    ) -> None:
        super().__init__(folder, names, "--partitions", str(partitions), *arguments)

    def start_all(self) -> None:
        """Start all nodes that do not run."""
        for node in self.nodes.values():
            if not node.runs:
                node.start()

    def join(self, name: str) -> None:
        """Start one more node, and return once it is a member that runs."""
        self.add(name).start()
        until(lambda: name in self.alive())

    def rebalance(self, name: str = "a") -> None:
        """Spread copies and masters evenly, and return once that is done."""
        asked = self.insist("rebalance")
        assert asked["is_plan"], asked
        until(lambda: self.have_moved(asked))
        self.until_even(name)

    def insist(self, change: str, **body: Any) -> dict[str, Any]:
        """Ask for a change, and ask again while it is refused: the cluster has just changed."""
        asked: dict[str, Any] = {}

        def is_taken() -> bool:
            with contextlib.suppress(ServerRefusedError):
                asked.update(self.ask_to(change, **body))
            return bool(asked)

        until(is_taken)
        return asked

    def until_in_sync(self, copies: int, name: str = "a") -> None:
        """Return once each partition has so many copies in sync."""
        until(lambda: self.are_in_sync(copies, name))

    def until_even(self, name: str = "a") -> None:
        """Return once each node is master of its share."""
        until(lambda: self.are_even(name))

    def until_no_master(self, of: str, name: str = "a") -> None:
        """Return once a node is master of nothing."""
        until(lambda: self.masters(name)[of] == 0)

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self.freeze_process(self.nodes[name].pid)

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        self.thaw_process(self.nodes[name].pid)

    async def in_thread(self, ask: Any, *arguments: Any) -> Any:
        """Run something that waits for the processes beside the event loop."""
        return await asyncio.to_thread(ask, *arguments)
