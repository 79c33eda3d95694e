"""The metadata store goes back to an older copy: nothing that was answered is lost, and nobody
answers by an older record. Three processes and a real etcd.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.errors import DcpdError
from clients.kv.client import KvClient
from support.cluster_processes import ClusterProcesses
from support.etcd_members import EtcdMembers
from support.waiting import until

pytestmark = pytest.mark.crash

DOCUMENTS = 200
TIMEOUT_S = 60.0


class Store:
    """An etcd of one member, whose folder is copied while it does not run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.etcd = EtcdMembers(folder)

    def save(self) -> None:
        self.etcd.kill(0)
        shutil.copytree(self._folder / "m0", self._folder / "saved")
        self.start()

    def stop(self) -> None:
        self.etcd.kill(0)

    def restore(self) -> None:
        shutil.rmtree(self._folder / "m0")
        shutil.copytree(self._folder / "saved", self._folder / "m0")

    def start(self) -> None:
        self.etcd.start(0)
        self.etcd.wait_until_ready(0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "etcd")
    yield store
    store.etcd.close()


@pytest.fixture
def nodes(tmp_path: Path, store: Store) -> Iterator[ClusterProcesses]:
    meta = ("--cluster-meta", f"etcd://{store.etcd.endpoints[0]}")
    with ClusterProcesses(tmp_path, "abc", *meta) as nodes:
        nodes.until_in_sync(3)
        yield nodes


def address(nodes: ClusterProcesses, names: str = "abc") -> str:
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
    return " ".join(f"{each['what']} {each['try']}" for each in status["problems"])


async def test_who_was_left_out_is_not_elected_by_an_older_copy(
    nodes: ClusterProcesses, store: Store
) -> None:
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
    until(lambda: nodes.status("c")["served_here"] == 0 and nodes.status("c")["unwritable"])
    status = nodes.status("c")
    assert "nobody is elected before" in str(status["unwritable"]), status["unwritable"]
    for name in "ab":
        nodes.nodes[name].start()
    until(lambda: "older than what node a, b have seen" in told(nodes.status("c")))
    assert "dcpctl cluster meta restore" in told(nodes.status("c"))
    print(nodes.status("c")["problems"], nodes.status("a")["unwritable"])
    async with KvClient.connect(address(nodes), timeout_s=2) as kv:
        assert not [each for each in await wrong(kv, dict(list(answered.items())[:5])) if b"NotFound" in each]


async def test_masters_that_go_on_stay_masters_beside_an_older_copy(
    nodes: ClusterProcesses, store: Store
) -> None:
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
    async with KvClient.connect(address(nodes, "ab"), timeout_s=TIMEOUT_S) as kv:
        assert await wrong(kv, answered) == []
    assert nodes.status("c")["served_here"] == 0
