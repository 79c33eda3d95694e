"""Writes the generated pages that are kept in the repository: `scripts/pages`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from dcp.server.report import metrics
from dcp.wire import opcode_page
from site_pages import (
    byte_traces_page,
    conformance_page,
    errors_page,
    scenarios_page,
    settings_page,
)
from site_pages.man_pages import share_files

PAGES: Final[dict[str, Callable[[], str]]] = {
    "byte-traces": byte_traces_page.markdown,
    "conformance-checks": conformance_page.markdown,
    "conformance-scenarios": scenarios_page.markdown,
    "commands": opcode_page.markdown,
    "errors": errors_page.markdown,
    "metrics": metrics.markdown,
    "settings": settings_page.markdown,
}

SHARE: Final = Path(__file__).parents[2] / "deploy" / "share"
"""What a wheel installs below share/: man pages, and completion for shells."""

if __name__ == "__main__":
    for name, markdown in PAGES.items():
        path = Path(__file__).parents[1] / f"{name}.md"
        path.write_text(markdown())
        print(f"written: docs/{path.name}")
    for name, text in share_files().items():
        path = SHARE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"written: deploy/share/{name}")
