"""Nodes of a cluster in one process: real sockets, folders and clocks, a store in memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from struct import pack, unpack
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from clients.errors import DcpdError
from clients.kv.client import KvClient
from clients.operation import vbucket_of
from dcp.server.access.users import CLUSTER_USER
from dcp.server.access.users_file import UsersFileError
from dcp.server.cluster import replicated_node
from dcp.server.cluster.cluster_file import read_cluster_file, write_cluster_file
from dcp.server.cluster.joining.enrolment import EnrolmentError, ask
from dcp.server.cluster.member_link import MemberLink, NodeLogin
from dcp.server.node import Node
from dcp.server.observe.event_log import MembershipOverError
from dcp.server.operate.cluster_reports import ClusterReport
from dcp.server.storage.folder import CLUSTER_FILE, FolderError
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.message import OPEN_EXTRAS, OpenFlag
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.coordinator.records import AliveRecord, ClockRecord, KeyKind, encode_record
from failover.metadata.metastore import Put, Txn, TxnResult
from support.cluster_here import CLUSTER, PARTITIONS, Client, ClusterHere, LoopMetaStore, plain
from support.waiting import until_so
from vbucket.engine.partition import VbState


async def test_a_node_with_data_becomes_the_first_member_and_keeps_it(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        node = await cluster.start("n1")
        async with cluster.client("n1") as kv:
            await kv.set(b"before", b"1")
            topology = kv.topology
        versions = [part.vb_uuid for part in node.engine.partitions]
        await cluster.become_member("n1", copies=3)
        await cluster.until_all_in_sync(1)
        async with cluster.client("n1") as kv:
            assert (await kv.get(b"before")).value == b"1"
            await kv.set(b"after", b"2")
            assert (await kv.get(b"after")).value == b"2"
            assert topology is not None
            assert kv.topology is not None
            assert kv.topology.revision > topology.revision, "clients must take the new map"
        # A consumer of the single node goes on: the versions of its changes are in the new logs.
        for part, vb_uuid in zip(cluster.nodes["n1"].engine.partitions, versions, strict=True):
            known = [pair[0] for pair in part.failover.pairs()]
            assert (vb_uuid in known) == (part.vb_id == vbucket_of("before", PARTITIONS))


async def test_a_node_with_documents_does_not_join(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        await cluster.become_member("n1", copies=2)
        await cluster.start("n2")
        async with cluster.client("n2") as kv:
            await kv.set(b"k", b"v")
            with pytest.raises(EnrolmentError, match="holds 1 document"):
                await cluster.become_member("n2")
            assert (await kv.get(b"k")).value == b"v"
        assert not (tmp_path / "n2" / CLUSTER_FILE).exists()


async def write(kv: KvClient, number: int, answered: dict[bytes, int], stop: asyncio.Event) -> None:
    """Write rising numbers; note what was answered. An ambiguous write may or may not be there."""
    turn = 0
    while not stop.is_set():
        key = b"w%d-%d" % (number, turn % 40)
        turn += 1
        with contextlib.suppress(DcpdError):
            await kv.set(key, b"%d" % turn)
            answered[key] = turn


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ClusterHere]:
    """Three nodes with three copies. Of the two tests that share them, the second kills one."""
    async with ClusterHere(tmp_path_factory.mktemp("three")) as cluster:
        await cluster.of_three()
        yield cluster


@pytest.mark.asyncio(loop_scope="module")
async def test_all_nodes_tell_the_same_map_and_only_masters_answer(three: ClusterHere) -> None:
    cluster = three
    nodes = cluster.nodes.values()
    await until_so(lambda: len({node._config.config_version() for node in nodes}) == 1)
    maps = [json.loads(node._config.bucket_config()) for node in nodes]
    for document in maps:
        for entry in document["nodesExt"]:
            entry.pop("thisNode", None)
    assert maps[0] == maps[1] == maps[2]
    assert maps[0]["vBucketServerMap"]["numReplicas"] == 2
    assert len({len(set(chain)) for chain in maps[0]["vBucketServerMap"]["vBucketMap"]}) == 1
    ports = [entry["services"]["mgmt"] for entry in maps[0]["nodesExt"]]
    assert len(set(ports)) == 3, "SDKs tell nodes apart by host and admin port"
    hosts = [entry["hostname"] for entry in maps[0]["nodesExt"]]
    assert hosts == ["127.0.0.1"] * 3, "Java clients refuse a map without, on loopback too"
    replicated = cluster.nodes["n1"].replicated
    assert replicated is not None
    records = replicated.session.view.partitions
    elsewhere = next(  # a partition that is not handed to another node meanwhile
        vb_id
        for vb_id in sorted(cluster.active("n1"))
        if records[vb_id].content.record.copies[0] == replicated.member
    )
    async with Client.connect(cluster.nodes["n2"]) as client:
        await client.ask(pack_request(Opcode.SELECT_BUCKET, key=b"default"))
        frame = await client.ask(pack_request(Opcode.GET, vb_id=elsewhere, key=b"k"))
        assert frame.status == Status.NOT_MY_VBUCKET
        assert json.loads(frame.value)["rev"] >= maps[0]["rev"]


@pytest.mark.asyncio(loop_scope="module")
async def test_writes_go_on_when_a_node_is_killed_and_none_is_lost(three: ClusterHere) -> None:
    cluster = three
    answered: dict[bytes, int] = {}
    stop = asyncio.Event()
    async with cluster.client("n3") as kv:
        writers = [asyncio.create_task(write(kv, i, answered, stop)) for i in range(8)]
        await until_so(lambda: len(answered) >= 200)
        await cluster.kill("n2")
        answered_before = dict(answered)
        await until_so(lambda: all(answered[k] > n for k, n in answered_before.items()))
        stop.set()
        await asyncio.gather(*writers)
        await until_so(lambda: sum(len(cluster.active(n)) for n in cluster.nodes) == PARTITIONS)
        for key, turn in answered.items():
            assert int((await kv.get(key)).value) >= turn, key
        # The node comes back as a replica, gets what it lacks, and then its partitions.
        await cluster.start("n2")
        await cluster.until_all_in_sync(3)
        for key, turn in answered.items():
            assert int((await kv.get(key)).value) >= turn, key
    for vb_id in range(PARTITIONS):
        ends = {
            (part.high_seqno, part.vb_uuid)
            for node in cluster.nodes.values()
            for part in (node.engine.partitions[vb_id],)
        }
        assert len(ends) == 1, f"partition {vb_id}: {ends}"


async def test_a_stranger_gets_no_replication_link(tmp_path: Path) -> None:
    begin = [
        pack_request(Opcode.DCP_OPEN, extras=OPEN_EXTRAS.pack(0, OpenFlag.PRODUCER), key=b"x"),
        pack_request(Opcode.DCP_CONTROL, key=b"x_replicate", value=b"{}"),
    ]
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        node = await cluster.become_member("n1", copies=2)
        async with Client.connect(node) as client:  # loopback needs no login for documents
            assert (await client.ask(begin[0])).status == Status.OK
            assert (await client.ask(begin[1])).status == Status.EACCESS
        async with Client.connect(node) as client:
            frame = await client.ask(plain(CLUSTER_USER, "s" * 43))
            assert frame.status == Status.AUTH_ERROR, "the secret is for SCRAM only"
        # A member with another secret gets nothing either.
        await cluster.start("n2")
        await cluster.become_member("n2")
        await cluster.until_all_in_sync(2)
        await cluster.kill("n2")
        content = read_cluster_file(tmp_path / "n2")
        assert content is not None
        write_cluster_file(tmp_path / "n2", msgspec.structs.replace(content, secret="x" * 43))
        n2 = await cluster.start("n2")
        assert n2.replicated is not None
        following = n2.replicated.core.replica
        await until_so(lambda: any("login" in link.problem for link in following.links.values()))


async def test_without_the_store_a_node_that_starts_serves_nothing(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        node = await cluster.become_member("n1", copies=1)
        await cluster.until_all_in_sync(1)
        await node.stop()
        cluster.starts_without_store = True
        node = await cluster.start("n1")
        assert {part.state for part in node.engine.partitions} == {VbState.REPLICA}
        async with cluster.client("n1", timeout_s=0.5) as kv:
            with pytest.raises(DcpdError):
                await kv.set(b"k", b"v")


async def test_masters_go_on_without_the_store(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        await cluster.become_member("n1", copies=2)
        await cluster.start("n2")
        await cluster.become_member("n2")
        await cluster.until_all_in_sync(2)
        for client in cluster.clients.values():
            client.is_away = True
        async with cluster.client("n1") as kv:
            for turn in range(50):
                await kv.set(b"k%d" % turn, b"v")
            own = min(cluster.active("n1"))
            await cluster.kill("n2")
            # Its copies cannot leave the in-sync sets: writes stop, with the reason.
            kv.timeout_s = 2.0
            outcomes = await kv.set_many({b"k%d" % turn: b"w" for turn in range(50)})
            assert all(isinstance(outcome, DcpdError) for outcome in outcomes), outcomes
        await until_so(lambda: not cluster.active("n1"))
        async with Client.connect(cluster.nodes["n1"]) as client:
            await client.ask(pack_request(Opcode.HELLO, value=pack(">H", Feature.XERROR)))
            write = pack_request(Opcode.SET, vb_id=own, extras=bytes(8), key=b"k", value=b"v")
            refused = await client.ask(write)
            assert refused.status == Status.ETMPFAIL
            assert json.loads(refused.value)["error"]["context"] == (
                f"partition {own}: no confirmation from n2 for a while that this node is its"
                " master; no copy can leave the in-sync set while the metadata store is away;"
                " try again"
            )


async def test_a_member_needs_durability_commit(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        await cluster.become_member("n1", copies=1)
        await cluster.nodes.pop("n1").stop()
        cluster._settings = {"durability": "interval"}
        node = cluster._new("n1")
        with pytest.raises(FolderError, match="durability interval is not possible"):
            await node.start()


def test_a_node_alone_imports_nothing_of_clusters() -> None:
    script = (
        "import sys, dcp.server.main, dcp.server.node, dcp.server.admin.application\n"
        "names = ('dcp.server.cluster', 'failover.replication', 'failover.metadata', 'scramp')\n"
        "print([name for name in sys.modules if name.startswith(names)])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


async def test_a_client_that_asked_for_it_is_pushed_each_newer_map(tmp_path: Path) -> None:
    features = pack(">3H", Feature.SELECT_BUCKET, Feature.DUPLEX, 0x0D)
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        node = await cluster.become_member("n1", copies=2)
        async with Client.connect(node) as client, Client.connect(node) as silent:
            hello = await client.ask(pack_request(Opcode.HELLO, value=features))
            assert hello.value == features
            await client.ask(pack_request(Opcode.SELECT_BUCKET, key=b"default"))
            assert (await silent.ask(pack_request(Opcode.NOOP))).status == Status.OK
            told = []
            await cluster.start("n2")
            await cluster.become_member("n2")
            while not told or len(told[-1]["nodesExt"]) < 2:
                frame = await client.receive()
                assert frame is not None
                assert (frame.magic, frame.opcode, frame.key) == (0x82, 0x01, b"default")
                document = json.loads(frame.value)
                assert unpack(">qq", frame.extras) == (document["revEpoch"], document["rev"])
                told.append(document)
            revisions = [document["rev"] for document in told]
            assert revisions == sorted(set(revisions)), "each map once, in order"
            # Nothing was pushed to a client that did not ask.
            answer = await silent.ask(pack_request(Opcode.NOOP, opaque=7))
            assert (answer.magic, answer.opaque) == (0x81, 7)
        async with Client.connect(node) as client:
            brief = pack(">2H", Feature.SELECT_BUCKET, 0x1F)
            refused = await client.ask(pack_request(Opcode.HELLO, value=brief))
            assert refused.status == Status.EINVAL, "a push needs Duplex"


async def test_collections_are_those_of_the_whole_cluster(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        node = await cluster.start("n1")
        collections = node.serving.listeners._admin_parts.collections
        await collections.create_collection("_default", "old", 0)
        await cluster.become_member("n1", copies=2)
        await cluster.start("n2")
        await cluster.become_member("n2")
        await cluster.until_all_in_sync(2)
        manifests = [node.engine.keyspace for node in cluster.nodes.values()]
        await until_so(lambda: all(len(each.manifest.collections) == 2 for each in manifests))
        for name, made in (("n1", "one"), ("n2", "two")):
            parts = cluster.nodes[name].serving.listeners._admin_parts
            await parts.collections.create_collection("_default", made, 0)
        await until_so(lambda: manifests[0].manifest == manifests[1].manifest)
        async with cluster.client("n1") as kv:
            for made in ("old", "one", "two"):
                orders = kv.collection(f"_default.{made}")
                await orders.set_many({b"k%d" % number: b"v" for number in range(50)})
                assert len(await orders.get_many([b"k%d" % number for number in range(50)])) == 50
            await until_so(lambda: len(cluster.active("n2")) > PARTITIONS // 2 - 4)
            await cluster.kill("n1")
        async with cluster.client("n2") as kv:
            await until_so(lambda: len(cluster.active("n2")) == PARTITIONS)
            two = kv.collection("_default.two")
            assert len(await two.get_many([b"k%d" % number for number in range(50)])) == 50


async def test_users_are_those_of_the_whole_cluster(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        n1 = await cluster.start("n1")
        await asyncio.to_thread(n1._users.add, "ada", "lovelace")
        await cluster.become_member("n1", copies=2)
        n2 = await cluster.start("n2")
        await asyncio.to_thread(n2._users.add, "local", "password")
        await cluster.become_member("n2")
        one, two = (node._users for node in cluster.nodes.values())
        await until_so(lambda: one.names() == two.names() == ["ada"])
        await asyncio.to_thread(two.add, "bob", "builder")
        await until_so(lambda: one.names() == two.names() == ["ada", "bob"])
        assert await asyncio.to_thread(one.remove, "ada")
        await until_so(lambda: one.names() == two.names() == ["bob"])
        async with Client.connect(cluster.nodes["n1"]) as client:
            assert (await client.ask(plain("bob", "builder"))).status == Status.OK
        for client in cluster.clients.values():
            client.is_away = True
        with pytest.raises(UsersFileError, match="does not answer: it is away"):
            await asyncio.to_thread(two.add, "carl", "password")
        assert one.names() == two.names() == ["bob"], "nobody changes users alone"


async def test_the_store_of_another_cluster_is_told_and_not_followed(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        node = await cluster.become_member("n1", copies=1)
        await cluster.until_all_in_sync(1)
        await node.stop()
        cluster.meta.close()
        cluster.meta = LoopMetaStore()  # it was made anew
        node = await cluster.start("n1")
        replicated = node.replicated
        assert replicated is not None
        await until_so(lambda: replicated.wrong_store)
        assert CLUSTER in replicated.wrong_store
        assert not cluster.active("n1")
        problems = node._cluster_operations().status().problems
        assert replicated.wrong_store in [problem.what for problem in problems]


async def test_a_process_that_was_replaced_ends(tmp_path: Path) -> None:
    """Both would be master in one epoch, and each would answer what the other does not have."""
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        node = await cluster.become_member("n1", copies=1)
        await cluster.until_all_in_sync(1)
        assert node.replicated is not None
        membership = node.replicated.session.membership
        newer = AliveRecord(
            member=membership.member, incarnation=membership.incarnation + 1, is_leaving=False
        )
        keys = node.replicated.session.view.keys
        put = Put(keys.of_member(KeyKind.ALIVE, membership.member), encode_record(newer))
        assert isinstance(await ask(cluster.clients["n1"], Txn((), (put,))), TxnResult)
        with pytest.raises(MembershipOverError, match="a newer process"):
            async with asyncio.timeout(30):
                await node.run_until_stopped()


class ClosedLink:
    """A link that only notes its end."""

    def __init__(self) -> None:
        self.ends = 0

    def unreachable(self, why: str, *, is_refused: bool, is_barred: bool = False) -> None:
        assert why
        assert not is_refused
        self.ends += 1


@pytest.mark.parametrize("address", ["b..default.svc:11210", "127.0.0.1:port", "", "x" * 64 + ":1"])
async def test_address_of_another_node_that_is_none_ends_link_only(address: str) -> None:
    link: Any = ClosedLink()
    told: list[None] = []
    login = NodeLogin("s" * 32, "b", uses_certificate=False)
    await MemberLink(link, login, lambda: told.append(None)).dial(address)
    assert (link.ends, told) == (1, [None])


async def test_users_that_could_not_be_written_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated_node, "USERS_TURNS", 2)
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        await cluster.become_member("n1", copies=2)
        await cluster.start("n2")
        await cluster.become_member("n2")
        one, two = (node._users for node in cluster.nodes.values())
        adopt = two.adopt
        failures = 0

        def full(text: bytes) -> None:
            nonlocal failures
            failures += 1
            if failures < 3:
                raise UsersFileError("no space left on device")
            adopt(text)

        monkeypatch.setattr(two, "adopt", full)
        await asyncio.to_thread(one.add, "ada", "lovelace")
        await until_so(lambda: two.names() == ["ada"])
        assert failures >= 3


async def test_a_wall_clock_that_is_off_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        await cluster.become_member("n1", copies=1)
        await cluster.start("n2")
        n2 = await cluster.become_member("n2")
        assert n2.replicated is not None
        clocks = n2.replicated.session.view.clocks
        await until_so(lambda: len(clocks) == 2)
        assert not any("clock" in problem.what for problem in status_of(n2).problems)
        own = n2.replicated.session.membership.member
        other = next(member for member in clocks if member != own)
        ahead = ClockRecord(member=other, unix_ms=clocks[other].content.unix_ms + 60_000)
        put = Put(
            n2.replicated.session.view.keys.of_member(KeyKind.CLOCK, other), encode_record(ahead)
        )
        assert isinstance(await ask(cluster.clients["n1"], Txn((), (put,))), TxnResult)
        await until_so(lambda: any("clock" in each.what for each in status_of(n2).problems))
        (told,) = [each for each in status_of(n2).problems if "clock" in each.what]
        assert "the clock of node n1 is" in told.what
        assert "ahead of this node's" in told.what
        assert "NTP" in told.try_


def status_of(node: Node) -> ClusterReport:
    return node._cluster_operations().status()
