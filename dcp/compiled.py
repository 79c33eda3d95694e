"""Whether the hot modules run compiled (hatch_build.py), and whether that is still right.

A compiled module is taken instead of its source, so a source that was changed since would be
ignored without a word: `problem` notices.
"""

from __future__ import annotations

import hashlib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parent.parent
_SOURCES: Final = "dcp/compiled_sources.txt"
"""Checksum and path of each source, as hatch_build.py found them."""


def compiled_modules(root: Path = _ROOT) -> list[str]:
    """Return the modules that are taken compiled, as paths of their sources."""
    listed = root / _SOURCES
    if not listed.exists():
        return []
    names = [line.split("  ", 1)[1] for line in listed.read_text().splitlines()]
    return [
        name
        for name in names
        if any((root / name).with_suffix(suffix).exists() for suffix in EXTENSION_SUFFIXES)
    ]


def problem(root: Path = _ROOT) -> str:
    """Say which compiled modules are not those of the sources beside them; "" if all are."""
    listed = root / _SOURCES
    if not listed.exists():
        return ""
    changed = []
    for line in listed.read_text().splitlines():
        digest, name = line.split("  ", 1)
        source = root / name
        if source.exists() and hashlib.sha256(source.read_bytes()).hexdigest() != digest:
            changed.append(name)
    if not changed:
        return ""
    return (
        f"{len(changed)} modules were changed after they were compiled ({', '.join(changed[:3])}), "
        "so what runs is not what the sources say; compile them again (scripts/compile), or remove "
        "what is compiled (scripts/compile --remove)"
    )


def version_text(version: str, root: Path = _ROOT) -> str:
    """Return a version with "(compiled)" behind it where the hot modules are."""
    return f"{version} (compiled)" if compiled_modules(root) else version
