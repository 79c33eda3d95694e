"""Links between nodes with TLS: with the secret, with certificates, and what is told if not."""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clients.address import ServerAddress
from clients.consumer.consumer import Consumer
from clients.kv.client import KvClient
from dcp.server.access.users import CLUSTER_USER
from dcp.server.cluster.cluster_file import read_cluster_file, write_cluster_file
from dcp.server.node import Node
from dcp.server.operate.cluster_requests import PlainRequest
from dcp.wire.frame import FrameDecoder, pack_request
from dcp.wire.message import OPEN_EXTRAS, OpenFlag
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.cluster_here import PARTITIONS, SECRET, Client, ClusterHere
from support.credentials import TestCa
from support.server import ctl
from support.waiting import until_so

SCRAM_FIRST = f"n,,n={CLUSTER_USER},r=abcdefgh".encode()
OPEN = pack_request(Opcode.DCP_OPEN, extras=OPEN_EXTRAS.pack(0, OpenFlag.PRODUCER), key=b"x")
REPLICATE = pack_request(Opcode.DCP_CONTROL, key=b"x_replicate", value=b"{}")


@pytest.fixture
def ca(tmp_path: Path) -> TestCa:
    return TestCa(tmp_path)


def tls_settings(mode: str, ca: TestCa, cert: Path | None = None) -> dict[str, Any]:
    return {
        "cluster_tls": mode, "cluster_ca": ca.path, "tls_cert": cert or ca.issue(),
        "tls_port": 0, "admin_tls_port": 0,
    }  # fmt: skip


async def two(cluster: ClusterHere, second: dict[str, Any] | None = None) -> tuple[Node, Node]:
    """Start a member, and another one with its own settings."""
    await cluster.start("n1")
    n1 = await cluster.become_member("n1", copies=2)
    cluster._settings = cluster._settings if second is None else second
    await cluster.start("n2")
    return n1, await cluster.become_member("n2")


async def ask_tls(node: Node, ca: TestCa, *packets: bytes, cert: Path | None = None) -> list[int]:
    """Return the statuses of the answers of a node's TLS port."""
    context = ssl.create_default_context(cafile=ca.path)
    if cert is not None:
        context.load_cert_chain(cert)
    reader, writer = await asyncio.open_connection("127.0.0.1", node.ports.kv_tls, ssl=context)
    decoder = FrameDecoder()
    statuses: list[int] = []
    try:
        async with asyncio.timeout(20):
            for packet in packets:
                writer.write(packet)
                before = len(statuses)
                while len(statuses) == before:
                    data = await reader.read(1 << 16)
                    if not data:
                        raise ConnectionResetError("the node has closed")
                    statuses += [frame.status for frame in decoder.feed(data)]
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    return statuses


def login(mechanism: bytes, value: bytes = b"") -> bytes:
    return pack_request(Opcode.SASL_AUTH, key=mechanism, value=value)


def problems(node: Node) -> str:
    return "\n".join(
        f"{each.what}. {each.try_}" for each in node._cluster_operations().status().problems
    )


async def cut_over_tls(n1: Node, n2: Node) -> None:
    """Follow cuts of both nodes until one has all; what leads them asks over TLS."""
    async with Consumer(f"127.0.0.1:{n1.ports.kv}", cuts=True) as consumer:
        async with KvClient.connect(ServerAddress("127.0.0.1", n1.ports.kv)) as kv:
            await kv.set_many({b"k%d" % number: b"v" for number in range(100)})
        held = 0
        async for cut in consumer.cuts():
            held += len(cut.changes)
            if held == 100:
                break
        assert consumer.frontier == cut.time
        peers = [peer for node in (n1, n2) for peer in node.serving.upkeep._cuts._peers.values()]  # type: ignore[attr-defined]
        assert peers
        assert all(peer._transport.get_extra_info("ssl_object") for peer in peers)


async def test_nodes_replicate_over_tls_with_the_secret(tmp_path: Path, ca: TestCa) -> None:
    async with ClusterHere(tmp_path, **tls_settings("on", ca)) as cluster:
        n1, n2 = await two(cluster)
        await cluster.until_all_in_sync(2)
        links = [link for node in (n1, n2) for link in node.replicated.links._open]  # type: ignore[union-attr]
        assert links
        for link in links:
            assert link._transport is not None
            assert link._transport.get_extra_info("ssl_object") is not None
        await cut_over_tls(n1, n2)
        async with Client.connect(n1) as client:  # the secret travels over TLS only
            refused = await client.ask(login(b"SCRAM-SHA512", SCRAM_FIRST))
            assert refused.status == Status.AUTH_ERROR
        assert await ask_tls(n1, ca, login(b"SCRAM-SHA512", SCRAM_FIRST)) == [Status.AUTH_CONTINUE]
        assert await ask_tls(n1, ca, login(b"EXTERNAL"), cert=ca.issue("own")) == [
            Status.AUTH_ERROR
        ]


async def test_nodes_replicate_with_certificates_and_without_secret(
    tmp_path: Path, ca: TestCa
) -> None:
    async with ClusterHere(tmp_path, **tls_settings("mutual", ca)) as cluster:
        n1, n2 = await two(cluster)
        await cluster.until_all_in_sync(2)
        await cut_over_tls(n1, n2)
        assert await ask_tls(n1, ca, login(b"SCRAM-SHA512", SCRAM_FIRST)) == [Status.AUTH_ERROR]
        assert await ask_tls(n1, ca, login(b"EXTERNAL")) == [Status.AUTH_ERROR], "no certificate"
        other = ca.issue("other", "host.example")
        assert await ask_tls(n1, ca, login(b"EXTERNAL"), cert=other) == [Status.AUTH_ERROR]
        assert await ask_tls(n1, ca, OPEN, REPLICATE, cert=other) == [Status.OK, Status.EACCESS]
        # Who has a node's certificate is let in, and may still do nothing but replicate.
        node = ca.issue("node")
        get = pack_request(Opcode.GET, key=b"k")
        told = await ask_tls(n1, ca, login(b"EXTERNAL"), OPEN, get, cert=node)
        assert told == [Status.OK, Status.OK, Status.EACCESS]
        strange = TestCa(tmp_path, "strange").issue("stranger")
        with pytest.raises(OSError):  # of TLS, or the connection has ended
            await ask_tls(n1, ca, login(b"EXTERNAL"), cert=strange)


async def test_a_wrong_ca_is_told(tmp_path: Path, ca: TestCa) -> None:
    async with ClusterHere(tmp_path, **tls_settings("on", ca)) as cluster:
        second = tls_settings("on", ca) | {"cluster_ca": TestCa(tmp_path, "other").path}
        _, n2 = await two(cluster, second)
        await until_so(lambda: "is not accepted" in problems(n2))
        assert "the certificate of node n1 at 127.0.0.1:" in problems(n2)
        assert "Let --cluster-ca of this node be the CA of that node's --tls-cert" in problems(n2)


async def test_a_certificate_of_a_node_from_another_ca_is_told(tmp_path: Path, ca: TestCa) -> None:
    async with ClusterHere(tmp_path, **tls_settings("mutual", ca)) as cluster:
        own = TestCa(tmp_path, "other").issue("strange")
        _, n2 = await two(cluster, tls_settings("mutual", ca, own))
        await until_so(lambda: "does not accept the certificate of this node" in problems(n2))
        assert "from the CA that --cluster-ca of that node names" in problems(n2)


async def test_an_expired_certificate_is_told(tmp_path: Path, ca: TestCa) -> None:
    past = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    expired = ca.issue("expired", not_after=past)
    async with ClusterHere(tmp_path, **tls_settings("on", ca, expired)) as cluster:
        _, n2 = await two(cluster)
        await until_so(lambda: "certificate has expired" in problems(n2))
        assert "Renew it on that node (--tls-cert)" in problems(n2)


async def test_a_certificate_for_another_host_is_told(tmp_path: Path, ca: TestCa) -> None:
    elsewhere = ca.issue("elsewhere", "host.example")
    async with ClusterHere(tmp_path, **tls_settings("on", ca, elsewhere)) as cluster:
        _, n2 = await two(cluster)
        await until_so(lambda: "not valid for '127.0.0.1'" in problems(n2))
        assert "Issue it for the host that the node advertises" in problems(n2)


async def test_tls_on_one_side_only_is_told(tmp_path: Path, ca: TestCa) -> None:
    async with ClusterHere(tmp_path) as cluster:
        n1, n2 = await two(cluster, tls_settings("on", ca))
        await until_so(lambda: "node n1 offers no TLS" in problems(n2))
        assert "Start it with --tls-cert" in problems(n2)
        await until_so(lambda: "node n1 offers no TLS" in problems(n1))  # whoever is asked
        assert problems(n1).count("node n2 has no link to node n1") == 1
    async with ClusterHere(tmp_path / "other", **tls_settings("on", ca)) as cluster:
        _, n2 = await two(cluster, {})
        await until_so(lambda: "the login at node n1" in problems(n2))
        assert "--cluster-tls must be the same on all nodes" in problems(n2)


async def test_wrong_secret_is_told_by_every_node_and_waiting_plan(
    tmp_path: Path,
) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        n1 = await cluster.become_member("n1", copies=1)
        await cluster.start("n2")
        n2 = await cluster.become_member("n2", secret="w" * 43)
        operations = n1._cluster_operations()
        await until_so(lambda: [node.is_alive for node in operations.status().nodes] == [True] * 2)
        asked = await operations.changes.rebalance(PlainRequest())
        assert asked.is_plan

        def waits_for() -> dict[str, int]:
            plan = operations.status().plan
            return {} if plan is None else plan.waits_for

        await until_so(lambda: waits_for().get("n2", 0) == PARTITIONS // 2)
        for node in (n1, n2):
            assert "node n2 has no link to node n1" in problems(node)
            assert "The secret in cluster.json and --cluster-tls must be the same" in problems(node)
        ran = await ctl(n1.ports.kv, "cluster", "status")
        assert f"{PARTITIONS // 2} copies wait for n2, which has no link to their master" in ran.out
        # With the right one it is let in, however often it failed before.
        await n2.stop()
        await until_so(lambda: "has no link" not in problems(n1))
        content = read_cluster_file(tmp_path / "n2")
        assert content is not None
        write_cluster_file(tmp_path / "n2", msgspec.structs.replace(content, secret=SECRET))
        await cluster.start("n2")
        await until_so(lambda: operations.status().plan is None)
        await until_so(
            lambda: len(cluster.active("n2")) == PARTITIONS // 2
        )  # the last ones are confirmed
        assert "has no link" not in problems(n1)
