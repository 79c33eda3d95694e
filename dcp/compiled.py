"""Tells in which form the hot modules run, and whether what was compiled is up to date.

hatch_build.py compiles them where it can. Python loads a compiled module instead of its source. If
the source has changed since, the change would be ignored silently. `problem` detects that.
"""

from __future__ import annotations

import hashlib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parent.parent
_SOURCES: Final = "dcp/compiled_sources.txt"
"""Checksum and path of each source, as hatch_build.py found them."""
_PLAIN_BECAUSE: Final = "dcp/plain_because.txt"
"""Why the build compiled nothing."""
_LOOPS: Final = "vbucket/native/loops.c"


def _listed(root: Path) -> list[tuple[str, str]]:
    """Return checksum and path of the compiled sources."""
    try:
        lines = (root / _SOURCES).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(line[:64], line[66:]) for line in lines]


def _is_compiled(root: Path, name: str) -> bool:
    return any((root / name).with_suffix(suffix).exists() for suffix in EXTENSION_SUFFIXES)


def compiled_modules(root: Path = _ROOT) -> list[str]:
    """Return the modules that run compiled, as paths of their sources."""
    return [name for _, name in _listed(root) if name.endswith(".py") and _is_compiled(root, name)]


def problem(root: Path = _ROOT) -> str:
    """Describe the compiled modules that do not match their sources; "" if all match."""
    changed = []
    for digest, name in _listed(root):
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


def form_text(root: Path = _ROOT) -> str:
    """Return the form: "compiled", or "plain Python", with the reason if the build gave one."""
    if compiled_modules(root):
        return "compiled"
    if _is_compiled(root, _LOOPS):
        return "plain Python, loops in C"
    try:
        return f"plain Python: {(root / _PLAIN_BECAUSE).read_text().strip()}"
    except FileNotFoundError:
        return "plain Python"


def version_text(version: str, root: Path = _ROOT) -> str:
    """Return a version, followed by "(compiled)" if hot modules run compiled."""
    return f"{version} (compiled)" if compiled_modules(root) else version


def version_and_form(version: str, root: Path = _ROOT) -> str:
    """Return a version, followed by the form in parentheses."""
    return f"{version} ({form_text(root)})"
