"""A node that becomes a member, and is interrupted: it is alone or a member afterwards, and a
repeated attempt works.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import urllib.request
from base64 import b64encode
from functools import partial
from pathlib import Path

import pytest

from clients.testing import DcpServer
from dcp.server.cluster.cluster_file import (
    ClusterFile,
    ClusterToken,
    proof_of,
    read_cluster_file,
    write_cluster_file,
)
from dcp.server.cluster.joining import becoming_member
from dcp.server.cluster.joining.becoming_member import NewMember, join_by_token
from dcp.server.cluster.joining.enrolment import (
    EnrolmentError,
    NewCluster,
    found_cluster,
    join_cluster,
)
from dcp.server.cluster.joining.process_facts import PROTOCOL
from dcp.server.cluster.meta_access import MetaAccess
from dcp.server.storage.folder import CLUSTER_FILE
from failover.coordinator.records import (
    AliveRecord,
    ClusterKeys,
    KeyKind,
    MemberRecord,
    encode_record,
)
from failover.metadata.keyring import Keyring
from failover.metadata.metastore import Put, Range, RangeResult, Txn
from failover.metadata.revision_store import RevisionStore
from memory.meta_store import MemoryMetaStore
from support.cluster_here import node_here
from support.memory_node import MemoryNode

TOKEN = ClusterToken(cluster="ab" * 16, meta="embedded://127.0.0.1:20001", secret="s" * 43)
PROOF = proof_of(TOKEN.cluster, TOKEN.secret)
join = partial(join_cluster, proof=PROOF)
ROOT = f"/dcpd/{TOKEN.cluster}/".encode()
KEYS = ClusterKeys(ROOT)
STOPPED_AT_THE_RESTART = """
import os, signal, sys
from dcp.server.node import Node
from dcp.server.main import main
restart_soon = Node._restart_soon
def soon(node):
    restart_soon(node)
    os.kill(os.getpid(), signal.SIGTERM)
Node._restart_soon = soon
main()
"""


class Store(MemoryMetaStore):
    """Answers at once."""

    def submit(self, request, done) -> None:  # type: ignore[no-untyped-def]
        super().submit(request, done)
        self.advance(0)

    def names(self) -> set[bytes]:
        found = self.store.apply(0, Range(ROOT, is_prefix=True))
        assert isinstance(found, RangeResult)
        names = (item.key.removeprefix(ROOT) for item in found.items)
        return {name for name in names if not name.startswith(b"partition/")}


def member(number: int, name: str, port: int = 0) -> MemberRecord:
    return MemberRecord(member=f"m{number}", address=f"127.0.0.1:{port or number}", name=name)


@pytest.fixture
async def store() -> Store:
    store = Store(RevisionStore())
    founder = MemoryNode(partitions=1024).engine
    first = member(1, "a")
    await found_cluster(store, ROOT, founder, first, NewCluster(2, None), b"{}", proof=PROOF)
    return store


async def test_what_a_failed_join_has_left_is_used_by_the_next_one(store: Store) -> None:
    engine = MemoryNode(partitions=1024).engine
    await join(store, ROOT, engine, member(2, "b", 21))  # cluster.json was not written
    await join(store, ROOT, engine, member(2, "c", 22))  # other ports, another name
    assert store.names() == {
        b"cluster", b"manifest", b"users", b"member/m1", b"name/a", b"member/m2", b"name/c",
        b"removed",
    }  # fmt: skip
    found = store.store.apply(0, Range(KEYS.of_member(KeyKind.MEMBER, "m2")))
    assert isinstance(found, RangeResult)
    assert b'"127.0.0.1:22"' in found.items[0].value


async def test_a_member_that_runs_or_has_copies_is_not_replaced(store: Store) -> None:
    engine = MemoryNode(partitions=1024).engine
    with pytest.raises(EnrolmentError, match="is there already"):
        await join(store, ROOT, engine, member(1, "b"))  # a copy of the first one's folder
    await join(store, ROOT, engine, member(2, "b"))
    alive = AliveRecord(member="m2", incarnation=1)
    key = KEYS.of_member(KeyKind.ALIVE, "m2")
    store.store.apply(0, Txn((), (Put(key, encode_record(alive)),)))
    with pytest.raises(EnrolmentError, match="is there already"):
        await join(store, ROOT, engine, member(2, "c"))


async def test_an_address_or_a_version_that_does_not_fit_is_told(store: Store) -> None:
    engine = MemoryNode(partitions=1024).engine
    alive = AliveRecord(member="m1", incarnation=1, name="a", protocol=PROTOCOL)
    for key in (KEYS.of_member(KeyKind.ALIVE, "m1"), KEYS.of_address("127.0.0.1:1")):
        store.store.apply(0, Txn((), (Put(key, encode_record(alive)),)))
    with pytest.raises(EnrolmentError, match=r"node a of this cluster has the address 127.0.0.1:1"):
        await join(store, ROOT, engine, member(2, "b", 1))
    other = AliveRecord(
        member="m1", incarnation=1, name="a", protocol=PROTOCOL + 1, oldest_protocol=PROTOCOL + 1
    )
    put = Put(KEYS.of_member(KeyKind.ALIVE, "m1"), encode_record(other))
    store.store.apply(0, Txn((), (put,)))
    with pytest.raises(EnrolmentError, match=r"node a speaks version .* of the replication"):
        await join(store, ROOT, engine, member(2, "b", 2))
    assert b"member/m2" not in store.names()


@pytest.fixture
def opens_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async def opened(content: ClusterFile, *_: object) -> MetaAccess:
        return MetaAccess(store, content.meta, Keyring(content.secrets), content.name)

    monkeypatch.setattr(becoming_member.MetaAccess, "open", opened)
    monkeypatch.setattr(becoming_member, "PATIENCE_LEASES", 0)  # nobody is alive in that store


@pytest.mark.usefixtures("opens_store")
async def test_a_join_that_cannot_write_its_file_leaves_nothing(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.names()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with node_here(tmp_path, {}) as node:
        newcomer: NewMember = node._newcomer()
        with monkeypatch.context() as patch:
            patch.setattr(becoming_member, "write_cluster_file", full)
            with pytest.raises(EnrolmentError, match=r"No space left.* has room"):
                await join_by_token(newcomer, TOKEN.to_text(), name="b")
        before |= {b"removed"}  # the revision of the map does not fall
        assert store.names() == before
        await join_by_token(newcomer, TOKEN.to_text(), name="b")
        assert read_cluster_file(node.about.data_dir) is not None
        assert store.names() == before | {b"name/b", f"member/{newcomer.member}".encode()}


@pytest.mark.usefixtures("opens_store")
async def test_file_that_is_there_in_spite_of_error_is_that_of_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node must not go on alone: the next start would give up what it takes until then."""

    def not_synced(data_dir: Path, content: ClusterFile) -> None:
        write_cluster_file(data_dir, content)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    unlink = Path.unlink

    def stays(path: Path, *, missing_ok: bool = False) -> None:
        if path.name == CLUSTER_FILE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path, missing_ok=missing_ok)

    async with node_here(tmp_path, {}) as node:
        with monkeypatch.context() as patch:
            patch.setattr(becoming_member, "write_cluster_file", not_synced)
            with pytest.raises(EnrolmentError, match="Input/output error"):
                await join_by_token(node._newcomer(), TOKEN.to_text(), name="b")
            assert read_cluster_file(node.about.data_dir) is None
            patch.setattr(Path, "unlink", stays)
            await join_by_token(node._newcomer(), TOKEN.to_text(), name="b")
        assert read_cluster_file(node.about.data_dir) is not None


def test_sigterm_before_restart_of_new_member_ends_process(tmp_path: Path) -> None:
    data = tmp_path / "data"
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED_AT_THE_RESTART, "--port", "0", "--admin-port", "0",
         "--data", str(data), "--print", "json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        request = urllib.request.Request(
            f"http://127.0.0.1:{ready['admin_port']}/api/v1/cluster/init",
            json.dumps({"copies": 1, "name": "a"}).encode(),
            {
                "authorization": f"Basic {b64encode(b'guest:guest').decode()}",
                "content-type": "application/json",
            },
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == 200
        _, told = process.communicate(timeout=60)
        assert process.returncode == 0, told
        assert "cut short" not in told
    finally:
        process.kill()
        process.communicate()
    assert read_cluster_file(data) is not None
    with DcpServer(data) as server:  # a member, after the next start
        assert server.ask("GET", "/api/v1/cluster/status")["node"] == "a"
