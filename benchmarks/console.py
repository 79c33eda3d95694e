"""What the web console costs, in a real Chromium on the same machine.

    python -m benchmarks.console --seconds 20 --rounds 3

It needs Debian's chromium and the packages of the extra [test]. The output is one JSON document:

- files_bytes    all files of the console
- first_paint_ms the first text on the screen, from the start of the navigation, in a browser that
                 has no file yet (median and maximum of ten); and when the form for the login was
                 seen to be there
- work_us        processor time of the loop every two seconds, best of 50, in a node without data: a
                 sample (always), and what an open page adds
- idle           the server's processor time in percent of a core, nobody writes: no page, then each
                 page open
- writing        the same while the load generator writes as fast as it can, with its writes a
                 second. `us_per_write` compares better than percent, because the rate changes, too
- browser        processor time of the browser with the page open, in percent of a core
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
from playwright.sync_api import Browser, Page, sync_playwright

from clients.testing import DcpServer
from dcp.server.access.users import USERS_FILE, Users
from dcp.server.admin.routes.console_files import console_files
from dcp.server.config.settings import Settings
from dcp.server.node import Node
from dcp.server.observe.event_log import EventLog
from dcp.server.report.console_view import ConsoleView

PAGES: Final = ("none", "Overview", "Partitions", "Consumers")
PAINTS: Final = 10
GENERATOR: Final = ("--protocol", "binary", "--connections", "8", "--in-flight", "64")
WARM_CHANGES: Final = 10_000
SETTLE_S: Final = 3.0
"""The first event of a page is larger than those that follow."""


def processor_s(pid: int) -> float:
    """Processor seconds of a process and its children, threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(one) for task in tasks for one in (task / "children").read_text().split()]
    return own + sum(processor_s(child) for child in children)


def server_s(server: DcpServer) -> float:
    """Processor seconds of the server's own process, which has the loop."""
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def first_paint_ms(browser: Browser, server: DcpServer) -> dict[str, float]:
    """Open the page in new contexts, which have no cache."""
    found, forms = [], []
    for _ in range(PAINTS):
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.admin_url)
        page.get_by_label("Password").wait_for()
        form_ms = page.evaluate("performance.now()")
        found.append(
            page.evaluate(
                "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ??"
                " new Promise((resolve) => new PerformanceObserver((list) =>"
                " resolve(list.getEntries()[0].startTime))"
                ".observe({type: 'paint', buffered: true}))"
            )
        )
        forms.append(form_ms)
        context.close()
    return {
        "median": round(statistics.median(found), 1),
        "max": round(max(found), 1),
        "login_form_median": round(statistics.median(forms), 1),
    }


async def work_us(folder: Path) -> dict[str, float]:
    """Measure what a sample and the events cost, in a node of this process."""
    settings = msgspec.structs.replace(Settings(), data=folder, port=0, admin_port=0)
    node = Node(settings, Users(folder / USERS_FILE), EventLog(logging.getLogger("console")))
    await node.start()
    sampler = node.serving.sampler
    view = ConsoleView(sampler._sources, sampler)  # noqa: SLF001

    def best_us(*work: Callable[[], object]) -> float:
        found = []
        for _ in range(50):
            sampler.sample()  # what is kept for a sample is made anew
            began = time.process_time_ns()
            for one in work:
                one()
            found.append(time.process_time_ns() - began)
        return min(found) / 1000

    report = {
        "sample": best_us(sampler.sample),
        "Overview": best_us(view.head, lambda: view.overview(sampler.ring.last - 1)),
        "Partitions": best_us(view.head, view.partition_map),
        "Consumers": best_us(view.head, lambda: view.consumers(0)),
    }
    await node.stop()
    return {name: round(value) for name, value in report.items()}


def open_page(browser: Browser, server: DcpServer, title: str) -> Page:
    """Log in, and show a page."""
    page = browser.new_context(base_url=server.admin_url).new_page()
    page.goto("/")
    page.get_by_label("User").fill("guest")
    page.get_by_label("Password").fill("guest")
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("link", name=title).click()
    page.locator("main[data-sample]").wait_for()
    return page


def generate(server: DcpServer, seconds: float) -> subprocess.Popen[str]:
    """Start the load generator."""
    return subprocess.Popen(
        [
            sys.executable, "-m", "benchmarks.generator", *GENERATOR, "--port", str(server.port),
            "--seconds", str(seconds), "--keys", "100000", "--prebuilt", "65536",
        ],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait(page: Page | None, seconds: float) -> None:
    """Let time pass; Playwright must go on meanwhile."""
    if page is None:
        time.sleep(seconds)
    else:
        page.wait_for_timeout(seconds * 1000)


def measure(
    browser: Browser, browser_pid: int, server: DcpServer, title: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure with one page open, or with none."""
    found: dict[str, Any] = {}
    page = None if title == "none" else open_page(browser, server, title)
    wait(page, SETTLE_S)
    before, before_browser = server_s(server), processor_s(browser_pid)
    wait(page, options.seconds)
    found["idle"] = 100 * (server_s(server) - before) / options.seconds
    found["browser"] = 100 * (processor_s(browser_pid) - before_browser) / options.seconds
    changes = server.metrics()["dcpd_changes_total"]
    load = generate(server, options.seconds + 2 * SETTLE_S)
    while server.metrics()["dcpd_changes_total"] < changes + WARM_CHANGES:
        wait(page, 0.1)  # the generator builds its requests first
    before, changes = server_s(server), server.metrics()["dcpd_changes_total"]
    began_s = time.perf_counter()
    wait(page, options.seconds)
    spent_s, elapsed_s = server_s(server) - before, time.perf_counter() - began_s
    written = server.metrics()["dcpd_changes_total"] - changes
    load.wait()
    found["writing"] = 100 * spent_s / elapsed_s
    found["writes_per_s"] = written / elapsed_s
    found["us_per_write"] = 1e6 * spent_s / written
    if page is not None:
        page.context.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.console")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    files = console_files().values()
    report: dict[str, Any] = {"files_bytes": sum(len(file.body) for file in files)}
    with TemporaryDirectory() as folder:
        report["work_us"] = asyncio.run(work_us(Path(folder)))
    with DcpServer() as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        report["first_paint_ms"] = first_paint_ms(browser, server)
        rounds: dict[str, list[dict[str, Any]]] = {title: [] for title in PAGES}
        for _ in range(options.rounds):
            for title in PAGES:
                rounds[title].append(measure(browser, browser_pid(), server, title, options))
        browser.close()
    for title, found in rounds.items():
        report[title] = {
            name: round(statistics.median(one[name] for one in found), 3) for name in found[0]
        }
    print(json.dumps(report, indent=1))
    return 0


def browser_pid() -> int:
    """Return the process that Playwright runs in; the browser is among its children."""
    tasks = Path("/proc/self/task").iterdir()
    children = [int(one) for task in tasks for one in (task / "children").read_text().split()]
    commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return next(child for child, command in commands.items() if b"playwright" in command)


if __name__ == "__main__":
    sys.exit(main())
