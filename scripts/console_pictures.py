"""Takes the pictures of the web console in docs/, from live servers with some traffic: one alone,
and three in a cluster, of which one is killed. It also writes sheets with every page of each of
these, in light and dark, 1280 and 390 wide: docs/console-sheet-*.png.

Usage: .venv/bin/python scripts/console_pictures.py    (Debian's chromium, the packages of [test])
"""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from clients.testing import DcpServer  # noqa: E402
from support.load import Following  # noqa: E402
from support.server import ClusterProcesses  # noqa: E402
from support.waiting import until  # noqa: E402

COLOURS = 64
"""Enough for a page, and a third of the bytes."""
TRAFFIC_S = 40
SHEET_COLOURS = 24
SCALES = {1280: 3, 390: 2}
"""Width -> how much smaller a page is on a sheet."""


def take(page: Page, name: str) -> None:
    """Write docs/console-NAME.png."""
    with Image.open(io.BytesIO(page.screenshot())) as picture:
        reduced = picture.convert("RGB").quantize(COLOURS)
        reduced.save(ROOT / "docs" / f"console-{name}.png", optimize=True)


def sheets(browser: Browser, url: str, state: str) -> None:
    """Write docs/console-sheet-STATE-COLOUR-WIDTH.png: all pages, side by side."""
    for scheme in ("light", "dark"):
        page = look(browser, url, scheme, 1280)
        shots: dict[int, list[Image.Image]] = {width: [] for width in SCALES}
        for title in page.get_by_role("navigation").get_by_role("link").all_inner_texts():
            go(page, title)
            page.locator("main > .loading").wait_for(state="detached")
            page.wait_for_timeout(2_500)  # the next sample
            for width, scale in SCALES.items():
                page.set_viewport_size({"width": width, "height": 860})
                page.wait_for_timeout(300)
                with Image.open(io.BytesIO(page.screenshot())) as picture:
                    shots[width].append(picture.convert("RGB").reduce(scale))
            page.set_viewport_size({"width": 1280, "height": 860})
        for width, pictures in shots.items():
            sheet_of(pictures, 4 if width > 1000 else 6).save(
                ROOT / "docs" / f"console-sheet-{state}-{scheme}-{width}.png", optimize=True
            )
        page.close()


def sheet_of(pictures: list[Image.Image], columns: int) -> Image.Image:
    """Return one picture with others in rows."""
    width, height = pictures[0].size
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * (width + 8), rows * (height + 8)), (128, 128, 128))
    for number, picture in enumerate(pictures):
        sheet.paste(picture, (number % columns * (width + 8), number // columns * (height + 8)))
    return sheet.quantize(SHEET_COLOURS)


def write(server: DcpServer, stop: threading.Event) -> None:
    """Write and read documents until the end."""
    with server.connect() as kv:
        number = 0
        while not stop.wait(0.003):
            number += 1
            key = b"order:%d" % (number * 7919 % 3000)
            kv.set(key, b'{"number": %d, "state": "paid"}' % number)
            if number % 3 == 0:
                kv.get(key)


def go(page: Page, title: str) -> None:
    """Open a page."""
    page.get_by_role("navigation").get_by_role("link", name=title, exact=True).click()
    page.get_by_role("heading", level=1, name=title, exact=True).wait_for()


def look(browser: Browser, url: str, scheme: str, width: int) -> Page:
    """Open the console in one look, and log in."""
    page = browser.new_page(viewport={"width": width, "height": 860}, color_scheme=scheme)
    page.goto(url)
    page.get_by_label("User").fill("guest")
    page.get_by_label("Password").fill("guest")
    page.get_by_role("button", name="Log in").click()
    page.locator("main[data-sample]").wait_for()
    return page


def of_one_node(browser: Browser, server: DcpServer) -> None:
    """Visit each page of a node alone, act, and take its picture."""
    page = look(browser, server.admin_url, "light", 1280)
    page.wait_for_timeout(TRAFFIC_S * 1000)
    take(page, "overview")
    go(page, "Changes")
    page.get_by_label("Key begins with").fill("order:1")
    page.keyboard.press("Enter")
    page.wait_for_timeout(8_000)
    row = page.locator("table.tail tbody tr", has_text="set").first
    vb_id, seqno = row.locator("td").last.inner_text().split(":")
    server.branch(int(vb_id), at=int(seqno.replace(",", "")) - 1)
    page.get_by_text("went back to seqno").first.wait_for()
    take(page, "changes")
    go(page, "Documents")
    page.get_by_role("table", name="Documents by key").wait_for()
    take(page, "documents")
    page.get_by_label("Key", exact=True).fill("key1")
    page.get_by_role("button", name="Look up").click()
    page.get_by_text("What changed").first.click()
    take(page, "document")
    go(page, "Test bench")
    page.get_by_label("Command").select_option("DCP_STREAM_REQ")
    page.get_by_label("Answer").select_option("ETMPFAIL")
    page.get_by_role("button", name="Set the fault").click()
    page.get_by_text("Rule 1 is set.").wait_for()
    take(page, "bench")
    server.clear_faults()
    go(page, "Backups")
    page.get_by_role("table", name="Backups, the newest first").wait_for()
    take(page, "backups")
    sheets(browser, server.admin_url, "one")
    page = look(browser, server.admin_url, "dark", 1280)
    go(page, "Consumers")
    page.locator(".consumer .state.live").first.wait_for()
    server.stall_streams(name="search-index")
    page.wait_for_timeout(12_000)
    take(page, "consumers")
    page.set_viewport_size({"width": 1000, "height": 1500})
    go(page, "Partitions")
    page.get_by_label("Colour by").select_option("Documents")
    page.get_by_role("gridcell", name="Partition 92,").click()
    page.locator("svg.tree").wait_for()
    page.get_by_label("Version (vb_uuid)").fill(page.locator(".card tbody td").nth(8).inner_text())
    page.get_by_label("Seqno", exact=True).fill("9")
    page.get_by_role("button", name="Explain").click()
    page.locator(".answer").wait_for()
    page.evaluate("scrollTo(0, 0)")
    take(page, "partitions")
    page = look(browser, server.admin_url, "dark", 390)
    page.wait_for_timeout(6_000)
    take(page, "phone")


def of_three_nodes(browser: Browser, folder: Path) -> None:
    """Take the page Cluster with three nodes, and with one of them dead."""
    with ClusterProcesses(folder) as cluster:
        until(lambda: len(cluster.alive()) == len(cluster.nodes))
        cluster.rebalance()
        cluster.until_in_sync(3)
        stop = threading.Event()
        writer = threading.Thread(target=write, args=(cluster.nodes["a"], stop))
        writer.start()
        try:
            url = cluster.nodes["b"].admin_url
            pages = {
                "cluster": look(browser, url, "light", 1280),
                "cluster-phone": look(browser, url, "dark", 390),
            }
            for page in pages.values():
                go(page, "Cluster")
            pages["cluster"].wait_for_timeout(8_000)
            take(pages["cluster"], "cluster")
            sheets(browser, url, "three")
            cluster.nodes["c"].kill()
            pages["cluster"].locator(".nodes tr.row-bad").wait_for()
            pages["cluster"].get_by_role("radio", name="Copies in sync").check(force=True)
            pages["cluster"].wait_for_timeout(8_000)
            take(pages["cluster"], "cluster-dead")
            take(pages["cluster-phone"], "cluster-phone")
            sheets(browser, url, "dead")
        finally:
            stop.set()
            writer.join()


def main() -> None:
    stop = threading.Event()
    with sync_playwright() as playwright, DcpServer(None, "--test-mode") as server:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        with TemporaryDirectory() as folder:
            of_three_nodes(browser, Path(folder))
        with server.connect() as kv:
            for number in range(9):
                kv.set(b"key1", b'{"number": %d}' % number)
        server.branch(92, at=6)
        with server.connect() as kv:
            for number in range(9, 12):
                kv.set(b"key1", b'{"number": %d, "lines": [{"sku": "A-1"}]}' % number)
        server.failover(92, lose=1)
        writer = threading.Thread(target=write, args=(server, stop))
        writer.start()
        with TemporaryDirectory() as folder:
            for act in ("run", "run", "verify"):
                ctl = [sys.executable, "-m", "clients.cli", "--server", server.address, "backup"]
                subprocess.run([*ctl, act, "--archive", f"{folder}/nightly"], cwd=ROOT, check=True)
        try:
            with (
                Following(server.address, "cache-invalidation"),
                Following(server.address, "search-index"),
            ):
                of_one_node(browser, server)
        finally:
            stop.set()
            writer.join()
        browser.close()


if __name__ == "__main__":
    main()
