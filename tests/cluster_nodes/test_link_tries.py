"""A join tries a link each way before it writes anything."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_tls_links import tls_settings

from dcp.server.access.link_tls import DIAL_BACK
from dcp.server.cluster.cluster_file import ClusterToken, read_cluster_file
from dcp.server.cluster.joining import becoming_member, link_try
from dcp.server.cluster.joining.becoming_member import check_join_by_token, join_by_token
from dcp.server.cluster.joining.enrolment import EnrolmentError
from dcp.server.cluster.joining.link_try import LinkRequest
from dcp.server.cluster.joining.newcomer_door import BYTES_MAX, open_door
from dcp.server.cluster.joining.process_facts import PROTOCOL
from dcp.server.cluster.meta_access import MetaAccess
from dcp.server.cluster.node_map import tls_address_of
from dcp.server.net.cluster_config import Ports
from dcp.server.node import Node
from dcp.server.observe.elapsed import elapsed_ns
from dcp.wire.frame import FrameDecoder, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.coordinator.records import (
    AliveRecord,
    ClusterKeys,
    KeyKind,
    MemberRecord,
    encode_record,
)
from failover.metadata.keyring import Keyring
from failover.metadata.metastore import Delete, Put, Range, RangeResult, Txn
from support.cluster_here import CLUSTER, SECRET, Client, ClusterHere, node_here
from support.credentials import TestCa
from support.waiting import until_so

KEYS = ClusterKeys(f"/dcpd/{CLUSTER}/".encode())


@pytest.fixture
def ca(tmp_path: Path) -> TestCa:
    return TestCa(tmp_path)


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ClusterHere]:
    async with ClusterHere(tmp_path) as cluster:

        async def opened(*_: object) -> MetaAccess:
            return MetaAccess(cluster.meta.client(), "memory", Keyring([SECRET]), "")

        monkeypatch.setattr(becoming_member.MetaAccess, "open", opened)
        monkeypatch.setattr(becoming_member, "PATIENCE_LEASES", 0)
        yield cluster


async def member_and_newcomer(
    cluster: ClusterHere, ours: dict[str, Any], others: dict[str, Any]
) -> Node:
    """Start a member with settings, and a node alone with others; return that one."""
    cluster._settings = ours
    await cluster.start("n1")
    n1 = await cluster.become_member("n1", copies=2)
    await until_known(cluster, n1)
    cluster._settings = others
    return await cluster.start("n2")


def stored(cluster: ClusterHere) -> dict[bytes, bytes]:
    """Return what the store has of the cluster and of its members."""
    found = cluster.meta.store.apply(
        elapsed_ns(), Range(KEYS.cluster.rpartition(b"/")[0], is_prefix=True)
    )
    assert isinstance(found, RangeResult)
    kinds = (b"/member/", b"/name/", b"/cluster", b"/removed", b"/manifest", b"/users")
    return {item.key: item.value for item in found.items if any(k in item.key for k in kinds)}


def is_alive(cluster: ClusterHere) -> bool:
    found = cluster.meta.store.apply(
        elapsed_ns(), Range(KEYS.of_members(KeyKind.ALIVE), is_prefix=True)
    )
    assert isinstance(found, RangeResult)
    return bool(found.items)


async def until_known(cluster: ClusterHere, node: Node) -> None:
    """Return when the store has a member as alive, with its TLS port if it has one."""
    await until_so(lambda: is_alive(cluster))
    if node.ports.kv_tls:
        port = f'"kv_tls_port":{node.ports.kv_tls}'.encode()
        await until_so(lambda: any(port in each for each in stored(cluster).values()))


def token(secret: str = SECRET) -> str:
    return ClusterToken(cluster=CLUSTER, meta="memory", secret=secret).to_text()


async def refusal(cluster: ClusterHere, node: Node, secret: str = SECRET) -> str:
    """Let a node join; return why it may not. Nothing was written, and its door is closed."""
    before = stored(cluster)
    with pytest.raises(EnrolmentError) as refused:
        await check_join_by_token(node._newcomer(), token(secret), name="n2")
    with pytest.raises(EnrolmentError) as again:
        await join_by_token(node._newcomer(), token(secret), name="n2")
    assert str(again.value) == str(refused.value), "a dry run says the same"
    assert stored(cluster) == before
    assert read_cluster_file(node.about.data_dir) is None
    assert node._users.rights_of("@cluster") is None, "the secret opens nothing any more"
    assert refused.value.try_this
    return str(refused.value)


Settings = Callable[[TestCa], dict[str, Any]]
PLAIN: Settings = lambda _ca: {}  # noqa: E731
OFFERS: Settings = lambda ca: {**tls_settings("on", ca), "cluster_tls": "off"}  # noqa: E731
ON: Settings = lambda ca: tls_settings("on", ca)  # noqa: E731
MUTUAL: Settings = lambda ca: tls_settings("mutual", ca)  # noqa: E731


@pytest.mark.parametrize("settings", [PLAIN, OFFERS, ON, MUTUAL])
async def test_a_node_with_a_link_each_way_joins(
    cluster: ClusterHere, ca: TestCa, settings: Settings
) -> None:
    node = await member_and_newcomer(cluster, settings(ca), settings(ca))
    await check_join_by_token(node._newcomer(), token(), name="n2")
    assert read_cluster_file(node.about.data_dir) is None
    await join_by_token(node._newcomer(), token(), name="n2")
    assert read_cluster_file(node.about.data_dir) is not None
    assert any(key.endswith(b"/name/n2") for key in stored(cluster))
    # The tries were logged on both sides, with the names of the nodes.
    told = [(folder / "audit.log").read_text() for folder in audit_folders(cluster)]
    assert '"@cluster/n2"' in told[0]


def audit_folders(cluster: ClusterHere) -> list[Path]:
    return [cluster.nodes[name].about.data_dir for name in ("n1", "n2")]


@pytest.mark.parametrize(
    ("ours", "others", "text"),
    [
        (ON, PLAIN, r"this node gets no link to node n1: .*--cluster-tls on here"),
        (PLAIN, ON, r"this node gets no link to node n1: node n1 offers no TLS"),
        (OFFERS, ON, r"node n1 gets no link to this node: .*--cluster-tls on here"),
        (ON, OFFERS, r"this node gets no link to node n1: .*--cluster-tls on here"),
        (MUTUAL, ON, r"this node gets no link to node n1: .*--cluster-tls mutual here"),
        (ON, MUTUAL, r"node n1 gets no link to this node: .*--cluster-tls mutual here"),
    ],
)
async def test_tls_on_one_side_only_ends_the_join(
    cluster: ClusterHere, ca: TestCa, ours: Settings, others: Settings, text: str
) -> None:
    node = await member_and_newcomer(cluster, ours(ca), others(ca))
    found = await refusal(cluster, node)
    assert re.search(text, found), found


async def test_a_member_may_announce_its_tls_a_moment_later(
    cluster: ClusterHere, ca: TestCa, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of a new cluster start together, and a member's port is known once it listens."""
    monkeypatch.setattr(becoming_member, "PATIENCE_LEASES", 1000)
    node = await member_and_newcomer(cluster, ON(ca), ON(ca))
    looks: list[MemberRecord] = []

    def late(member: MemberRecord) -> str:
        looks.append(member)
        return "" if len(looks) < 3 else tls_address_of(member)

    monkeypatch.setattr(link_try, "tls_address_of", late)
    await join_by_token(node._newcomer(), token(), name="n2")
    assert len(looks) == 3


async def test_a_certificate_for_another_host_ends_the_join(
    cluster: ClusterHere, ca: TestCa
) -> None:
    others = tls_settings("mutual", ca, ca.issue("other", "host.example"))
    node = await member_and_newcomer(cluster, MUTUAL(ca), others)
    found = await refusal(cluster, node)
    assert "the certificate is for host.example, and the node announces 127.0.0.1" in found


async def test_a_ca_that_the_members_do_not_know_ends_the_join(
    cluster: ClusterHere, ca: TestCa, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    others = {**ON(TestCa(folder)), "cluster_ca": ca.path}
    node = await member_and_newcomer(cluster, ON(ca), others)
    found = await refusal(cluster, node)
    assert "node n1 gets no link to this node: the certificate of node n2 at" in found


async def test_a_wrong_secret_ends_the_join(cluster: ClusterHere) -> None:
    node = await member_and_newcomer(cluster, {}, {})
    found = await refusal(cluster, node, "w" * 43)
    assert "this node gets no link to node n1: the login at node n1 at 127.0.0.1:" in found
    assert "the secret is not that of this cluster" in found


async def test_an_address_that_members_do_not_reach_ends_the_join(cluster: ClusterHere) -> None:
    node = await member_and_newcomer(cluster, {}, {"advertise_host": "127.0.0.9"})
    found = await refusal(cluster, node)
    assert "node n1 gets no link to this node: no connection to node n2 at 127.0.0.9:" in found
    assert "--advertise-host" in found


def add_member(cluster: ClusterHere, port: int, *, is_alive: bool) -> bytes:
    """Write a member that has no node; return the key of its sign of life."""
    member = MemberRecord(member="m9", address=f"127.0.0.1:{port}", name="n9")
    alive = AliveRecord(member="m9", incarnation=1, name="n9", protocol=PROTOCOL)
    puts = [Put(KEYS.of_member(KeyKind.MEMBER, "m9"), encode_record(member))]
    key = KEYS.of_member(KeyKind.ALIVE, "m9")
    if is_alive:
        puts.append(Put(key, encode_record(alive)))
    cluster.meta.store.apply(elapsed_ns(), Txn((), tuple(puts)))
    return key


async def test_a_member_that_is_down_keeps_nobody_out(cluster: ClusterHere) -> None:
    node = await member_and_newcomer(cluster, {}, {})
    add_member(cluster, 1, is_alive=False)
    await join_by_token(node._newcomer(), token(), name="n2")
    assert read_cluster_file(node.about.data_dir) is not None


async def test_a_member_that_is_alive_and_out_of_reach_ends_the_join(
    cluster: ClusterHere,
) -> None:
    node = await member_and_newcomer(cluster, {}, {})
    add_member(cluster, 1, is_alive=True)
    found = await refusal(cluster, node)
    assert "this node gets no link to node n9: no connection to node n9 at 127.0.0.1:1" in found


async def test_a_member_that_dies_meanwhile_keeps_nobody_out(
    cluster: ClusterHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease ends some seconds after it, so the join waits for that."""
    monkeypatch.setattr(becoming_member, "PATIENCE_LEASES", 1000)
    node = await member_and_newcomer(cluster, {}, {})

    def connected(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        cluster.meta.store.apply(elapsed_ns(), Txn((), (Delete(key),)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        key = add_member(cluster, server.sockets[0].getsockname()[1], is_alive=True)
        await join_by_token(node._newcomer(), token(), name="n2")
    assert read_cluster_file(node.about.data_dir) is not None


async def test_who_does_not_know_the_secret_has_nothing_dialled(
    cluster: ClusterHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled: list[str] = []
    fault_of = link_try.fault_of

    async def noting(address: str, *others: Any) -> Any:
        dialled.append(address)
        return await fault_of(address, *others)

    monkeypatch.setattr(link_try, "fault_of", noting)
    await member_and_newcomer(cluster, {}, {})
    request = LinkRequest(name="x", address="127.0.0.1:1", tls_address="")
    stolen = LinkRequest(
        name="x", address="127.0.0.1:2", tls_address="", proof=request.proof_with(SECRET)
    )
    wrong = (b"", b"{}", b"\xff", encoded(request), encoded(stolen, name="../x"), encoded(stolen))
    for value in wrong:
        async with Client.connect(cluster.nodes["n1"]) as client:
            answer = await client.ask(asked(value))
            assert answer.status in {Status.AUTH_ERROR, Status.EINVAL}
    assert not dialled
    async with Client.connect(cluster.nodes["n1"]) as client:
        right = encoded(request, proof=request.proof_with(SECRET))
        assert (await client.ask(asked(right))).status == Status.OK
        assert dialled == ["127.0.0.1:1"]
        # It lets nobody in: who was logged in before still is nobody with more rights.
        assert (await client.ask(pack_request(Opcode.DCP_CONTROL))).status != Status.OK
    async with Client.connect(cluster.nodes["n2"]) as client:
        assert (await client.ask(asked(right))).status == Status.AUTH_ERROR, "it is in no cluster"


def encoded(request: LinkRequest, **changed: Any) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(request, **changed))


def asked(value: bytes) -> bytes:
    return pack_request(Opcode.SASL_AUTH, key=DIAL_BACK.encode(), value=value)


@pytest.mark.parametrize("settings", [PLAIN, ON, MUTUAL])
async def test_a_node_joins_at_its_start_before_it_listens(
    cluster: ClusterHere, ca: TestCa, tmp_path: Path, settings: Settings
) -> None:
    path = tmp_path / "token"
    path.write_text(token())
    cluster._settings = settings(ca)
    await cluster.start("n1")
    await until_known(cluster, await cluster.become_member("n1", copies=2))
    joins = {"cluster": "join", "cluster_token_file": path, "node_name": "n2"}
    cluster._settings = {**settings(ca), **joins}
    await cluster.start("n2")
    await cluster.until_all_in_sync(2)


async def test_port_of_a_node_that_does_not_listen_takes_nodes_only(
    tmp_path: Path,
) -> None:
    async with node_here(tmp_path, {"ada": "secret1"}) as node:
        async with open_door(node.access, node._settings, Ports(), SECRET, ()) as door:
            assert door.kv not in {0, node.ports.kv}
            for packet in (
                pack_request(Opcode.GET, key=b"k"),
                pack_request(Opcode.SASL_STEP, key=b"SCRAM-SHA512", value=b"x"),
                pack_request(Opcode.HELLO, value=bytes(BYTES_MAX)),
                bytes(24),
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", door.kv)
                writer.write(packet)
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b"", "it is closed without an answer"
                writer.close()
            for mechanism, value in ((b"PLAIN", b"\0ada\0secret1"), (b"EXTERNAL", b"@cluster/b")):
                login = pack_request(Opcode.SASL_AUTH, key=mechanism, value=value)
                reader, writer = await asyncio.open_connection("127.0.0.1", door.kv)
                writer.write(login)
                (frame,) = FrameDecoder().feed(await reader.read(1 << 16))
                assert frame.status == Status.AUTH_ERROR
                writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", door.kv)
