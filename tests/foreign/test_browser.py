"""A real browser whose user has logged in to the admin port, and pages that would use that login.

DNS rebinding is acted out: the browser is told that evil.example is 127.0.0.2. What listens there,
on the admin port's number, serves one page of its own, as the attacker's server does before the
name changes; every other connection goes to the admin port, as all do afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.server import DcpdProcess

pytestmark = pytest.mark.foreign

SCRIPT = Path(__file__).parent / "npm" / "browser_pages.cjs"
PACKAGES = Path(__file__).parents[2] / ".venv" / "npm" / "node_modules"
SCOPES = "/pools/default/buckets/default/scopes"
POSTS = "POST /api/v1/vbuckets/7/branch"
PAGE = b"<!doctype html><title>a page of another site</title><body></body>"
ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
)


@contextmanager
def page_server(host: str, port: int, behind: tuple[str, int] | None) -> Iterator[int]:
    """Serve PAGE as /page; pass every other connection on to what is `behind`, if anything is."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            first = self.request.recv(1 << 16)
            if first.startswith(b"GET /page ") or behind is None:
                self.request.sendall(ANSWER % len(PAGE) + PAGE)
                return
            with socket.create_connection(behind) as server:
                server.sendall(first)
                answers = threading.Thread(target=pump, args=(server, self.request))
                answers.start()
                pump(self.request, server)
                answers.join()

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    with Server((host, port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield int(server.server_address[1])
        server.shutdown()
        thread.join()


def pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # one side is gone


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DcpdProcess]:
    with DcpdProcess(tmp_path_factory.mktemp("browser") / "data") as process:
        yield process


@pytest.fixture(scope="module")
def visits(server: DcpdProcess) -> dict[str, Any]:
    """Let the browser visit all pages; return what came of it."""
    node, chromium = shutil.which("node"), shutil.which("chromium")
    if chromium is None:
        pytest.skip("the command chromium is missing (sudo apt-get install chromium)")
    if node is None:
        pytest.skip("the command node is missing (Node.js 20 or newer, with npm)")
    if not (PACKAGES / "playwright-core").is_dir():
        pytest.skip("the npm package playwright-core is not installed; scripts/test does it")
    admin = ("127.0.0.1", server.admin_port)
    with (
        page_server("127.0.0.1", 0, None) as foreign_port,
        page_server("127.0.0.2", server.admin_port, admin) as rebound_port,
    ):
        pages = {
            "chromium": chromium,
            "admin": server.admin_url,
            "foreign": f"http://127.0.0.1:{foreign_port}",
            "rebound": f"http://evil.example:{rebound_port}",
        }
        ran = subprocess.run(
            [node, str(SCRIPT), json.dumps(pages)],
            env=os.environ | {"NODE_PATH": str(PACKAGES)},
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    assert {visit["loggedIn"] for visit in found.values()} == {200}, "there is a login to be used"
    return found


def test_a_page_of_another_site_gets_nothing(visits: dict[str, Any]) -> None:
    seen, statuses = visits["foreign"]["seen"], visits["foreign"]["statuses"]
    where, text = seen.pop("submitted")
    assert (where, "comes from a web page" in text) == (SCOPES, True)
    assert {text for _, text in seen.values()} == {""}
    assert {status for found in statuses.values() for status in found} == {403}
    # What is sent without asking first: it arrives, and is refused.
    assert set(statuses) == {"GET /metrics", POSTS, f"POST {SCOPES}"}


def test_a_page_whose_name_is_rebound_to_the_port_gets_nothing(visits: dict[str, Any]) -> None:
    seen, statuses = visits["rebound"]["seen"], visits["rebound"]["statuses"]
    for what, (status, text) in seen.items():
        assert "this server is not known as 'evil.example" in text, what
        assert status in {403, SCOPES}
    assert {status for found in statuses.values() for status in found} == {403}
    assert len(statuses[POSTS]) == 3
    assert len(statuses[f"POST {SCOPES}"]) == 2


def test_a_page_of_the_port_itself_may_do_what_its_user_may(visits: dict[str, Any]) -> None:
    seen = visits["own"]["seen"]
    statuses = {what: found for what, (found, _) in seen.items()}
    assert statuses == {
        "read": 200, "readWithLogin": 200, "readBlindly": 200, "post": 200, "postWithLogin": 200,
        "postBlindly": 415, "formBlindly": 200, "drop": 404, "submitted": SCOPES,
    }  # fmt: skip


def test_what_was_done_is_what_the_own_page_did(
    server: DcpdProcess, visits: dict[str, Any]
) -> None:
    assert visits
    scopes = {scope["name"] for scope in server.ask("GET", SCOPES)["scopes"]}
    assert scopes == {"_default", "own", "own-submitted"}
    lines = [json.loads(line) for line in server.log_path.read_text().splitlines()]
    assert sum(line["event"] == "branch" for line in lines) == 2
    refused = [line["reason"] for line in lines if line["event"] == "admin request refused"]
    assert any("same-site" in reason for reason in refused)
    assert server.metrics()['dcpd_admin_refusals_total{status="403"}'] > 15
