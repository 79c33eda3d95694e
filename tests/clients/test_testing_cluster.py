"""clients.testing.DcpCluster: each call returns when it has taken effect."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from clients import CheckpointFile, GroupMember, Rollback, ServerCheckpoint, SyncConsumer
from clients.cli.dcpctl import EXIT_OK, EXIT_PARTIAL
from clients.testing import (
    ClusterWaitError,
    DcpCluster,
    DcpServer,
    ServerRefusedError,
    ServerStartError,
    WrongArgumentError,
)
from clients.testing import cluster as module
from clients.testing.control import ControlServer
from vbucket.model.consumer_documents import GROUP_PREFIX
from vbucket.model.ids import vbucket_of

PAGE = Path(__file__).parents[2] / "docs" / "testing-scenarios.md"
VB = 528
"""The partition of the key "hello"."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[DcpCluster]:
    with DcpCluster() as cluster:
        yield cluster


def write(cluster: DcpCluster, *values: bytes) -> None:
    with cluster.connect() as kv:
        for value in values:
            kv.set("hello", value)


def value(cluster: DcpCluster) -> bytes:
    with cluster.connect() as kv:
        return kv.get("hello").value


def explained_by(cluster: DcpCluster, node: str, *words: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "clients.cli", "--server", cluster.nodes[node].address, "explain",
         "partition", "--vb", str(VB), *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode in {EXIT_OK, EXIT_PARTIAL}, run.stderr
    return run.stdout


def explain(cluster: DcpCluster) -> dict[str, Any]:
    return json.loads(explained_by(cluster, "n3", "-o", "json"))


def sent_back_to(cluster: DcpCluster, checkpoint: Path) -> list[int]:
    """Read what is new since the checkpoint; return where partition VB was sent back to."""
    found = []
    store = CheckpointFile(checkpoint)
    with SyncConsumer(
        cluster.address, store=store, until_now=True, on_rollback="restart"
    ) as consumer:
        found = [each.server_seqno for each in consumer.changes() if isinstance(each, Rollback)]
        consumer.save()
    return found


def test_partitions_branch_fail_over_and_lose_changes(cluster: DcpCluster, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    write(cluster, b"1", b"2", b"3", b"4")
    assert sent_back_to(cluster, checkpoint) == []
    assert cluster.branch(VB, 3)["undone_seqnos"] == 1
    assert value(cluster) == b"3"
    assert sent_back_to(cluster, checkpoint) == [3]

    before = cluster.master_of(VB)
    after = cluster.failover(VB)
    assert after == cluster.master_of(VB) != before
    assert sent_back_to(cluster, checkpoint) == [], "nothing was lost"
    cluster.lose(VB, 1)
    assert value(cluster) == b"2"
    assert sent_back_to(cluster, checkpoint) == [2]
    with pytest.raises(ServerRefusedError, match="ends at seqno 2"):
        cluster.lose(VB, 9)

    cluster.move(VB, "n3")
    assert cluster.master_of(VB) == "n3"
    write(cluster, b"5", b"6")
    assert cluster.purge(VB, 3)["purge_seqno"] == 3


def test_nodes_die_stand_still_and_come_back(
    cluster: DcpCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.kill("n2")
    assert "n2" not in cluster.masters().values()
    (dead,) = [copy for copy in explain(cluster)["copies"] if copy["node"] == "n2"]
    assert dead["held"] is None
    assert dead["error"] or not dead["may_become_master"], "its lease lasts for 3 s"
    write(cluster, b"while n2 is away")
    cluster.restart("n2")
    cluster.pause("n3")
    assert "n3" not in cluster.masters().values()
    assert value(cluster) == b"while n2 is away"
    cluster.resume("n3")
    assert set(cluster.status()["in_sync_sizes"]) == {"3"}
    monkeypatch.setattr(module, "WAIT_S", 0.2)
    with pytest.raises(ClusterWaitError, match="n2 is master of partition 5000"):
        cluster._until("n2 is master of partition 5000", lambda: False)


def test_a_cut_takes_copies_out_of_sync_until_it_is_healed(cluster: DcpCluster) -> None:
    cluster.move(VB, "n1")
    cluster.cut("n1", "n2")
    rows = cluster.nodes["n1"].ask("GET", "/api/v1/cluster/map")
    (row,) = [row for row in rows if row["vb"] == VB]
    assert (row["master"], row["in_sync"]) == ("n1", ["n1", "n3"])
    write(cluster, b"while n2 hears nothing of n1")
    explained = explain(cluster)
    assert explained["record"]["master"] == "n1"
    assert {copy["node"]: copy["may_become_master"] for copy in explained["copies"]} == {
        "n1": True, "n2": False, "n3": True,
    }  # fmt: skip
    held = {copy["node"]: copy["held"] for copy in explained["copies"]}
    assert held["n1"]["high_seqno"] == held["n3"]["high_seqno"] > held["n2"]["high_seqno"]
    assert held["n1"]["failover_log"] == held["n3"]["failover_log"]
    text = explained_by(cluster, "n1")
    assert f"partition {VB}: leader epoch" in text
    assert "n2 may not become master: it is not in sync" in text
    assert "n1 may become master: it is the master" in text
    cluster.heal()
    assert cluster.status()["in_sync_sizes"] == {"3": 1024}
    for call in (lambda: cluster.cut("n1", "n1"), lambda: cluster.kill("n9")):
        with pytest.raises((ServerRefusedError, WrongArgumentError), match=r"itself|no node 'n9'"):
            call()
    with pytest.raises(WrongArgumentError, match="no partition 5000"):
        cluster.lose(5000, 1)


@pytest.fixture(scope="module")
def control(cluster: DcpCluster) -> Iterator[str]:
    """The URL of the control API of the cluster."""
    with ControlServer(cluster, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


def test_the_page_of_scenarios_does_what_it_says(cluster: DcpCluster, control: str) -> None:
    page = PAGE.read_text()
    (block,) = re.findall(r"```sh\n(C=.*?)```", page, re.DOTALL)
    curl = block.partition('"')[2].partition('"')[0].replace("http://127.0.0.1:8095", control)
    acts = re.findall(r"\| `(\w+ -d '.*?')` \|", page)
    assert len(acts) == 13
    for act in ["state", *re.findall(r"\$C/(lose .*)", block), *acts]:
        with cluster.connect() as kv:
            for number in range(5):
                kv.set("key1", b"%d" % number)
        words = ["bash", "-c", f"{curl}/{act}"]
        ran = subprocess.run(words, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, (act, ran)
        assert json.loads(ran.stdout), act
    assert cluster.master_of(92) == "n1", "it was moved"


def ask(url: str, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
    sent = {"content-type": "application/json", **headers}
    connection.request(method, path, None if body is None else json.dumps(body), sent)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


@pytest.mark.parametrize(
    ("status", "path", "body", "why"),
    [
        (404, "/explode", {}, "no act 'explode'"),
        (404, "/kill", {"name": "n9"}, "no node 'n9'"),
        (404, "/branch", {"vb": 1024, "at": 0}, "no partition 1024"),
        (400, "/kill", {}, "needs 'name'"),
        (400, "/kill", {"name": 1}, "'name' must be str"),
        (400, "/branch", {"vb": True, "at": 0}, "'vb' must be int"),
        (400, "/heal", {"node": "n1"}, "takes no 'node'"),
        (400, "/heal", [], "no JSON object"),
        (409, "/branch", {"vb": 92, "at": 10**6}, ""),
    ],
)
def test_control_refuses_with_words(
    control: str, status: int, path: str, body: object, why: str
) -> None:
    told, answer = ask(control, "POST", path, body)
    assert (told, why in answer["error"]["why"]) == (status, True), answer
    assert answer["error"]["why"]


def test_web_pages_cannot_act(control: str) -> None:
    form = {"content-type": "text/plain"}
    assert ask(control, "POST", "/heal", {}, **form)[0] == 415
    assert ask(control, "POST", "/heal", {}, host="evil.example:80")[0] == 403
    assert ask(control, "GET", "/heal")[0] == 404


def test_a_demo_is_controlled_until_it_is_ended(tmp_path: Path) -> None:
    words = [
        sys.executable, "-m", "clients.cli", "cluster", "demo", "--nodes", "1",
        "--copies", "1", "--control", "0", "--data", str(tmp_path / "demo"), "-o", "json",
    ]  # fmt: skip
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        try:
            url = json.loads(demo.stdout.readline())["control"]
            status, state = ask(url, "GET", "/state")
            assert (status, set(state["masters"])) == (200, {"n1"})
            assert ask(url, "POST", "/kill", {"name": "n1"}) == (200, {"result": None})
            (node,) = ask(url, "GET", "/state")[1]["nodes"]
            assert node["state"] == "down"
            assert ask(url, "POST", "/restart", {"name": "n1"})[0] == 200
        finally:
            demo.terminate()


def test_a_cluster_of_64_partitions(tmp_path: Path) -> None:
    """Placed, moved and lost like others; a node with 1,024 does not join, and says why."""
    last = 63
    with DcpCluster("--partitions", "64", nodes=2, copies=2, data=tmp_path / "cluster") as cluster:
        status = cluster.status()
        assert (status["partitions"], status["in_sync_sizes"]) == (64, {"2": 64})
        assert sorted(cluster.masters()) == list(range(64))
        with cluster.connect() as kv:
            keys = [f"key-{number}" for number in range(200)]
            for key in keys:
                kv.set(key, key.encode())
            assert len(kv.topology().vbucket_map) == 64
            cluster.move(last, "n2")
            for key in keys:
                assert kv.get(key).value == key.encode()
        with pytest.raises(WrongArgumentError, match="no partition 64"):
            cluster.lose(64, 1)
        with pytest.raises(ServerRefusedError, match="no partition 64"):
            cluster.nodes["n1"].ask("POST", "/api/v1/cluster/move", {"vb": 64, "to": "n2"})
        other = DcpServer(
            tmp_path / "other", "--cluster", "join", "--node-name", "n3", "--partitions", "1024",
            "--cluster-token-file", str(tmp_path / "cluster" / "token"),
        )  # fmt: skip
        with pytest.raises(ServerStartError, match=r"1024 partitions, .* the cluster have 64"):
            other.start()
        assert len(cluster.status()["nodes"]) == 2


def test_what_is_kept_for_a_consumer_survives_failovers(cluster: DcpCluster) -> None:
    """The masters of now, and those that take over from them, purge nothing behind it."""

    def read() -> list[Rollback]:
        with SyncConsumer(
            cluster.address, store=ServerCheckpoint(cluster.address, "kept"), until_now=True,
            on_rollback="restart",
        ) as consumer:  # fmt: skip
            found = [each for each in consumer.changes() if isinstance(each, Rollback)]
            consumer.save()
        return found

    def purge_what_may_go() -> int:
        """Return how far VB is purged."""
        for node in cluster.nodes.values():
            if node.runs:
                node.compact(history="0s", purge_age="0s")
        return int(
            cluster.nodes[cluster.master_of(VB)].ask("GET", f"/api/v1/vbuckets/{VB}")["purge_seqno"]
        )

    def delete() -> None:
        with cluster.connect() as kv:
            kv.delete("hello")
        write(cluster, b"1", b"2")

    write(cluster, b"1")
    read()
    kept = subprocess.run(
        [sys.executable, "-m", "clients.cli", "--server", cluster.address, "consumer", "keep",
         "kept", "--for", "7d", "--bytes", "5GiB"], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert kept.stderr == ""
    before = purge_what_may_go()
    cluster.move(VB, "n2")
    delete()
    assert purge_what_may_go() == before
    cluster.kill("n2")
    assert purge_what_may_go() == before
    delete()
    assert purge_what_may_go() == before
    cluster.restart("n2")
    cluster.move(VB, "n2")
    assert purge_what_may_go() == before
    assert read() == []
    subprocess.run(
        [sys.executable, "-m", "clients.cli", "--server", cluster.address, "consumer", "forget",
         "kept", "--yes"], capture_output=True, check=True,
    )  # fmt: skip
    assert purge_what_may_go() > before, "the same purge, when nothing is kept"


async def test_a_group_goes_on_with_the_next_master(cluster: DcpCluster) -> None:
    """Whoever has the group's document coordinates it; its epoch goes with it."""
    vb_id = vbucket_of(GROUP_PREFIX + b"moved")
    cluster.move(vb_id, "n2")
    async with GroupMember(cluster.address, "moved") as first:
        async with GroupMember(cluster.address, "moved") as second:
            share = second.share
            assert share is not None
            assert (share.epoch, len(share.members)) == (2, 2)
            await asyncio.to_thread(cluster.kill, "n2")
            later = GroupMember(cluster.address, "moved")
            async with later:
                assert later.share is not None
                assert later.share.epoch > 2
                assert set(share.members) | {later.member} >= set(later.share.members)
        while first.share is None or first.share.members != (first.member,):
            await first._changed.wait()
        assert len(first.share.vbuckets) == 1024
    await asyncio.to_thread(cluster.restart, "n2")
