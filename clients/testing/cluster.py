"""`DcpCluster`: nodes of a cluster as dcpd processes on free ports, with failovers as method calls.

    with DcpCluster() as cluster:
        consumer = start_mine(cluster.address)
        cluster.kill("n2")                   # returns when its partitions have other masters
        cluster.failover(17, lose=3)         # on all copies, with another master

A call returns when it has taken effect, or raises: ServerRefusedError if it was refused,
ClusterWaitError if its effect does not come. The metadata store is embedded in n1: while n1 is
down or paused, nobody is elected.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

from clients.address import parse_address
from clients.errors import DcpdError
from clients.kv.sync_client import SyncKv
from clients.testing.process import DcpServer, ServerRefusedError

WAIT_S: Final = 90.0
"""How long an effect is waited for: a start took 27 s on a machine with a load of 17."""
POLL_S: Final = 0.05
PAUSE_PER_LOOK: Final = 5
_T = TypeVar("_T")


class ClusterWaitError(DcpdError):
    """Something did not take effect in time. The text says what was waited for."""


class WrongArgumentError(DcpdError):
    """A call names no node or partition of the cluster, or a node in another state."""


class DcpCluster:
    """See the module. A context manager: `with` starts the nodes, and kills them at the end.

    `nodes` is how many, named n1, n2, ...; `copies` of each partition, at most as many. `data` is
    the folder of all; the default is a temporary one that is deleted at the end. `arguments` are
    passed to each dcpd. The nodes are in test mode.
    """

    def __init__(
        self, *arguments: str, nodes: int = 3, copies: int = 3, data: str | Path | None = None
    ) -> None:
        self._own_folder = Path(tempfile.mkdtemp(prefix="dcpd-")) if data is None else None
        self.data = self._own_folder or Path(str(data))
        self.copies = min(copies, nodes)
        token = self.data / "token"
        shared = (
            "--cluster-token-file", str(token), "--cluster-copies", str(self.copies),
            "--cluster-nodes", str(nodes), "--test-mode", "on", *arguments,
        )  # fmt: skip
        self.nodes = {
            name: DcpServer(
                self.data / name, "--cluster", "join" if number else "init",
                "--node-name", name, *shared,
            )
            for number, name in enumerate(f"n{number}" for number in range(1, nodes + 1))
        }  # fmt: skip
        """Name -> the node. Its own methods act on that process alone."""

    def __enter__(self) -> DcpCluster:
        """Start, and return when all copies are in sync."""
        with ExitStack() as undo:
            undo.callback(self.close)
            self.data.mkdir(parents=True, exist_ok=True)
            nodes = self.nodes.values()
            start_together([node.start for node in nodes], self._end_starts)
            self.wait_until_in_sync()
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill the nodes; remove the folder if it is a temporary one."""
        self.close()

    def close(self) -> None:
        """Kill the nodes, and remove the temporary folder."""
        for node in self.nodes.values():
            if node.runs:
                node.kill()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def _end_starts(self) -> None:
        for node in self.nodes.values():
            with suppress(AssertionError, ProcessLookupError):  # it has ended, or did not begin
                os.kill(node.pid, signal.SIGKILL)

    # -- what there is -----------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """HOST:PORT of a node that runs, for clients: they find the others by the map."""
        return self._any().address

    def connect(self) -> SyncKv:
        """Return a key-value client; a context manager."""
        return SyncKv(parse_address(self.address))

    def status(self) -> dict[str, Any]:
        """Return what a node knows of the cluster (docs/http-api.md, /api/v1/cluster/status)."""
        answer: dict[str, Any] = self._any().ask("GET", "/api/v1/cluster/status")
        return answer

    def masters(self) -> dict[int, str | None]:
        """Return partition -> the name of its master; None: it has none."""
        rows = self._any().ask("GET", "/api/v1/cluster/map")
        return {row["vb"]: row["master"] for row in rows}

    def master_of(self, vb: int) -> str:
        """Return the name of a partition's master when it serves the partition. Raises
        ClusterWaitError, WrongArgumentError.
        """
        return self._until(f"partition {vb} has a master that serves it", lambda: self._server(vb))

    def state(self) -> dict[str, Any]:
        """Return the nodes with their addresses, whether each runs, is paused or is down, and the
        master of each partition; null while no node answers.
        """
        try:
            masters: list[str | None] | None = list(self.masters().values())
        except (OSError, DcpdError):
            masters = None
        nodes = [
            {
                "name": name, "address": node.address, "admin": node.admin_url,
                "state": "paused" if node.runs and _is_stopped(node.pid) else
                "runs" if node.runs else "down",
            }
            for name, node in self.nodes.items()
        ]  # fmt: skip
        return {"nodes": nodes, "masters": masters}

    def wait_until_in_sync(self) -> None:
        """Return when all nodes that run take part, all copies that they can hold are in sync, and
        nothing moves. Raises ClusterWaitError.
        """
        self._until("the copies are in sync", self._is_in_sync)

    # -- nodes -------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Kill a node (SIGKILL); return when its partitions have other masters."""
        self._running(name).kill()
        self._until_others_serve(name)

    def pause(self, name: str) -> None:
        """Stop a node's process (SIGSTOP), as if its machine stood still; return when its
        partitions have other masters.
        """
        os.kill(self._running(name).pid, signal.SIGSTOP)
        self._until_others_serve(name)

    def resume(self, name: str) -> None:
        """Let a paused node go on (SIGCONT); return when its copies are in sync."""
        os.kill(self._running(name).pid, signal.SIGCONT)
        self.wait_until_in_sync()

    def restart(self, name: str) -> None:
        """Start a node again, and kill it before if it runs; return when its copies are in sync."""
        self._node(name).restart()
        self.wait_until_in_sync()

    def cut(self, a: str, b: str) -> None:
        """Cut two nodes off from each other, both ways; return when no copy on one of them is in
        sync with a master on the other. Neither is cut off from the metadata store. Until `heal`,
        `restart` and `resume` of any node wait in vain for all copies.
        """
        for name, other in ((a, b), (b, a)):
            self._node(other)
            self._running(name).ask("POST", "/api/v1/cluster/cut", {"node": other})
        pair = {a, b}
        self._until(
            f"the copies on {a} and {b} do without each other",
            lambda: all(
                row["master"] and not (row["master"] in pair and pair <= set(row["in_sync"]))
                for row in self._any().ask("GET", "/api/v1/cluster/map")
            ),
        )

    def heal(self) -> None:
        """End all cuts; return when all copies are in sync."""
        for node in self.nodes.values():
            if node.runs and not _is_stopped(node.pid):
                node.ask("POST", "/api/v1/cluster/heal", {})
        self.wait_until_in_sync()

    # -- partitions --------------------------------------------------------------------------------

    def branch(self, vb: int, at: int) -> dict[str, Any]:
        """Undo a partition's changes above seqno `at`, on all copies, and start a new version."""
        return self._of_partition(vb, "branch", {"at": at})

    def purge(self, vb: int, upto: int | None = None) -> dict[str, Any]:
        """Purge deletions up to a seqno (None: as far as possible), on all copies."""
        return self._of_partition(vb, "purge", {"upto": upto})

    def failover(self, vb: int, *, lose: int = 0) -> str:
        """Give a partition to another copy; return its name. `lose`: that one was so many answered
        changes behind, as after an unclean election. Without it, no version begins.
        """
        before = self.master_of(vb)
        self.nodes[before].ask("POST", "/api/v1/cluster/failover", {"vb": vb, "lose": lose})
        return self._until(
            f"partition {vb} has another master than {before}",
            lambda: "" if (now := self.masters()[vb]) in {before, None} else str(now),
        )

    def lose(self, vb: int, changes: int) -> str:
        """Lose the newest answered changes of a partition: `failover` with `lose`."""
        return self.failover(vb, lose=changes)

    def move(self, vb: int, to: str) -> None:
        """Make a node a partition's master, by a handover."""
        self._node(to)
        self.master_of(vb)
        self._any().ask("POST", "/api/v1/cluster/move", {"vb": vb, "to": to})
        self._until(
            f"{to} is master of partition {vb}, and the move has ended",
            lambda: self.masters()[vb] == to and not self.status()["plan"],
        )

    # -- how it is done ----------------------------------------------------------------------------

    def _server(self, vb: int) -> str:
        """Return who serves a partition; "" if nobody does yet: a new master waits for copies.
        Raises WrongArgumentError.
        """
        masters = self.masters()
        if masters and vb not in masters:
            raise WrongArgumentError(
                f"there is no partition {vb}", hint=f"Partitions are 0 to {len(masters) - 1}."
            )
        node = self.nodes.get(name := masters.get(vb) or "")
        if node is None or not node.runs or _is_stopped(node.pid):
            return ""
        return name if node.ask("GET", f"/api/v1/vbuckets/{vb}")["state"] == "active" else ""

    def _node(self, name: str) -> DcpServer:
        if name not in self.nodes:
            raise WrongArgumentError(
                f"there is no node {name!r}", hint=f"There are {', '.join(self.nodes)}."
            )
        return self.nodes[name]

    def _running(self, name: str) -> DcpServer:
        node = self._node(name)
        if not node.runs:
            raise WrongArgumentError(
                f"node {name} does not run", hint=f"Start it with restart({name!r})."
            )
        return node

    def _any(self) -> DcpServer:
        """Return a node that runs and is not paused."""
        for node in self.nodes.values():
            if node.runs and not _is_stopped(node.pid):
                return node
        raise ClusterWaitError("no node runs", hint="Start one with restart(name).")

    def _is_in_sync(self) -> bool:
        running = {name for name, node in self.nodes.items() if node.runs}
        status = self.status()
        alive = {node["name"] for node in status["nodes"] if node["is_alive"]}
        copies = str(min(self.copies, len(running)))
        is_level: bool = status["in_sync_sizes"] == {copies: status["partitions"]}
        return is_level and running <= alive and not status["plan"] and not status["without_master"]

    def _until_others_serve(self, name: str) -> None:
        if name != next(iter(self.nodes)):  # the metadata store is in the first one
            self._until(
                f"other nodes serve what {name} did",
                lambda: not {name, None} & set(self.masters().values()),
            )

    def _of_partition(self, vb: int, action: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask a partition's master; it may become another one meanwhile."""

        def ask() -> dict[str, Any]:
            node = self.nodes[self.master_of(vb)]
            answer: dict[str, Any] = node.ask("POST", f"/api/v1/vbuckets/{vb}/{action}", body)
            return {} if "location" in answer else answer

        return self._until(f"the master of partition {vb} is known", ask)

    def _until(self, what: str, look: Callable[[], _T]) -> _T:
        """Return what `look` returns as soon as that is something. Raises ClusterWaitError."""
        until_s = time.monotonic() + WAIT_S
        why = ""
        while (began_s := time.monotonic()) < until_s:
            try:
                if found := look():
                    return found
            except OSError as error:  # a node that has just died
                why = f": {error}"
            except ServerRefusedError as error:
                if error.status != 503:
                    raise
                why = f": {error}"
            # A look at 1,024 partitions costs a node 10 ms, which it has better uses for.
            time.sleep(max(POLL_S, PAUSE_PER_LOOK * (time.monotonic() - began_s)))
        raise ClusterWaitError(
            f"{what}: not within {WAIT_S:.0f} s{why}", hint=f"The logs are in {self.data}."
        )


def start_together(starts: Sequence[Callable[[], None]], end_all: Callable[[], None]) -> None:
    """Start nodes at the same time. If one does not start, end the others, which may wait for it,
    and raise what that one raised.
    """
    with ThreadPoolExecutor(len(starts)) as pool:
        running = [pool.submit(start) for start in starts]
        done, waiting = wait(running, return_when=FIRST_EXCEPTION)
        failed = next((error for each in done if (error := each.exception())), None)
        if waiting:
            end_all()
    if failed is not None:
        raise failed


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; False on a system without /proc."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in {"T", "t"}
