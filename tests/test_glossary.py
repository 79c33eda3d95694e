"""The glossary: a word has one meaning, what it names is there, and no name has a banned word."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
REPLICATION = ROOT / "failover" / "replication"
RECEIPTS = ROOT / "vbucket" / "model" / "receipt.py"
PAGE = (ROOT / "docs" / "glossary.md").read_text()
OUTSIDE = (ROOT / "docs" / "http-api.md").read_text() + (ROOT / "docs" / "metrics.md").read_text()


class Row(NamedTuple):
    """A row of a table: its words, and its further columns."""

    words: tuple[str, ...]
    columns: tuple[str, ...]


def rows(text: str) -> list[Row]:
    found = []
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| term |"):
            first, *columns = (cell.strip() for cell in line.strip("|").split("|"))
            words = tuple(word.strip(" *") for word in first.split(","))
            found.append(Row(words, tuple(columns)))
    return found


def section(name: str) -> str:
    return PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]


def banned() -> set[str]:
    listed = section("Replication").split("Not in names of replication:")[1].split(".")[0]
    return {word.strip() for word in listed.replace("\n", " ").split(",")}


def names_of(tree: ast.AST) -> set[str]:
    """Return the names of a module's classes, functions, arguments, variables and attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def words_of(name: str) -> set[str]:
    """Split a name: `_told_seqno`, `FloorsTold` and `TOLD_MAX` all have the word told."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_a_word_has_one_meaning() -> None:
    words = Counter(word for row in rows(PAGE) for word in row.words)
    assert len(words) > 70
    assert [word for word, count in words.items() if count > 1] == []


def test_the_classes_of_replication_are_in_the_code() -> None:
    sources = [ast.parse(path.read_text()) for path in [*REPLICATION.glob("*.py"), RECEIPTS]]
    classes = {
        node.name for tree in sources for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }
    named = {
        row.words: re.findall(r"`(\w+)`", row.columns[1]) for row in rows(section("Replication"))
    }
    assert len(named) > 15
    assert all(named.values()), "each word has its class"
    assert {name for found in named.values() for name in found} - classes == set()


def test_the_status_fields_and_metrics_of_replication_exist() -> None:
    named = [
        name
        for row in rows(section("Replication"))
        for name in re.findall(r"`(\w+)`", row.columns[2])
    ]
    assert "behind_changes" in named
    assert [name for name in named if f"`{name}`" not in OUTSIDE] == []


@pytest.mark.parametrize("path", sorted(REPLICATION.glob("*.py")), ids=lambda path: path.stem)
def test_no_name_of_replication_has_a_banned_word(path: Path) -> None:
    found = {name for name in names_of(ast.parse(path.read_text())) if words_of(name) & banned()}
    assert found == set()


def test_a_banned_word_is_found_wherever_it_stands() -> None:
    source = """
class FloorsTold:
    def settle(self, is_whole):
        self._level_ns = calm_now = is_whole
LIMIT_TOLD_MAX = 1
wholesale = leveled = 2
"""
    found = {name for name in names_of(ast.parse(source)) if words_of(name) & banned()}
    assert found == {"FloorsTold", "settle", "is_whole", "_level_ns", "calm_now", "LIMIT_TOLD_MAX"}
