"""The test bench of the console on a node of a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, expect

from clients.testing import DcpCluster

VB = 528
"""The partition of the key "hello"."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[DcpCluster]:
    with DcpCluster(nodes=2, copies=2) as cluster:
        yield cluster


def test_the_test_bench_acts_on_all_copies(log_in, cluster: DcpCluster) -> None:
    with cluster.connect() as kv:
        for number in range(8):
            kv.set("hello", b"%d" % number)
    master = cluster.master_of(VB)
    (other,) = cluster.nodes.keys() - {master}

    def high_seqnos() -> list[int]:
        return [node.ask("GET", f"/api/v1/vbuckets/{VB}")["high_seqno"] for node in
                cluster.nodes.values()]  # fmt: skip

    def act(title: str, fields: dict[str, object]) -> Locator:
        card = page.get_by_role("region", name=title, exact=True)
        for label, value in fields.items():
            card.get_by_label(label).fill(str(value))
        card.get_by_role("button", name=title).click()
        page.get_by_role("dialog").get_by_role("button", name=title).click()
        return card

    def open_bench(name: str):  # type: ignore[no-untyped-def]
        found = log_in(on=cluster.nodes[name], title="Cluster")
        found.get_by_role("link", name="Test bench").click()
        return found

    page = open_bench(other)
    card = act("Branch", {"Branch: partition": VB, "At seqno": 6})
    expect(card).to_contain_text(f"its master is {master} ({cluster.nodes[master].admin_url}/)")
    assert high_seqnos() == [8, 8]

    page = open_bench(master)
    card = act("Branch", {"Branch: partition": VB, "At seqno": 6})
    expect(card.get_by_role("status")).to_contain_text("2 changes undone")
    assert high_seqnos() == [6, 6]
    card = act("Branch many", {"Branch many: partitions": "0-1023", "Per cent": 50})
    expect(card.get_by_role("status")).to_contain_text("3 changes undone")
    expect(card.get_by_role("status")).to_contain_text(f"masters at {other}")
    assert high_seqnos() == [3, 3]
    card = act("Fail over", {"Fail over: partition": VB, "Changes that are lost": 1})
    expect(card.get_by_role("status")).to_contain_text(f"changes 3 to 3 of partition {VB} are lost")
    cluster._until("the other node is master", lambda: cluster.masters()[VB] == other)
    assert high_seqnos() == [2, 2]
