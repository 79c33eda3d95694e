"""docs/conformance-checks.md, and what the checks find on dcpd in docs/compatibility.md.

PYTHONPATH=docs:tests .venv/bin/python -m site_pages.conformance_page   runs the checks, writes
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import clients.conformance.checks  # noqa: F401 - fills the table of checks
from clients.conformance.check import CHECKS, PASS
from clients.testing import DcpServer

PAGES_URL: Final = "https://github.com/couchbase/kv_engine/blob/master/"
COMPATIBILITY: Final = Path(__file__).parents[1] / "compatibility.md"
SECTION: Final = re.compile(
    r"(?<=<!-- dcpctl conformance: begin -->\n).*?(?=<!-- dcpctl conformance: end -->)", re.DOTALL
)
HEAD: Final = """# Checks of servers

Generated from the code by `scripts/pages`; do not edit. [conformance.md](conformance.md) says how
they are made. Each is one sentence of the documents of kv_engine, and what is sent and has to come.
"""


def page_link(page: str) -> str:
    """Return a Markdown link to a page of kv_engine."""
    return f"[{page.rpartition('/')[2]}]({PAGES_URL}{page})"


def cell(text: str) -> str:
    """Return text for a cell of a table, without its links: they count from the quoted page."""
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)
    for mark in "|[]<>*_`":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


def markdown() -> str:
    """Return the page: a section for each group."""
    lines = [HEAD.rstrip()]
    group = ""
    for one in CHECKS.values():
        if one.group != group:
            group = one.group
            lines += ["", f"## {group}", "", "| check | what | sentence | page |"]
            lines.append("|---|---|---|---|")
        row = (f"`{one.id}`", cell(one.title), cell(one.sentence), page_link(one.page))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def judged() -> tuple[int, list[dict[str, Any]]]:
    """Run `dcpctl conformance server --dcpd` on a new dcpd; return its exit code and its lines."""
    with DcpServer() as server:
        ran = subprocess.run(  # noqa: S603 - this dcpctl
            [sys.executable, "-m", "clients.cli", "conformance", "server", server.address,
             "--dcpd", "-o", "json"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    return ran.returncode, [json.loads(line) for line in ran.stdout.splitlines()]


def differences(lines: list[dict[str, Any]]) -> str:
    """Return the checks that did not pass, as a Markdown table."""
    rows = ["", "| check | what is asked | here | page |", "|---|---|---|---|"]
    for line in lines:
        if line.get("outcome", PASS) != PASS:
            here = f"{line['outcome']}: {cell(line['reason'])}"
            row = (f"`{line['check']}`", cell(line["title"]), here, page_link(line["page"]))
            rows.append(f"| {' | '.join(row)} |")
    return "\n".join([*rows, "", ""])


if __name__ == "__main__":
    text = COMPATIBILITY.read_text()
    COMPATIBILITY.write_text(SECTION.sub(lambda _: differences(judged()[1]), text))
    print("written: docs/compatibility.md")
