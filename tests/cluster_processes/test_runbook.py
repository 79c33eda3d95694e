"""docs/runbook.md: what it is about happens to real nodes, and its commands put it right."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.cli.dcpctl import EXIT_OK, EXIT_PARTIAL
from clients.testing import DcpCluster, DcpServer
from support.shell_blocks import BLOCK, ROOT
from support.waiting import until

VB = 528
"""The partition of the key "hello"."""


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


@pytest.fixture(scope="module")
def cluster() -> Iterator[DcpCluster]:
    with DcpCluster() as cluster:
        with cluster.connect() as kv:
            kv.set("hello", b"world")
        yield cluster


def all_in_sync(cluster: DcpCluster, copies: int, *names: str) -> bool:
    status: dict[str, Any] = cluster.status()
    return (
        status["in_sync_sizes"] == {str(copies): 1024}
        and {node["name"] for node in status["nodes"]} == set(names)
        and not status["problems"]
        and not status["plan"]
    )


def reads_hello(cluster: DcpCluster) -> bool:
    with cluster.connect() as kv:
        return kv.get("hello").value == b"world"


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


def test_all_nodes_lose_power(cluster: DcpCluster) -> None:
    for node in cluster.nodes.values():
        node.kill()
    for node in cluster.nodes.values():
        node.start()
    (block,) = blocks("All nodes lose power")
    until(lambda: all_in_sync(cluster, 3, "n1", "n2", "n3"))
    assert "n3" in paste(cluster, block)
    assert reads_hello(cluster)


def test_last_copy_in_sync_is_lost_and_given_up(cluster: DcpCluster) -> None:
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
    new = DcpServer(tmp_path / "new", "--test-mode", "on")
    new.start()
    try:
        (block,) = blocks(heading)
        paste(cluster, block, NEW=new.address)
        until(lambda: all_in_sync(cluster, 3, *names))
        assert reads_hello(cluster)
    finally:
        cluster.nodes[name] = new
        cluster.nodes = {each: node for each, node in cluster.nodes.items() if each in names}


def test_a_cluster_becomes_one_node_again() -> None:
    with DcpCluster(nodes=2) as cluster:
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
