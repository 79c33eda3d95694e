"""What keeps the web console safe, tried in a real browser: other sites, scripts in values, the
login, frames, and what the roles hide.
"""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from support.load import Following
from support.server import DcpdProcess

PASSWORD = "correct-horse-battery"
ATTACKS = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "'\"><svg onload=\"document.title='owned'\">",
    "javascript:document.title='owned'",
)
EVERY_PAGE = (
    "Overview", "Cluster", "Partitions", "Documents", "Changes", "Consumers", "Collections",
    "Users", "Backups", "Settings", "Log", "Test bench",
)  # fmt: skip
READERS_PAGES = [
    "Overview", "Cluster", "Partitions", "Documents", "Changes", "Consumers", "Collections",
]  # fmt: skip


@contextmanager
def foreign_site(folder: Path, page: str) -> Iterator[int]:
    """Serve a page of another site."""
    (folder / "index.html").write_text(page)
    handler = partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        yield site.server_port
        site.shutdown()
        thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def users(server: DcpdProcess) -> DcpdProcess:
    for name, roles in (
        ("reader", {"read": [{}]}),
        ("limited", {"read": [{"prefix": "app:"}], "write": [{"prefix": "app:"}]}),
        ("changing", {"read": [{}]}),
        ("leaving", {"read": [{}]}),
        ("boss", {"read": [{}], "write": [{}], "stream": [{}], "admin": [{}]}),
    ):
        body = {"name": name, "password": PASSWORD, "roles": roles}
        server.ask("POST", "/api/v1/users", body)
    return server


def pages_of(page: Page) -> list[str]:
    return page.get_by_role("navigation").get_by_role("link").all_inner_texts()


def go(page: Page, title: str) -> None:
    page.get_by_role("navigation").get_by_role("link", name=title).click()
    expect(page.get_by_role("heading", level=1, name=title)).to_be_visible()


def test_values_and_keys_are_shown_and_never_run(log_in, server: DcpdProcess) -> None:
    with server.connect() as kv:
        for text in ATTACKS:
            kv.set(text.encode(), text.encode())
    page = log_in()
    go(page, "Documents")
    for text in ATTACKS:
        page.get_by_label("Key", exact=True).fill(text)
        page.get_by_role("button", name="Look up").click()
        expect(page.locator("table.history pre")).to_have_text(text)
        expect(page.get_by_role("heading", name=text)).to_be_visible()
    assert page.title() == "Documents – dcpd"


def test_no_script_runs_but_the_consoles_own(log_in) -> None:
    page = log_in(may_complain=True)
    assert "unsafe" not in page.evaluate(
        "fetch('/').then((answer) => answer.headers.get('content-security-policy'))"
    )
    seen = page.evaluate(
        """async () => {
          const refused = [];
          addEventListener("securitypolicyviolation", (event) =>
            refused.push(event.effectiveDirective));
          const attempt = (act) => { try { act(); } catch (error) { refused.push(error.name); } };
          await new Promise((resolve) => setTimeout(resolve, 1));  // leave the debugger's call
          const inline = document.createElement("div");
          attempt(() => { inline.innerHTML = "<img src=x onerror='document.title=1'>"; });
          attempt(() => document.body.setAttribute("onclick", "document.title = 2"));
          document.body.click();
          attempt(() => eval("document.title = 3"));
          const foreign = document.createElement("img");
          foreign.src = "http://127.0.0.1:1/x.png";
          document.body.append(foreign);
          await fetch("http://127.0.0.1:1/").catch((error) => refused.push(error.name));
          while (!["img-src", "connect-src"].every((one) => refused.includes(one))) {
            await new Promise((resolve) =>
              addEventListener("securitypolicyviolation", resolve, {once: true}));
          }
          return refused;
        }"""
    )
    assert {"require-trusted-types-for", "img-src", "connect-src"} <= set(seen), seen
    assert seen.count("TypeError") + seen.count("EvalError") >= 3, seen
    assert page.title() == "Overview – dcpd"


def test_the_password_is_in_no_url_cookie_or_storage(log_in, users: DcpdProcess) -> None:
    page = log_in("boss", PASSWORD)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(f"{request.url} {request.post_data or ''}"))
    for title in EVERY_PAGE:
        go(page, title)
    page.get_by_label("Delay in ms").fill("1")
    page.get_by_role("button", name="Set the fault").click()
    expect(page.get_by_text("Rule 1 is set.")).to_be_visible()
    users.clear_faults()
    assert len(asked) > len(EVERY_PAGE)
    everything = " ".join(
        [
            *asked,
            page.url,
            page.content(),
            page.evaluate(
                "JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage},"
                " history.state, performance.getEntries().map((entry) => entry.name)])"
            ),
        ]
    )
    for secret in (PASSWORD, "Ym9zczpjb3JyZWN0", "boss:"):
        assert secret not in everything
        assert secret not in str(page.context.cookies())


def test_a_session_outlives_a_reload_and_ends_with_log_out(log_in, users: DcpdProcess) -> None:
    page = log_in("boss", PASSWORD)
    cookies = {cookie["name"]: cookie for cookie in page.context.cookies()}
    token = cookies[f"dcpd-{users.admin_port}"]
    assert token["httpOnly"]
    assert token["sameSite"] == "Strict"
    assert token["expires"] == -1  # it is gone when the browser is
    assert token["value"] not in page.evaluate("document.cookie")
    page.reload()
    expect(page.get_by_text("boss")).to_be_visible()
    url = f"{users.admin_url}/api/v1/console/me"
    header = {"x-dcpd-console": "1"}
    assert page.context.request.get(url, headers=header).status == 200
    assert page.context.request.get(url).status == 401  # a link or a form has no such header
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("button", name="Log in")).to_be_visible()
    page.reload()
    expect(page.get_by_label("Password")).to_be_empty()
    cookie = f"{token['name']}={token['value']}"
    assert page.context.request.get(url, headers=header | {"cookie": cookie}).status == 401


def test_wrong_password_is_refused_without_dialog_of_browser(
    browser: Browser, server: DcpdProcess
) -> None:
    context = browser.new_context(base_url=server.admin_url)
    page = context.new_page()
    page.goto("/")
    page.get_by_label("User").fill("guest")
    page.get_by_label("Password").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("user or password is wrong")
    context.close()


def test_another_site_can_neither_frame_nor_use_the_console(
    browser: Browser, log_in, server: DcpdProcess, tmp_path: Path
) -> None:
    log_in()
    framing = f'<iframe src="{server.admin_url}/"></iframe><p id="here">here</p>'
    with foreign_site(tmp_path, framing) as port:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        inside = page.frames[1]
        assert "Log in" not in inside.content()
        statuses = page.evaluate(
            """async (url) => {
              const tried = [];
              for (const [method, path] of [["GET", "/api/v1/console/me"],
                  ["PUT", "/api/v1/documents"], ["DELETE", "/api/v1/documents"]]) {
                tried.push(await fetch(url + path, {method, credentials: "include",
                  headers: {"content-type": "application/json"},
                  body: method === "GET" ? null : "{}"})
                  .then((answer) => answer.status, (error) => error.name));
              }
              return tried;
            }""",
            server.admin_url,
        )
        assert statuses == ["TypeError"] * 3
        context.close()


def test_a_name_that_was_rebound_shows_nothing(browser: Browser, server: DcpdProcess) -> None:
    """The browser is told that the name is this server's address."""
    context = browser.new_context()
    page = context.new_page()
    for path in ("/", "/console/app.js", "/api/v1/console/me"):
        answer = context.request.get(
            f"{server.admin_url}{path}", headers={"host": "evil.example:8091"}
        )
        assert answer.status == 403
        assert "DNS rebinding" in answer.text()
    page.close()
    context.close()


def test_who_may_only_read_sees_no_button_that_would_be_refused(log_in, users: DcpdProcess) -> None:
    with users.connect() as kv:
        kv.set(b"read:1", b"x")
    page = log_in("reader", PASSWORD)
    refused: list[str] = []
    page.on(
        "response",
        lambda answer: refused.append(answer.url) if answer.status in {401, 403} else None,
    )
    assert pages_of(page) == READERS_PAGES
    go(page, "Partitions")
    page.get_by_role("gridcell", name="Partition 5, active").click()
    expect(page.get_by_role("heading", name="Partition 5")).to_be_visible()
    expect(page.get_by_role("button", name="Explain")).to_have_count(0)  # it takes stream
    go(page, "Consumers")
    with Following(users.address, "orders"):
        expect(page.get_by_role("region", name="orders")).to_be_visible()
        assert page.get_by_role("region", name="orders").get_by_role("button").count() == 0
    go(page, "Documents")
    page.get_by_label("Key", exact=True).fill("read:1")
    page.get_by_role("button", name="Look up").click()
    expect(page.locator("table.history tbody tr")).to_have_count(1)
    expect(page.get_by_role("table", name="Documents by key")).to_contain_text("read:1")
    as_of = page.get_by_role("region", name="A partition as of a seqno")
    as_of.get_by_label("Partition").fill("5")
    as_of.get_by_role("button", name="Show").click()
    expect(as_of.get_by_role("status")).to_be_visible()
    for act in ("Edit", "Delete", "Create"):
        expect(page.get_by_role("button", name=act)).to_have_count(0)
    assert refused == []


def test_a_role_for_some_keys_shows_buttons_for_these(log_in, users: DcpdProcess) -> None:
    with users.connect() as kv:
        kv.set(b"app:1", b"x")
        kv.set(b"other:1", b"x")
    page = log_in("limited", PASSWORD)
    go(page, "Documents")
    expect(page.get_by_role("region", name="A partition as of a seqno")).to_have_count(0)
    rows = page.get_by_role("table", name="Documents by key").locator("tbody tr")
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="app:1").click()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Value").fill("y")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("table.history tbody tr")).to_have_count(2)
    page.get_by_label("Key", exact=True).fill("other:1")
    page.get_by_role("button", name="Look up").click()
    expect(page.get_by_role("alert")).to_contain_text("may not do this")


def test_rights_that_change_change_the_open_page(log_in, users: DcpdProcess) -> None:
    page = log_in("changing", PASSWORD)
    assert "Test bench" not in pages_of(page)
    users.ask("POST", "/api/v1/users/changing/grant", {"role": "admin"})
    expect(page.get_by_role("navigation").get_by_role("link", name="Test bench")).to_be_visible()
    users.ask("POST", "/api/v1/users/changing/revoke", {"role": "admin"})
    expect(page.get_by_role("navigation").get_by_role("link", name="Test bench")).to_be_hidden()


def test_a_user_who_is_removed_is_logged_out(log_in, users: DcpdProcess) -> None:
    page = log_in("leaving", PASSWORD)
    users.ask("DELETE", "/api/v1/users/leaving")
    expect(page.get_by_role("button", name="Log in")).to_be_visible()


def test_without_test_mode_there_is_no_test_bench(log_in, tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as plain:
        page = log_in(on=plain)
        assert pages_of(page) == [name for name in EVERY_PAGE if name != "Test bench"]
        expect(page.get_by_role("note")).to_have_count(0)
        page.goto("/#/bench")
        expect(page.get_by_role("button", name="Set the fault")).to_have_count(0)
