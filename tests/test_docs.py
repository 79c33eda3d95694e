"""Links and file names in the documentation lead somewhere, and generated pages are current."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dcp.wire.frame import FrameDecoder
from dcp.wire.opcode import Opcode
from site_pages.__main__ import PAGES as GENERATED

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
TEST = re.compile(r"`(test_\w+)`")
FILE = re.compile(r"`((?:\w+/)+[\w.]+\.(?:py|md))`")


def anchors(page: Path) -> set[str]:
    """The names that headings get on the usual sites."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(page.read_text()):
        file = (page.parent / target) if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{target}#{anchor}" if anchor else target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    missing = [name for name in FILE.findall(page.read_text()) if not (ROOT / name).exists()]
    assert missing == []


def test_tests_that_are_named_exist() -> None:
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    defined = {name for source in sources for name in re.findall(r"def (test_\w+)\(", source)}
    named = {name for page in PAGES for name in TEST.findall(page.read_text())}
    assert len(named) > 20, "docs/replication.md has a test for each failure"
    settings = {"test_mode"}
    assert sorted(named - defined - settings) == []


def test_every_page_is_listed() -> None:
    lists = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "index.md")
    listed = {
        (page.parent / target).resolve()
        for page in lists
        for target, _ in LINK.findall(page.read_text())
        if target
    }
    pages = {page for page in PAGES if page.parent != ROOT and page not in lists}
    assert sorted(pages - listed) == []


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_current(name: str) -> None:
    assert (ROOT / "docs" / f"{name}.md").read_text() == GENERATED[name](), "run scripts/pages"


def test_every_block_of_the_byte_traces_is_one_frame() -> None:
    """The bytes as a reader would type them in: the columns after the offsets."""
    page = (ROOT / "docs" / "byte-traces.md").read_text()
    blocks = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    seen = set()
    for block in blocks:
        data = bytes.fromhex("".join(line[4:28] for line in block.splitlines()))
        (frame,) = FrameDecoder().feed(data)
        assert frame.wire_bytes == len(data)
        seen.add(Opcode(frame.opcode))
    assert {Opcode.DCP_STREAM_REQ, Opcode.DCP_MUTATION, Opcode.DCP_STREAM_END} <= seen
    assert len(blocks) > 30
