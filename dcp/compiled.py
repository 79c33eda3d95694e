"""Tells whether the hot modules run compiled (hatch_build.py), and whether they are up to date.

Python loads a compiled module instead of its source. If the source has changed since, the change
would be ignored silently. `problem` detects that.
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
    """Return the modules that run compiled, as paths of their sources."""
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
    """Describe the compiled modules that do not match their sources; "" if all match."""
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
        "so the running code is not that of the sources; compile them again (scripts/compile), or "
        "remove the compiled modules (scripts/compile --remove)"
    )


def version_text(version: str, root: Path = _ROOT) -> str:
    """Return a version, followed by "(compiled)" if hot modules run compiled."""
    return f"{version} (compiled)" if compiled_modules(root) else version
