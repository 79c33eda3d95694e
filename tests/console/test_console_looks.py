"""Every page on one node, on three, and on three of which one is dead: axe finds nothing, nothing
is cut off, and what is wrong is said everywhere. In light and dark, on a desk and on a phone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import Page, expect

from clients.testing import DcpServer
from support.cluster_here import PARTITIONS
from support.load import Following
from support.server import ClusterProcesses, DcpdProcess
from support.waiting import until
from vbucket.model.ids import vbucket_of

pytestmark = pytest.mark.crash

AXE: Final = (
    Path(__file__).parents[2] / ".venv" / "npm" / "node_modules" / "axe-core" / "axe.min.js"
)
WIDTHS: Final = (1280, 390)
BYTES_MAX: Final = 200 * 1024
"""Of all files that a page loads."""
KEYS: Final = [b"order:%d" % number for number in range(30)]
SCHEMES: Final = {
    "light": ["wcag2a", "wcag2aa", "wcag21aa", "best-practice"],
    "dark": ["color-contrast"],
}
"""Scheme -> what axe looks at: only colours differ in the second one."""
FIND: Final = """async (rules) => (await axe.run(document, {runOnly: rules})).violations.map(
  (rule) => [rule.id, ...rule.nodes.map((node) => node.html)].join(" "))"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    with ClusterProcesses(tmp_path_factory.mktemp("looks")) as cluster:
        until(lambda: len(cluster.alive()) == 3)
        cluster.rebalance()
        cluster.until_in_sync(3)
        with cluster.nodes["a"].connect() as kv:
            for key in KEYS:
                kv.set(key, b'{"lines": [{"sku": "A"}]}')
        yield cluster


@pytest.fixture(scope="module")
def axe() -> str:
    if not AXE.exists():
        pytest.skip("axe-core is missing: scripts/test installs it")
    return AXE.read_text()


def pages_of(page: Page) -> list[str]:
    return page.get_by_role("navigation").get_by_role("link").all_inner_texts()


def look_at(log_in: Any, axe: str, node: DcpServer, title: str) -> None:
    """Open every page in every look; `title` is the page after the login."""
    for scheme, rules in SCHEMES.items():
        page = log_in(
            on=node, title=title, color_scheme=scheme,
            bypass_csp=True,  # axe is no script of the console
        )  # fmt: skip
        page.evaluate(axe)
        for name in pages_of(page):
            page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
            expect(page.get_by_role("heading", level=1, name=name, exact=True)).to_be_visible()
            expect(page.locator("main > .loading")).to_have_count(0)
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 844})
                assert page.evaluate(FIND, rules) == [], (name, scheme, width)
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)


def backup(server: DcpServer, *arguments: object) -> int:
    command = [sys.executable, "-m", "clients.cli", "--server", server.address, "backup"]
    words = [*command, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, check=False, timeout=60).returncode


def test_one_node(log_in, axe: str, server: DcpdProcess, tmp_path: Path) -> None:
    with server.connect() as kv:
        kv.set(b"key", b"x")
    archive = tmp_path / "archive"
    assert backup(server, "run", "--archive", archive) == 0
    (segment,) = archive.glob("runs/000001/*.seg*")
    segment.write_bytes(segment.read_bytes()[:-1])
    assert backup(server, "verify", "--archive", archive) == 1
    with Following(server.address, "looks"):
        look_at(log_in, axe, server, "Overview")
    page = log_in(on=server)
    page.get_by_role("navigation").get_by_role("link", name="Backups").click()
    rows = page.locator("table.backups tbody tr")
    expect(rows).to_have_count(2)
    check, run = rows.all()
    expect(run).to_contain_text("run 1")
    expect(check).to_contain_text("damaged")
    expect(check).to_have_class("row-bad")
    expect(page.locator(".tile")).to_contain_text("done")


def test_the_versions_of_a_consumer_and_documents_as_of_a_moment(log_in, server) -> None:
    with server.connect() as kv:
        kv.set(b"then", b"old")
    page = log_in(on=server)
    with Following(server.address, "versions"):
        page.get_by_role("navigation").get_by_role("link", name="Consumers").click()
        page.get_by_text("Versions of its streams").first.click()
        expect(page.get_by_text("stands in the version that it asked with")).to_be_visible()
        expect(page.locator(".consumer table tbody tr").first).to_be_visible()
    page.get_by_role("navigation").get_by_role("link", name="Documents").click()
    expect(page.locator("table.documents tbody")).to_contain_text("then")
    page.get_by_label("As of (empty: now)").fill("2020-01-01T00:00:00")
    page.get_by_label("As of (empty: now)").press("Tab")
    expect(page.get_by_role("heading", name="No documents")).to_be_visible()
    expect(page.get_by_text("is empty as of then")).to_be_visible()


def test_three_nodes_and_an_act_with_its_preview(log_in, axe: str, cluster) -> None:
    look_at(log_in, axe, cluster.nodes["b"], "Cluster")
    page = log_in(on=cluster.nodes["b"], title="Cluster")
    expect(page.get_by_text(f"All {PARTITIONS} partitions take writes")).to_be_visible()
    expect(page.locator(".pill")).to_have_text("Healthy")
    masters = cluster.masters()["c"]
    page.get_by_role("button", name="Drain c").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator("tbody tr").nth(2)).to_contain_text(f"{masters} → 0")
    dialog.get_by_role("button", name="Cancel").click()
    assert cluster.status("a")["plan"] is None
    page.get_by_role("navigation").get_by_role("link", name="Documents").click()
    expect(page.locator("table.documents tbody tr")).to_have_count(30)
    on_a = {each["vb"] for each in cluster.partition_map("b") if each["master"] == "a"}
    key = next(key for key in KEYS if vbucket_of(key, PARTITIONS) in on_a)
    page.get_by_role("button", name=key.decode(), exact=True).click()
    expect(page.locator(".notice.warn")).to_contain_text(cluster.nodes["a"].admin_url)
    expect(page.get_by_role("button", name="Edit")).to_have_count(0)
    page.get_by_role("navigation").get_by_role("link", name="Cluster").click()
    page.get_by_role("radio", name="Copies in sync").check(force=True)
    expect(page.get_by_text(f"all copies in sync {PARTITIONS}")).to_be_visible()


def test_one_of_three_is_dead_and_then_two(log_in, axe: str, cluster) -> None:
    node = cluster.nodes["a"]
    cluster.nodes["c"].kill()
    until(lambda: "c" not in cluster.alive() and cluster.masters()["c"] == 0)
    look_at(log_in, axe, node, "Cluster")
    page = log_in(on=node, title="Cluster")
    expect(page.locator(".pill")).to_have_text("Down: c")
    expect(page.locator(".nodes tr.row-bad")).to_contain_text("down")
    expect(page.locator(".timeline")).to_contain_text("node c is down")
    expect(page.locator(".timeline")).to_contain_text("was elected master of")
    cluster.nodes["b"].kill()
    until(lambda: "b" not in cluster.alive())
    expect(page.locator(".pill")).to_contain_text("take no writes")
    expect(page.locator("main .health")).to_contain_text(
        f"partitions of {PARTITIONS} take no writes"
    )
    page.get_by_role("navigation").get_by_role("link", name="Overview").click()
    expect(page.locator("main .health").first).to_contain_text("of the cluster take no writes")
    expect(page.get_by_text("Ready.")).to_have_count(0)
    for name in "bc":
        cluster.nodes[name].start()
    expect(page.get_by_text("Ready.")).to_be_visible()


def test_all_files_together_are_small(log_in) -> None:
    page = log_in()
    sizes = page.evaluate(
        "performance.getEntriesByType('resource').filter((entry) => "
        "entry.name.includes('/console/')).map((entry) => entry.decodedBodySize)"
    )
    assert len(sizes) > 15
    assert sum(sizes) < BYTES_MAX
