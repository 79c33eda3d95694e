"""Takes the pictures of the web console in docs/, from a live server with some traffic.

Usage: .venv/bin/python scripts/console_pictures.py    (Debian's chromium, the packages of [test])
"""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from clients.testing import DcpServer  # noqa: E402
from support.following import Following  # noqa: E402

COLOURS = 64
"""Enough for a page, and a third of the bytes."""
TRAFFIC_S = 40


def take(page: Page, name: str) -> None:
    """Write docs/console-NAME.png."""
    with Image.open(io.BytesIO(page.screenshot())) as picture:
        reduced = picture.convert("RGB").quantize(COLOURS)
        reduced.save(ROOT / "docs" / f"console-{name}.png", optimize=True)


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


def pages(page: Page, server: DcpServer) -> None:
    """Visit each page, act, and take its picture."""
    page.goto(server.admin_url)
    page.get_by_label("User").fill("guest")
    page.get_by_label("Password").fill("guest")
    page.get_by_role("button", name="Log in").click()
    page.locator("canvas").first.wait_for()
    page.wait_for_timeout(TRAFFIC_S * 1000)
    take(page, "overview")
    page.get_by_role("link", name="Partitions").click()
    page.get_by_label("Colour by").select_option("Documents")
    page.get_by_role("gridcell", name="Partition 92,").click()
    page.locator("svg.tree").wait_for()
    page.get_by_label("Version (vb_uuid)").fill(page.locator(".card tbody td").nth(8).inner_text())
    page.get_by_label("Seqno", exact=True).fill("9")
    page.get_by_role("button", name="Explain").click()
    page.locator(".answer").wait_for()
    page.set_viewport_size({"width": 1000, "height": 1500})
    page.evaluate("scrollTo(0, 0)")
    take(page, "partitions")
    page.set_viewport_size({"width": 1000, "height": 760})
    page.get_by_role("link", name="Documents").click()
    page.get_by_label("Key", exact=True).fill("key1")
    page.get_by_role("button", name="Look up").click()
    page.locator("table.history").wait_for()
    take(page, "documents")
    page.get_by_role("link", name="Test bench").click()
    page.get_by_label("Command").select_option("DCP_STREAM_REQ")
    page.get_by_label("Answer").select_option("ETMPFAIL")
    page.get_by_role("button", name="Set the fault").click()
    page.get_by_text("Rule 1 is set.").wait_for()
    take(page, "bench")
    server.clear_faults()
    page.emulate_media(color_scheme="dark")
    page.get_by_role("link", name="Consumers").click()
    page.locator(".consumer .state.live").first.wait_for()
    server.stall_streams(name="search-index")
    page.wait_for_timeout(12_000)
    take(page, "consumers")
    page.set_viewport_size({"width": 390, "height": 760})
    page.get_by_role("link", name="Overview").click()
    page.locator("canvas").first.wait_for()
    page.wait_for_timeout(3_000)
    take(page, "phone")


def main() -> None:
    stop = threading.Event()
    with DcpServer(None, "--test-mode") as server:
        with server.connect() as kv:
            for number in range(9):
                kv.set(b"key1", b'{"number": %d}' % number)
        server.branch(92, at=6)
        with server.connect() as kv:
            for number in range(9, 12):
                kv.set(b"key1", b'{"number": %d}' % number)
        server.failover(92, lose=1)
        writer = threading.Thread(target=write, args=(server, stop))
        writer.start()
        try:
            with (
                Following(server.address, "cache-invalidation"),
                Following(server.address, "search-index"),
                sync_playwright() as playwright,
            ):
                browser = playwright.chromium.launch(
                    executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
                )
                pages(browser.new_page(viewport={"width": 1000, "height": 760}), server)
                browser.close()
        finally:
            stop.set()
            writer.join()


if __name__ == "__main__":
    main()
