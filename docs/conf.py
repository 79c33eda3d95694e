"""The documentation as a site: `scripts/docs` builds and serves it, tests/test_site.py checks it.

The pages are plain Markdown that a code forge shows as well. What only the site has is added here
while a page is read: the table of contents, and what is generated from the code.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE: Final = Path(__file__).parent
sys.path.insert(0, str(HERE))

from site_pages import dcpctl_page, python_page  # noqa: E402

CONTENTS: Final = {
    "Learn it": (
        "why", "howto/start-a-server", "howto/follow-changes", "tutorial-flights",
        "tutorial-spark",
    ),
    "Follow changes from Python": ("consumers", "consistent-cuts", "key-value",
                                   "testing-consumers", "testing-scenarios", "spark"),
    "Operate it": (
        "operations", "runbook", "scrubbing", "diff", "console", "security", "backup",
        "troubleshooting",
        "howto/add-users", "howto/monitor", "howto/move-data",
        "howto/import-and-export", "howto/undo-changes",
        "clusters", "upgrade",
    ),
    "Write a connector": (
        "howto/write-a-connector", "streams", "byte-traces", "collections", "subdocuments",
        "compatibility", "conformance", "conformance-checks", "conformance-scenarios",
        "consumers-compared",
    ),
    "Concepts": (
        "concepts/partition", "concepts/seqno", "concepts/snapshot", "concepts/version-and-branch",
        "concepts/rollback", "concepts/purge", "concepts/durability", "glossary",
    ),
    "Reference": (
        "dcpctl", "settings", "commands", "metrics", "http-api", "errors", "python-api",
    ),
    "Engineering notes": (
        "architecture", "traces", "replication", "simulator", "performance", "decisions",
        "mutations",
    ),
}  # fmt: skip
"""Section of the sidebar -> its pages. A page that is in no section is an error of the build."""

GENERATED: Final = {"dcpctl": dcpctl_page.markdown, "python-api": python_page.markdown}
"""Page -> what is put at its end. Other generated pages are kept in the repository."""

FILE_NAME: Final = re.compile(r"\[[\w-]+\.md\]\((?!\w+:)")
"""A link whose text is a file's name. Without a text, a link gets the title of its target."""

project = "dcpd"
copyright = ""  # noqa: A001 (the name is Sphinx's)
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinxcontrib.mermaid",
    "sphinx_copybutton",
]
exclude_patterns = ["site_pages"]
templates_path: list[str] = []
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]
"""Types of signatures that have no page. Links between pages are still checked."""
default_role = "literal"

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

html_theme = "furo"
html_title = "dcpd"
MERMAID: Final = HERE.parent / ".venv" / "mermaid"
"""Where scripts/docs puts what draws the diagrams. Without it they are shown as text."""
html_static_path = ["_static", *([str(MERMAID)] if MERMAID.is_dir() else [])]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False

mermaid_use_local = "mermaid/mermaid.mjs"
mermaid_fullscreen = False
mermaid_height = "auto"

copybutton_exclude = ".linenos, .gp"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = list(python_page.NOT_INSTALLED)
autodoc_default_options = {"members": True, "exclude-members": "__init__"}


def contents() -> str:
    """Return the table of contents, as one hidden toctree for each section."""
    parts = []
    for caption, pages in CONTENTS.items():
        there = [page for page in pages if (HERE / f"{page}.md").exists()]
        parts += ["```{toctree}", ":hidden:", f":caption: {caption}", "", *there, "```", ""]
    return "\n".join(parts)


def prepare(_app: Sphinx, page: str, source: list[str]) -> None:
    """Name pages by their titles, and add what a code forge does not need or cannot show."""
    source[0] = FILE_NAME.sub("[](", source[0])
    if page == "index":
        source[0] += "\n" + contents()
    elif page in GENERATED:
        source[0] += "\n" + GENERATED[page]()


def is_only_a_field(
    _app: Sphinx, _what: str, _name: str, member: object, _skip: bool, _options: object
) -> bool | None:
    """Leave out fields of named tuples that have no text of their own; the signature has them."""
    text = getattr(member, "__doc__", None) or ""
    return True if text.startswith("Alias for field number") else None


def setup(app: Sphinx) -> None:
    """Connect the above."""
    app.connect("source-read", prepare)
    app.connect("autodoc-skip-member", is_only_a_field)
