"""Users and collections of two nodes: changes at once, lost answers, and a store that is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path

import pytest
import pytest_asyncio

from dcp.server.access.users import LEAST_RIGHTS, Users
from dcp.server.access.users_file import UsersFileError
from dcp.server.cluster import shared_records
from dcp.server.operate.collection_changes import Collections, CollectionsRefusedError
from dcp.session.access.rights import Role
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.coordinator.records import ClusterKeys, ManifestRecord, encode_record
from failover.metadata.metastore import OutcomeUnknown, Put, StoreRequest, StoreResult, Txn
from support.cluster_here import CLUSTER, PARTITIONS, Client, ClusterHere, LoopClient, plain
from support.waiting import until_so
from vbucket.engine.partition import VbState
from vbucket.model.manifest import INITIAL_MANIFEST

KEYS = ClusterKeys(f"/dcpd/{CLUSTER}/".encode())
SOON_S = 2.0
"""Below the 5 s after which a table that could not be taken over is tried again."""
pytestmark = pytest.mark.asyncio(loop_scope="module")
Submit = Callable[[StoreRequest, Callable[[StoreResult], None]], None]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ClusterHere]:
    """Two nodes of one cluster, which the tests share: each has its own users and collections."""
    async with ClusterHere(tmp_path_factory.mktemp("two")) as cluster:
        await cluster.start("n1")
        await cluster.become_member("n1", copies=1)
        await cluster.start("n2")
        await cluster.become_member("n2")
        for node in cluster.nodes.values():
            assert node.replicated is not None
            view = node.replicated.session.view
            await until_so(lambda view=view: view.users and len(view.alive) == 2)
        yield cluster


def users(cluster: ClusterHere, name: str) -> Users:
    return cluster.nodes[name]._users


def collections(cluster: ClusterHere, name: str) -> Collections:
    return cluster.nodes[name].serving.listeners._admin_parts.collections


def collection_names(cluster: ClusterHere, name: str) -> set[str]:
    found = cluster.nodes[name].engine.keyspace.manifest.collections.values()
    return {collection.name for collection in found}


async def soon(is_so: Callable[[], object]) -> None:
    """Return once something is so; it must be soon."""
    async with asyncio.timeout(SOON_S):
        await until_so(is_so)


async def until_answered(client: Client, request: bytes, status: int) -> None:
    """Repeat a request until it has this status, which must be soon."""
    async with asyncio.timeout(2 * SOON_S):
        while (await client.ask(request)).status != status:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.02)


def writes_a_table(request: StoreRequest) -> bool:
    return isinstance(request, Txn) and any(
        isinstance(operation, Put) and operation.key in {KEYS.users, KEYS.manifest}
        for operation in request.then
    )


def hold_back(client: LoopClient, patch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Keep a node's next change of a table from the store until it is called."""
    held: list[Callable[[], None]] = []
    submit: Submit = client.submit

    def hold(request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        if writes_a_table(request) and not held:
            held.append(partial(submit, request, done))
        else:
            submit(request, done)

    patch.setattr(client, "submit", hold)
    return held


def lose_answer(client: LoopClient, patch: pytest.MonkeyPatch) -> list[StoreResult]:
    """Lose the answer to a node's next change of a table; return it."""
    lost: list[StoreResult] = []
    submit: Submit = client.submit

    def lose(request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        def answer(result: StoreResult) -> None:
            lost.append(result)
            done(OutcomeUnknown("the link broke") if len(lost) == 1 else result)

        submit(request, answer if writes_a_table(request) else done)

    patch.setattr(client, "submit", lose)
    return lost


async def test_of_two_nodes_that_change_users_at_once_one_is_refused(
    two: ClusterHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = users(two, "n1"), users(two, "n2")
    held = hold_back(two.clients["n2"], monkeypatch)
    late = asyncio.create_task(asyncio.to_thread(other.add, "bob", "builder"))
    await until_so(lambda: held)
    await asyncio.to_thread(one.add, "ada", "lovelace")
    held[0]()
    with pytest.raises(UsersFileError, match="another node changed the users at the same time"):
        await late
    await soon(lambda: "ada" in other.names())
    assert "bob" not in other.names()
    await asyncio.to_thread(other.add, "bob", "builder")
    await soon(lambda: {"ada", "bob"} <= set(one.names()) & set(other.names()))


async def test_of_two_nodes_that_change_collections_at_once_both_do(
    two: ClusterHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = hold_back(two.clients["n2"], monkeypatch)
    late = asyncio.create_task(collections(two, "n2").create_collection("_default", "late", 0))
    await until_so(lambda: held)
    await collections(two, "n1").create_collection("_default", "first", 0)
    held[0]()
    await late
    for name in two.nodes:
        await soon(lambda name=name: {"first", "late"} <= collection_names(two, name))
    manifests = [node.engine.keyspace.manifest for node in two.nodes.values()]
    assert manifests[0] == manifests[1]


async def test_a_change_of_users_whose_answer_is_lost_is_found(
    two: ClusterHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lose_answer(two.clients["n2"], monkeypatch)
    await asyncio.to_thread(users(two, "n2").add, "carl", "password")
    assert lost
    assert "carl" in users(two, "n2").names()
    await soon(lambda: "carl" in users(two, "n1").names())


async def test_a_change_of_collections_whose_answer_is_lost_is_found(
    two: ClusterHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lose_answer(two.clients["n2"], monkeypatch)
    await collections(two, "n2").create_collection("_default", "unsure", 0)
    assert lost
    await soon(lambda: "unsure" in collection_names(two, "n1"))


async def test_users_and_collections_reach_all_nodes_soon(two: ClusterHere) -> None:
    await asyncio.to_thread(users(two, "n1").add, "dora", "password")
    await soon(lambda: "dora" in users(two, "n2").names())
    await collections(two, "n2").create_collection("_default", "soon", 0)
    await soon(lambda: "soon" in collection_names(two, "n1"))


async def test_no_list_is_made_from_one_that_the_store_went_back_to(two: ClusterHere) -> None:
    await collections(two, "n1").create_collection("_default", "kept", 0)
    replicated, store = two.nodes["n2"].replicated, two.clients["n2"]
    assert replicated is not None
    view = replicated.session.view
    newest = view.manifest
    assert newest is not None
    await until_so(
        lambda: {each.content.uid for each in view.collections.values()} == {newest.content.uid}
    )
    store.submit(
        Txn((), (Put(KEYS.manifest, encode_record(ManifestRecord.of(INITIAL_MANIFEST))),)), print
    )
    await soon(lambda: view.manifest and not view.manifest.content.uid)
    with pytest.raises(CollectionsRefusedError, match=r"older list.* node n1, n2: .*meta restore"):
        await collections(two, "n2").create_collection("_default", "twice", 0)
    assert "kept" in collection_names(two, "n2")
    store.submit(Txn((), (Put(KEYS.manifest, newest.item.value),)), print)
    await soon(lambda: view.manifest and view.manifest.content.uid)
    await collections(two, "n2").create_collection("_default", "twice", 0)


async def test_new_collections_are_answered_when_all_nodes_have_them(
    two: ClusterHere, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replicated = two.nodes["n1"].replicated
    assert replicated is not None
    view = replicated.session.view
    await until_so(lambda: len(view.collections) == 2)
    two.clients["n2"].is_away = True
    change = asyncio.create_task(collections(two, "n1").create_collection("_default", "all", 0))
    await soon(lambda: "all" in collection_names(two, "n1"))
    uid = two.nodes["n1"].engine.keyspace.manifest.uid
    await soon(lambda: {each.content.uid for each in view.collections.values()} == {uid - 1, uid})
    assert not change.done(), "n2 has not read of it"
    two.clients["n2"].is_away = False
    assert await change == uid
    assert "all" in collection_names(two, "n2")

    two.clients["n2"].is_away = True
    monkeypatch.setattr(shared_records, "EVERYWHERE_S", 0.1)
    with caplog.at_level("WARNING"):
        await collections(two, "n1").create_collection("_default", "most", 0)
    two.clients["n2"].is_away = False
    assert "collections are not on all nodes yet" in caplog.text
    await soon(lambda: "most" in collection_names(two, "n2"))


async def test_events_of_a_new_collection_are_committed_by_its_answer(
    tmp_path: Path,
) -> None:
    async with ClusterHere(tmp_path) as cluster:
        for name in ("n1", "n2"):
            await cluster.start(name)
            await cluster.become_member(name, copies=2 if name == "n1" else 0)
        await cluster.until_all_in_sync(2)
        for name in cluster.nodes:
            await collections(cluster, name).create_collection("_default", f"of_{name}", 0)
            masters = [
                part
                for node in cluster.nodes.values()
                for part in node.engine.partitions
                if part.state == VbState.ACTIVE
            ]
            assert len(masters) == PARTITIONS
            assert all(part.committed_seqno == part.high_seqno > 0 for part in masters)


async def test_rights_of_open_connections_change_on_all_nodes(two: ClusterHere) -> None:
    one = users(two, "n1")
    await asyncio.to_thread(one.add, "eve", "password", LEAST_RIGHTS.granted(Role.WRITE))
    await soon(lambda: "eve" in users(two, "n2").names())
    write = pack_request(Opcode.SET, extras=bytes(8), key=b"k", value=b"v")
    read = pack_request(Opcode.GET, key=b"k")
    async with Client.connect(two.nodes["n2"]) as client:
        await client.ask(pack_request(Opcode.SELECT_BUCKET, key=b"default"))
        assert (await client.ask(plain("eve", "password"))).status == Status.OK
        assert (await client.ask(write)).status == Status.NOT_MY_VBUCKET, "n2 has no copies"
        await asyncio.to_thread(one.revoke, "eve", Role.WRITE)
        await until_answered(client, write, Status.EACCESS)
        assert (await client.ask(read)).status == Status.NOT_MY_VBUCKET
        assert await asyncio.to_thread(one.remove, "eve")
        await until_answered(client, read, Status.AUTH_STALE)


async def test_while_store_is_away_nothing_changes_and_users_log_in(two: ClusterHere) -> None:
    """Also at a node that starts meanwhile. It comes last: n2 has no store afterwards."""
    await asyncio.to_thread(users(two, "n1").add, "fred", "password")
    await soon(lambda: "fred" in users(two, "n2").names())

    async def logs_in() -> bool:
        async with Client.connect(two.nodes["n2"]) as client:
            return (await client.ask(plain("fred", "password"))).status == Status.OK

    two.clients["n2"].is_away = True
    with pytest.raises(UsersFileError, match="the metadata store does not answer: it is away"):
        await asyncio.to_thread(users(two, "n2").add, "gina", "password")
    with pytest.raises(CollectionsRefusedError, match="the metadata store does not answer") as told:
        await collections(two, "n2").create_collection("_default", "none", 0)
    assert told.value.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert await logs_in()
    await two.kill("n2")
    two.starts_without_store = True
    await two.start("n2")
    assert not two.active("n2")
    assert await logs_in()
    assert "gina" not in users(two, "n2").names()
