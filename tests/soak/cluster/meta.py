"""python -m tests.soak.cluster.meta: the metadata store goes back to an older copy, or is emptied.

Three nodes as processes and a real etcd. Each part ends with every answered document there, but for
what a person has given up: that is in receipts. Exit code 0 only if all of it is so. The tests play
the same parts.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clients.errors import DcpdError
from clients.kv.client import KvClient
from support.cluster_here import PARTITIONS
from support.etcd_members import EtcdMembers
from support.server import ClusterProcesses
from support.waiting import until

DOCUMENTS: Final = 200
TIMEOUT_S: Final = 60.0


class SavedStore:
    """An etcd of one member, whose folder is copied while it does not run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.etcd = EtcdMembers(folder)

    def save(self) -> None:
        """Save a copy."""
        self.etcd.kill(0)
        shutil.copytree(self._folder / "m0", self._folder / "saved")
        self.start()

    def stop(self) -> None:
        """Stop etcd."""
        self.etcd.kill(0)

    def restore(self) -> None:
        """Put the copy back; etcd does not run."""
        shutil.rmtree(self._folder / "m0")
        shutil.copytree(self._folder / "saved", self._folder / "m0")

    def empty(self) -> None:
        """Remove all of it; etcd does not run."""
        shutil.rmtree(self._folder / "m0")

    def start(self) -> None:
        """Start etcd."""
        self.etcd.start(0)
        self.etcd.wait_until_ready(0)


def address(nodes: ClusterProcesses, names: str = "abc") -> str:
    """Return where clients reach these nodes."""
    return "dcpd://" + ",".join(nodes.nodes[name].address for name in names)


async def write(nodes: ClusterProcesses, names: str, prefix: str) -> dict[bytes, bytes]:
    """Write documents with durability; return what was answered."""
    answered: dict[bytes, bytes] = {}
    async with KvClient.connect(address(nodes, names), timeout_s=TIMEOUT_S) as kv:
        for number in range(DOCUMENTS):
            key, value = f"{prefix}{number}".encode(), f"v{number}".encode()
            await kv.set(key, value, durability="majority")
            answered[key] = value
    return answered


async def wrong(kv: KvClient, answered: dict[bytes, bytes]) -> list[bytes]:
    """Return which documents are answered otherwise than they were written."""
    found = []
    for key, value in answered.items():
        try:
            got = (await kv.get(key)).value
        except DcpdError as error:
            got = repr(error).encode()
        if got != value:
            found.append(key + b": " + got[:80])
    return found


def told(status: dict[str, Any]) -> str:
    """Return all problems of a status in one text."""
    return " ".join(f"{each['what']} {each['try']}" for each in status["problems"])


def run_restore(nodes: ClusterProcesses, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `dcpctl cluster meta restore` on a node that runs."""
    node = nodes.nodes[nodes.running()[0]]
    command = [sys.executable, "-m", "clients.cli", "--server", node.address]
    return subprocess.run(
        [*command, "cluster", "meta", "restore", *options],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def meta_restore(nodes: ClusterProcesses, *options: str, code: int = 0) -> str:
    """Run it; return what it says."""
    done = run_restore(nodes, *options)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


async def all_right(nodes: ClusterProcesses, answered: dict[bytes, bytes]) -> None:
    """Everything is in sync, and everything that was answered is there."""
    await nodes.in_thread(nodes.until_in_sync, 3, nodes.running()[0])
    async with KvClient.connect(address(nodes), timeout_s=TIMEOUT_S) as kv:
        assert await wrong(kv, answered) == []


async def an_older_copy(nodes: ClusterProcesses, store: SavedStore) -> None:
    """Who was left out is not elected by an older copy, and nothing is lost after a restoration."""
    store.save()
    nodes.until_in_sync(3)
    nodes.nodes["c"].kill()
    until(lambda: nodes.are_in_sync(2))
    answered = await write(nodes, "ab", "k")
    for name in "ab":
        nodes.nodes[name].kill()
    store.stop()
    store.restore()
    store.start()
    nodes.nodes["c"].start()
    until(lambda: "nobody is elected before" in str(nodes.status("c")["unwritable"]))
    assert nodes.status("c")["served_here"] == 0
    preview = meta_restore(nodes, "--dry-run", code=8)
    assert "node a does not answer" in preview
    assert f"{PARTITIONS} partitions whose newest copies are missing stay as they are" in preview
    for name in "ab":
        nodes.nodes[name].start()
    # c, too, has seen something newer, if preferred masters took over after the copy was saved
    until(lambda: re.search("older than what node a, b(, c)? have seen", told(nodes.status("c"))))
    assert "dcpctl cluster meta restore" in told(nodes.status("c"))
    assert nodes.status("c")["served_here"] == 0
    until(lambda: all(older(nodes, name) == PARTITIONS for name in "ab"))
    assert not is_ready(nodes, "a"), "it serves nothing"
    assert nodes.status("a")["store"]["older_since_ms"] > 0
    assert "This node knows it since" in told(nodes.status("a"))
    assert f"{PARTITIONS} partitions get a new record, and nothing is lost" in meta_restore(
        nodes, "--yes"
    )
    await all_right(nodes, answered)
    until(lambda: all(older(nodes, name) == 0 and is_ready(nodes, name) for name in "abc"))
    assert nodes.status("a")["store"]["older_since_ms"] is None
    assert not [each for name in "abc" for each in receipts(nodes, name)]
    until(lambda: "nothing to do" in meta_restore(nodes, "--dry-run"))


async def masters_that_go_on(nodes: ClusterProcesses, store: SavedStore) -> None:
    """Masters that run stay masters beside an older copy."""
    store.save()
    nodes.until_in_sync(3)
    nodes.nodes["c"].kill()
    until(lambda: nodes.are_in_sync(2))
    answered = await write(nodes, "ab", "k")
    store.stop()
    store.restore()
    store.start()
    nodes.nodes["c"].start()
    until(lambda: "older than what node" in told(nodes.status("c")))
    answered |= await write(nodes, "ab", "later")
    until(lambda: older(nodes, "a") > 0)
    assert is_ready(nodes, "a"), "what it masters is answered"
    async with KvClient.connect(address(nodes, "ab"), timeout_s=TIMEOUT_S) as kv:
        assert await wrong(kv, answered) == []
    assert nodes.status("c")["served_here"] == 0
    meta_restore(nodes, "--yes")
    await all_right(nodes, answered)


async def an_empty_store(nodes: ClusterProcesses, store: SavedStore) -> None:
    """An empty store is filled from what the nodes have."""
    answered = await write(nodes, "abc", "k")
    for name in "bc":
        nodes.nodes[name].kill()
    store.stop()
    store.empty()
    store.start()
    for name in "bc":
        nodes.nodes[name].start()
    until(lambda: "has lost all records" in told(nodes.status("a")))
    until(lambda: "has lost all records" in told(nodes.status("b")))
    meta_restore(nodes, "--yes")
    await all_right(nodes, answered)


async def a_loss_that_a_person_accepts(nodes: ClusterProcesses, store: SavedStore) -> None:
    """What a person gives up is in receipts."""
    first = await write(nodes, "abc", "first")
    store.save()
    nodes.until_in_sync(3)
    nodes.nodes["c"].kill()
    until(lambda: nodes.are_in_sync(2))
    await write(nodes, "ab", "second")
    for name in "ab":
        nodes.nodes[name].kill()
    store.stop()
    store.restore()
    store.start()
    nodes.nodes["c"].start()
    until(lambda: "nobody is elected before" in str(nodes.status("c")["unwritable"]))
    said = meta_restore(nodes, "--accept-loss", "--yes")
    assert "are given up, so changes that were answered may be lost" in said
    until(lambda: nodes.status("c")["served_here"] == PARTITIONS)
    async with KvClient.connect(address(nodes, "c"), timeout_s=TIMEOUT_S) as kv:
        assert await wrong(kv, first) == []
    until(lambda: {each["vb"] for each in receipts(nodes, "c")} == set(range(PARTITIONS)))
    for name in "ab":
        nodes.nodes[name].start()
    until(lambda: any(each["kind"] != "election" for each in receipts(nodes, "a")))


def older(nodes: ClusterProcesses, name: str) -> float:
    """Return of how many partitions a node says that the store is older than what was seen."""
    return nodes.nodes[name].metrics()["dcpd_metadata_store_older_vbuckets"]


def is_ready(nodes: ClusterProcesses, name: str) -> bool:
    """Return what /readyz says."""
    connection = HTTPConnection("127.0.0.1", nodes.nodes[name].admin_port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    assert answer.status == 200 or b"metadata_store_older" in text, text
    return answer.status == 200


def receipts(nodes: ClusterProcesses, name: str) -> list[dict[str, Any]]:
    """Return the loss receipts of a node."""
    found: list[dict[str, Any]] = nodes.nodes[name].ask("GET", "/api/v1/cluster/receipts")[
        "receipts"
    ]
    return found


Part = Callable[[ClusterProcesses, SavedStore], Awaitable[None]]
PARTS: Final[tuple[Part, ...]] = (
    an_older_copy,
    masters_that_go_on,
    an_empty_store,
    a_loss_that_a_person_accepts,
)


def play(part: Part, folder: Path) -> None:
    """Play a part. Raises AssertionError if something is lost without a word."""
    store = SavedStore(folder / "etcd")
    try:
        meta = ("--cluster-meta", f"etcd://{store.etcd.endpoints[0]}")
        with ClusterProcesses(folder, "abc", *meta) as nodes:
            nodes.until_in_sync(3)
            asyncio.run(part(nodes, store))  # type: ignore[arg-type]
    finally:
        store.etcd.close()


def main() -> int:
    """Play all parts, one after the other; return the exit code."""
    for part in PARTS:
        with tempfile.TemporaryDirectory() as folder:
            play(part, Path(folder))
        print(f"{part.__doc__}", flush=True)  # type: ignore[attr-defined]
    print("nothing was lost that nobody gave up")
    return 0


if __name__ == "__main__":
    sys.exit(main())
