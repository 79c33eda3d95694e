"""docs/runbook.md: what it is about happens to real nodes, and its commands put it right."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients import DcpdError, KvClient
from clients.cli.dcpctl import EXIT_OK, EXIT_PARTIAL
from clients.testing import DcpCluster, DcpServer, ServerRefusedError
from support.credentials import TestCa
from support.shell_blocks import BLOCK, ROOT
from support.waiting import until

FEW = ("--partitions", "64")
"""They start in a third of the time."""
VB = 16
"""The partition of the key "hello" among them."""


def blocks(heading: str) -> list[str]:
    """The commands of a section."""
    page = (ROOT / "docs" / "runbook.md").read_text()
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = [text for info, text in BLOCK.findall(section) if info.strip() == "sh"]
    assert found, heading
    return found


def paste(cluster: DcpCluster, block: str, **variables: str) -> str:
    """Run commands as a person does who has dcpctl on the path. Each has to succeed; the last one
    may say that a node did not answer.
    """
    environment = {
        **os.environ, "DCPCTL_SERVER": cluster.address, **variables,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    ran = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", block], env=environment, cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode in {EXIT_OK, EXIT_PARTIAL}, (block, ran.stdout, ran.stderr)
    return ran.stdout


NEWER = """
import sys
from failover.replication import messages
messages.FORMAT, messages.FORMAT_OLDEST = messages.FORMAT + 1, messages.FORMAT
from dcp.server.main import main
sys.exit(main())
"""


class NewerServer(DcpServer):
    """A dcpd of the version after this one."""

    def _launch(self, arguments: list[str]) -> subprocess.Popen[str]:
        with self.log_path.open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-c", NEWER, *arguments],
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip


def masters_return_soon(cluster: DcpCluster) -> None:
    """Preferred masters get their partitions back after a second in sync, not after a minute."""
    cluster.nodes["n1"].ask("POST", "/api/v1/cluster/set", {"masters_return_s": 1.0})


@pytest.fixture(scope="module")
def cluster() -> Iterator[DcpCluster]:
    with DcpCluster(*FEW) as cluster:
        masters_return_soon(cluster)
        with cluster.connect() as kv:
            kv.set("hello", b"world")
        yield cluster


def all_in_sync(cluster: DcpCluster, copies: int, *names: str) -> bool:
    status: dict[str, Any] = cluster.status()
    return (
        status["in_sync_sizes"] == {str(copies): status["partitions"]}
        and {node["name"] for node in status["nodes"]} == set(names)
        and not status["problems"]
        and not status["plan"]
    )


def reads_hello(cluster: DcpCluster) -> bool:
    with cluster.connect() as kv:
        return kv.get("hello").value == b"world"


def writes_everywhere(cluster: DcpCluster, value: bytes) -> None:
    """Write to most partitions, and read it again."""
    documents = dict.fromkeys((f"k{number}" for number in range(2000)), value)

    async def write() -> None:
        async with KvClient.connect(cluster.address) as kv:
            results = await kv.set_many(documents)
            assert [each for each in results if isinstance(each, DcpdError)] == []
            found = await kv.get_many(documents)
        assert {each.value for each in found.values()} == {value}
        assert len(found) == len(documents)

    asyncio.run(write())


def is_down(cluster: DcpCluster, name: str) -> bool:
    """Whether the lease of a dead node is over."""
    (node,) = [each for each in cluster.status()["nodes"] if each["name"] == name]
    return not node["is_alive"]


def test_a_slow_node_is_emptied_and_gets_its_part_back(cluster: DcpCluster) -> None:
    (block,) = blocks("A node is slow")
    drain, rest = block.split("\n", 1)
    paste(cluster, drain)
    assert "n2" not in cluster.masters().values()
    paste(cluster, rest)
    until(lambda: all_in_sync(cluster, 3, "n1", "n2", "n3"))
    assert "n2" in cluster.masters().values()
    audits = [node.data / "audit.log" for node in cluster.nodes.values()]
    rows = [json.loads(line) for audit in audits for line in audit.read_text().splitlines()]
    who = {row["action"]: row["user"] for row in rows if row["event"] == "admin"}
    verbs = ("drain", "undrain", "rebalance")
    assert {who[f"POST /api/v1/cluster/{verb}"] for verb in verbs} == {"guest"}


def test_all_nodes_lose_power(cluster: DcpCluster) -> None:
    for node in cluster.nodes.values():
        node.kill()
    for node in cluster.nodes.values():
        node.start()
    (block,) = blocks("All nodes lose power")
    until(lambda: all_in_sync(cluster, 3, "n1", "n2", "n3"))
    assert "n3" in paste(cluster, block)
    assert reads_hello(cluster)


def test_a_rolling_upgrade_has_two_versions_side_by_side(cluster: DcpCluster) -> None:
    """Today's dcpd is the older one. The newer one speaks one more format of the messages."""
    (block,) = blocks("A rolling upgrade")
    for name, old in list(cluster.nodes.items()):
        assert old.stop() == 0
        new = cluster.nodes[name] = NewerServer(old.data, *old._arguments)
        new.port, new.admin_port = old.port, old.admin_port
        new.start()
        until(lambda: all_in_sync(cluster, 3, "n1", "n2", "n3"))
        assert name in paste(cluster, block)
        writes_everywhere(cluster, name.encode())
        if name == "n2":  # one that is still of the older version starts beside newer ones
            cluster.nodes["n3"].restart()
            until(lambda: all_in_sync(cluster, 3, "n1", "n2", "n3"))
    assert reads_hello(cluster)
    for name, new in list(cluster.nodes.items()):  # and back, for the other tests
        new.stop()
        cluster.nodes[name] = DcpServer(new.data, *new._arguments)
        cluster.nodes[name].port, cluster.nodes[name].admin_port = new.port, new.admin_port
        cluster.nodes[name].start()
    until(lambda: all_in_sync(cluster, 3, "n1", "n2", "n3"))


def test_a_node_gets_another_address(cluster: DcpCluster) -> None:
    node = cluster.nodes["n2"]
    before = node.address
    (block,) = blocks("A node gets another address")
    assert node.stop() == 0
    node.port = node.admin_port = 0
    node.start()
    assert node.address != before
    until(lambda: all_in_sync(cluster, 3, "n1", "n2", "n3"))
    assert node.address in paste(cluster, block)
    until(lambda: "n2" in cluster.masters().values())
    writes_everywhere(cluster, b"moved")


def test_last_copy_in_sync_is_lost_and_given_up(cluster: DcpCluster) -> None:
    until(lambda: list(cluster.masters().values()).count("n2") > 5)  # it was away before this test
    cluster.move(VB, "n2")
    cluster.cut("n2", "n1")
    cluster.cut("n2", "n3")
    cluster.nodes["n2"].kill()
    until(lambda: is_down(cluster, "n2"))
    look, act = blocks("The last copy in sync is lost")
    told = paste(cluster, look)
    assert "n1 may not become master: it is not in sync" in told
    assert "copies that may take over, with what they have" in told
    assert "unclean" in paste(cluster, act)
    until(lambda: cluster.masters()[VB] in {"n1", "n3"})
    cluster.nodes["n2"].start()
    cluster.heal()
    assert reads_hello(cluster)


@pytest.mark.parametrize(
    ("heading", "gone", "name"),
    [("A node dies for good", "n3", "n4"), ("A node's disk is replaced", "n2", "n2")],
)
def test_another_node_takes_the_place_of_a_lost_one(
    cluster: DcpCluster, tmp_path: Path, heading: str, gone: str, name: str
) -> None:
    cluster.kill(gone)
    names = {each["name"] for each in cluster.status()["nodes"]} - {gone} | {name}
    until(lambda: is_down(cluster, gone))
    new = DcpServer(tmp_path / "new", "--test-mode", "on", *FEW)
    new.start()
    try:
        (block,) = blocks(heading)
        paste(cluster, block, NEW=new.address)
        until(lambda: all_in_sync(cluster, 3, *names))
        assert reads_hello(cluster)
    finally:
        cluster.nodes[name] = new
        cluster.nodes = {each: node for each, node in cluster.nodes.items() if each in names}


def test_a_whole_rack_goes_and_comes_back() -> None:
    cluster = DcpCluster(*FEW, copies=2)
    for name, node in cluster.nodes.items():
        node._arguments = (*node._arguments, "--rack", "r1" if name == "n1" else "r2")
    with cluster:
        masters_return_soon(cluster)
        rows = cluster.nodes["n1"].ask("GET", "/api/v1/cluster/map")
        assert all("n1" in row["copies"] for row in rows), "each rack has a copy"
        with cluster.connect() as kv:
            kv.set("hello", b"world")
        for name in ("n2", "n3"):
            cluster.nodes[name].kill()
        until(lambda: set(cluster.masters().values()) == {"n1"})
        (block,) = blocks("A whole rack goes")
        assert "n1" in paste(cluster, block)
        assert reads_hello(cluster)
        for name in ("n2", "n3"):
            cluster.nodes[name].start()
        until(lambda: all_in_sync(cluster, 2, "n1", "n2", "n3"))
        until(lambda: {"n2", "n3"} <= set(cluster.masters().values()))


def test_certificates_of_another_ca_without_a_stop(tmp_path: Path) -> None:
    old, new = TestCa(tmp_path, "old"), TestCa(tmp_path, "new")
    trusted = tmp_path / "nodes-ca.pem"
    trusted.write_bytes(old.path.read_bytes())
    cluster = DcpCluster(*FEW, "--cluster-tls", "mutual", "--cluster-ca", str(trusted), nodes=2)
    certificates = {}
    for name, node in cluster.nodes.items():
        certificates[name] = old.issue(name)
        ports = ("--tls-port", "0", "--admin-tls-port", "0")
        node._arguments = (*node._arguments, "--tls-cert", str(certificates[name]), *ports)
    accept, replace, drop = blocks("Certificates change")
    files = {"NEW_CA": str(new.path), "CLUSTER_CA": str(trusted)}
    with cluster:
        with cluster.connect() as kv:
            kv.set("hello", b"world")
        paste(cluster, accept, **files)
        for name, certificate in certificates.items():
            issued = str(new.issue(f"{name}-new"))
            paste(cluster, replace, NEW_CERT=issued, TLS_CERT=str(certificate))
            cluster.restart(name)  # links are made anew: this certificate, and the other one's
        paste(cluster, drop, **files)
        cluster.restart("n2")
        assert reads_hello(cluster)
        until(lambda: not cluster.status()["problems"])


def test_the_secret_changes_while_nodes_run() -> None:
    (block,) = blocks("The secret changes")
    with DcpCluster(*FEW, nodes=2) as cluster:
        with cluster.connect() as kv:
            kv.set("hello", b"world")
        token = (cluster.data / "token").read_text().strip()
        paste(cluster, block, TOKEN_FILE=str(cluster.data / "token"))
        assert (cluster.data / "token").read_text().strip() != token
        for name in cluster.nodes:
            (secret,) = cluster.nodes[name].ask("POST", "/api/v1/cluster/secrets", {})["secrets"]
            assert secret.startswith("1.")
            cluster.restart(name)  # both sides log in anew, at the metadata store, too
        assert reads_hello(cluster)
        until(lambda: not cluster.status()["problems"])
        with DcpServer(cluster.data / "n3", *FEW) as stranger:
            with pytest.raises(ServerRefusedError, match="another secret"):
                stranger.ask("POST", "/api/v1/cluster/join", {"token": token, "name": "n3"})
            cluster.kill("n2")
            with pytest.raises(AssertionError, match="node n2 did not take part"):
                paste(cluster, block, TOKEN_FILE=os.devnull)
            cluster.restart("n2")
            paste(cluster, block, TOKEN_FILE=os.devnull)  # it goes on


def test_a_cluster_becomes_one_node_again() -> None:
    with DcpCluster(*FEW, nodes=2) as cluster:
        with cluster.connect() as kv:
            kv.set("hello", b"world")
        (block,) = blocks("From one node to a cluster, and back")
        paste(cluster, block)
        until(lambda: all_in_sync(cluster, 1, "n1"))
        assert reads_hello(cluster)


def test_each_section_has_its_test() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    source = Path(__file__).read_text()
    for heading in (line[3:] for line in page.splitlines() if line.startswith("## ")):
        assert f'"{heading}"' in source, heading
