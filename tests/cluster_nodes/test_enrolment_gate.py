"""A node that is becoming a member takes no changes, until that failed or it has restarted."""

from __future__ import annotations

import asyncio
import contextlib
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from http.client import HTTPConnection
from pathlib import Path

import pytest

from dcp.server.access.users_file import UsersHeldError
from dcp.server.cluster.cluster_file import ClusterFile, ClusterToken, proof_of
from dcp.server.cluster.joining import becoming_member, enrolment
from dcp.server.cluster.joining.enrolment import REFUSAL, EnrolmentError, NewCluster, found_cluster
from dcp.server.cluster.meta_access import MetaAccess
from dcp.server.node import Node
from dcp.server.operate.cluster_reports import InitAnswer, InitRequest, JoinAnswer, JoinRequest
from dcp.server.operate.collection_changes import CollectionsRefusedError
from dcp.server.storage.folder import CLUSTER_FILE
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.coordinator.records import MemberRecord
from failover.metadata.keyring import Keyring
from failover.metadata.metastore import StoreRequest, StoreResult
from failover.metadata.revision_store import RevisionStore
from support.cluster_here import Client, node_here
from support.memory_node import MemoryNode
from vbucket.engine.loading.loads import LoadTicket

TOKEN = ClusterToken(cluster="ab" * 16, meta="embedded://127.0.0.1:20001", secret="s" * 43)
MEMBER = MemberRecord(member="m1", address="127.0.0.1:1", name="first")
SET = pack_request(Opcode.SET, key=b"k", value=b"v", extras=bytes(8))


class StandingStore:
    """Answers nothing until it is let go on, and then everything."""

    def __init__(self) -> None:
        self.store = RevisionStore()
        self.is_asked = asyncio.Event()
        self._may_answer = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def submit(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        self.is_asked.set()
        self._tasks.append(asyncio.ensure_future(self._answer(request, done)))

    async def _answer(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        await self._may_answer.wait()
        done(self.store.apply(0, request))

    def go_on(self) -> None:
        self._may_answer.set()

    def stand_still(self) -> None:
        self._may_answer.clear()
        self.is_asked.clear()

    def watch(self, *_: object) -> None:
        raise AssertionError("nobody watches")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def enrolling_node(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Node, StandingStore]]:
    store = StandingStore()

    async def opened(content: ClusterFile, *_: object) -> MetaAccess:
        return MetaAccess(store, content.meta, Keyring(content.secrets), content.name)

    monkeypatch.setattr(becoming_member.MetaAccess, "open", opened)
    async with node_here(folder, {}) as node:
        yield node, store
        await store.close()


def join(node: Node) -> Awaitable[JoinAnswer]:
    return node._cluster_operations().join(JoinRequest(token=TOKEN.to_text(), name="b"))


def init(node: Node) -> Awaitable[InitAnswer]:
    return node._cluster_operations().init(InitRequest(copies=1, meta=TOKEN.meta, name="a"))


def add_user_over_http(port: int) -> tuple[int, str]:
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        guest = b64encode(b"guest:guest").decode()
        headers = {"authorization": f"Basic {guest}", "content-type": "application/json"}
        body = json.dumps({"name": "ada", "password": "lovelace"})
        connection.request("POST", "/api/v1/users", body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())["error"]["why"]


async def check_nothing_changes(node: Node) -> None:
    async with Client.connect(node) as client:
        answer = await client.ask(SET)
        assert answer.status == Status.ETMPFAIL
        assert b"becoming a member" in answer.value
        flush = await client.ask(pack_request(Opcode.FLUSH))
        assert flush.status == Status.ETMPFAIL
    collections = node.serving.listeners._admin_parts.collections
    with pytest.raises(CollectionsRefusedError, match="becoming a member") as refused:
        await collections.create_scope("s")
    assert refused.value.status == 503
    with pytest.raises(UsersHeldError, match="becoming a member"):
        await asyncio.to_thread(node._users.add, "ada", "lovelace")
    status, why = await asyncio.to_thread(add_user_over_http, node.ports.admin)
    assert (status, why) == (503, REFUSAL)
    assert node.health.refusal_kind == "enrolling"
    for other in (join, init):
        with pytest.raises(EnrolmentError, match="becoming a member already"):
            await other(node)


@pytest.mark.parametrize("enrol", [join, init])
async def test_a_failed_enrolment_refuses_changes_only_until_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enrol: Callable[[Node], Awaitable[object]]
) -> None:
    async with enrolling_node(tmp_path, monkeypatch) as (node, store):
        monkeypatch.setattr(enrolment, "ANSWER_S", 60.0)
        enrolling = asyncio.ensure_future(enrol(node))
        await store.is_asked.wait()
        await check_nothing_changes(node)
        enrolling.cancel()  # the operator's command went away
        with pytest.raises(asyncio.CancelledError):
            await enrolling
        assert not node.health.write_refusal
        monkeypatch.setattr(enrolment, "ANSWER_S", 0.0)
        with pytest.raises(EnrolmentError, match="did not answer"):
            await enrol(node)
        assert not (node.about.data_dir / CLUSTER_FILE).exists()
        async with Client.connect(node) as client:
            assert (await client.ask(SET)).status == Status.OK
        await node.serving.listeners._admin_parts.collections.create_scope("s")
        await asyncio.to_thread(node._users.add, "ada", "lovelace")


@pytest.mark.parametrize("enrol", [join, init])
async def test_changes_are_refused_until_the_restart_of_a_new_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enrol: Callable[[Node], Awaitable[object]]
) -> None:
    monkeypatch.setattr(enrolment, "ANSWER_S", 60.0)
    async with enrolling_node(tmp_path, monkeypatch) as (node, store):
        if enrol is join:
            store.go_on()
            founder, wanted = MemoryNode(partitions=1024).engine, NewCluster(1, None)
            root = f"/dcpd/{TOKEN.cluster}/".encode()
            proof = proof_of(TOKEN.cluster, TOKEN.secret)
            await found_cluster(store, root, founder, MEMBER, wanted, b"{}", proof=proof)
            store.stand_still()
        restarts = asyncio.Event()
        monkeypatch.setattr(node, "_restart_soon", restarts.set)
        enrolling = asyncio.ensure_future(enrol(node))
        await store.is_asked.wait()
        await check_nothing_changes(node)
        store.go_on()
        await enrolling
        assert restarts.is_set()
        assert (node.about.data_dir / CLUSTER_FILE).exists()
        async with Client.connect(node) as client:
            assert (await client.ask(SET)).status == Status.ETMPFAIL
        with pytest.raises(UsersHeldError):
            await asyncio.to_thread(node._users.add, "ada", "lovelace")
        with pytest.raises(EnrolmentError, match="member already"):
            await enrol(node)


async def test_document_that_was_applied_is_counted_and_on_disk_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with enrolling_node(tmp_path, monkeypatch) as (node, store):
        node.engine.begin_batch(1 << 40)
        node.engine.store(0, 7, b"\0k", b"\0kv", 0, 0, 0, 0)  # no kick: the group stays open
        part = node.engine.partitions[7]
        assert part.synced_seqno < part.high_seqno
        with pytest.raises(EnrolmentError, match="holds 1 document"):
            await join(node)
        assert part.synced_seqno == part.high_seqno
        assert not store.is_asked.is_set()


@pytest.mark.parametrize("enrol", [join, init])
async def test_no_node_becomes_member_while_restore_loads_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enrol: Callable[[Node], Awaitable[object]]
) -> None:
    async with enrolling_node(tmp_path, monkeypatch) as (node, store):
        loads = node.engine.loads
        assert loads.takes(7, 1 << 40)
        loads.on_work = lambda: None
        loads.add(7, LoadTicket(1, b"packet", b"", lambda: (b"", 0)))
        with pytest.raises(EnrolmentError, match="of a restore are being loaded"):
            await enrol(node)
        assert not store.is_asked.is_set()
        assert not node.health.write_refusal
        loads.refuse_all()
        assert loads.apply_next()
