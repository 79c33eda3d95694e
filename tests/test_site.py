"""The documentation as a site: it builds without a warning, and works without a network."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag
from urllib.request import urlopen

import pytest

from clients.cli.dcpctl import COMMANDS
from dcpd import __all__ as public_names
from support.shell_blocks import copy_project

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {
            "couchbase", "deltalake", "fsspec", "grpc", "hypothesis",
            "matplotlib", "numpy", "pandas", "playwright", "pyarrow", "pyspark", "pytest",
        }:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
"""What `scripts/install docs` does not install, and this environment has."""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project whose environment is this one, so there is nothing to install."""
    folder = tmp_path_factory.mktemp("site") / "clone"
    copy_project(folder)
    (folder / "scripts" / "install").write_text("")
    (folder / "without").mkdir()
    (folder / "without" / "sitecustomize.py").write_text(ABSENT)
    return folder


def build(clone: Path) -> subprocess.CompletedProcess[str]:
    """Build as in a fresh clone."""
    return subprocess.run(
        ["bash", "scripts/docs", "--build"],
        cwd=clone, env=os.environ | {"PYTHONPATH": str(clone / "without")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(clone: Path) -> Path:
    """The built site. The build is strict: each warning is an error, and all are shown."""
    built = build(clone)
    assert built.returncode == 0, built.stdout + built.stderr
    assert built.stderr == ""
    return clone / "build" / "docs"


def test_a_broken_link_fails_the_build(clone: Path, site: Path) -> None:
    page = clone / "docs" / "glossary.md"
    text = page.read_text()
    page.write_text(f"{text}\n[nowhere](nowhere.md)\n")
    built = build(clone)
    page.write_text(text)
    assert built.returncode != 0
    assert "nowhere.md" in built.stderr


def test_the_script_serves_the_site_on_this_machine(clone: Path, site: Path) -> None:
    with subprocess.Popen(
        ["bash", "scripts/docs", "0"], cwd=clone, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        try:
            assert server.stdout is not None
            found = (re.search(rb"http://127\.0\.0\.1:\d+", line) for line in server.stdout)
            said = next(filter(None, found))[0].decode()
            with urlopen(said) as answer:
                assert b"choose the door" in answer.read()
        finally:
            server.terminate()


class Page(HTMLParser):
    """The targets, the anchors and the drawings of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.drawings = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}
        self.targets += [value for name in ("href", "src") if (value := given.get(name))]
        if tag != "a":  # what the browser loads by itself
            self.loaded += [value for name in ("href", "src") if (value := given.get(name))]
        self.drawings += "mermaid" in (given.get("class") or "").split()


def pages_of(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_links_lead_somewhere_and_nothing_comes_from_elsewhere(site: Path) -> None:
    pages = pages_of(site)
    broken = []
    for path, page in pages.items():
        for link in page.targets:
            target, anchor = urldefrag(re.sub(r"\?v=\w+$", "", link))
            if re.match(r"\w+:|//", target):
                if link in page.loaded and not link.startswith("data:"):
                    broken.append(f"{path.name}: {link}: needs the network")
                continue
            file = (path.parent / unquote(target)).resolve() if target else path
            if not file.exists():
                broken.append(f"{path.name}: {link}")
            elif anchor and file in pages and unquote(anchor) not in pages[file].anchors:
                broken.append(f"{path.name}: {link}: no such anchor")
    assert broken == []


def test_every_page_is_on_the_site(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS)).with_suffix(".html").exists()


def test_every_command_and_public_name_has_its_place(site: Path) -> None:
    text = (site / "dcpctl.html").read_text()
    assert [name for name in COMMANDS if f'id="dcpctl-{name}"' not in text] == []
    text = (site / "python-api.html").read_text()
    assert [name for name in public_names if f'id="dcpd.{name}"' not in text] == []


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def drawn(url: str, profile: Path) -> str:
    """Open a page in a browser that reaches this machine only; return what it shows."""
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
         "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
         "--virtual-time-budget=60000", "--dump-dom", url],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.foreign
def test_a_browser_without_network_shows_every_drawing(site: Path, tmp_path: Path) -> None:
    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed")
    if not (site / "_static" / "mermaid" / "mermaid.min.js").exists():
        pytest.skip("npm could not fetch mermaid, which draws the diagrams")
    with_drawings = {path: page for path, page in pages_of(site).items() if page.drawings}
    assert len(with_drawings) > 8
    with served(site) as address:
        for path, page in with_drawings.items():
            shown = drawn(f"{address}/{path.relative_to(site)}", tmp_path / "profile")
            drawings = re.findall(r'data-processed="true"><svg id="mermaid', shown)
            assert len(drawings) == page.drawings, path.name
            assert "Syntax error in" not in shown, path.name
