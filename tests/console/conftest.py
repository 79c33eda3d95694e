"""A real browser for the tests of the web console: Debian's chromium, driven by Playwright.

The fixtures live as long as a module, because Playwright's loop would be in the way of the
asynchronous tests of other modules.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from clients.testing import DcpServer
from support.server import DcpdProcess

FLAGS = [
    # As root, in a container, and without anything that leaves this machine.
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
]  # fmt: skip
WAIT_MS = 20_000
"""Limit of a wait, so that a failure does not hang."""

LogIn = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("the command chromium is missing (sudo apt-get install chromium)")
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=chromium, args=FLAGS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DcpdProcess]:
    with DcpdProcess(tmp_path_factory.mktemp("console") / "data", "--test-mode") as process:
        yield process


@pytest.fixture
def log_in(browser: Browser, server: DcpdProcess) -> Iterator[LogIn]:
    """Open the console and log in. Whatever the browser complains about fails the test."""
    contexts = []
    complaints: list[str] = []

    def complain(message: ConsoleMessage) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            complaints.append(message.text)

    def open_page(
        user: str = "guest",
        password: str = "guest",
        *,
        on: DcpServer = server,
        title: str = "Overview",
        may_complain: bool = False,
        **options: object,
    ) -> Page:
        context = browser.new_context(base_url=on.admin_url, **options)
        context.set_default_timeout(WAIT_MS)
        contexts.append(context)
        page = context.new_page()
        if not may_complain:
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", complain)
        page.goto("/")
        page.get_by_label("User").fill(user)
        page.get_by_label("Password").fill(password)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("heading", level=1, name=title)).to_be_visible()
        expect(page.locator("main[data-sample]")).to_be_visible()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
