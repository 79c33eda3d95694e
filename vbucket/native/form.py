"""Tells whether the loops in C run, and whether they are those of the sources beside them.

hatch_build.py builds them where it can. If a source has changed since, or building was interrupted,
the change would be ignored silently: `problem` detects that.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).resolve().parent
_REMEDY: Final = "build them again (scripts/compile), or remove them (scripts/compile --remove)"


def has_loops(folder: Path = _FOLDER) -> bool:
    """Whether the loops are built for this Python."""
    return any((folder / f"loops{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


def problem(folder: Path = _FOLDER) -> str:
    """Describe loops that cannot be loaded or do not match their sources; "" if all is well. Those
    of another Python are not loaded, so they do no harm.
    """
    if not has_loops(folder):
        return ""
    changed = []
    for line in _text(folder / "built_from.txt").splitlines():
        digest, name = line.split("  ", 1)
        source = folder / Path(name).name
        if source.exists() and hashlib.sha256(source.read_bytes()).hexdigest() != digest:
            changed.append(name)
    if changed:
        return (
            f"{len(changed)} sources of the loops in C were changed after they were built "
            f"({', '.join(changed[:3])}), so the running code is not that of the sources; {_REMEDY}"
        )
    try:
        if folder == _FOLDER:
            import_module(f"{__package__}.loops")
    except ImportError as error:
        return f"the loops in C cannot be loaded ({error}); {_REMEDY}"
    return ""


def form_text(folder: Path = _FOLDER) -> str:
    """Return the form: "loops in C", or "plain Python", with the reason if the build gave one."""
    if has_loops(folder):
        return "loops in C"
    reason = _text(folder / "not_built.txt").strip()
    return f"plain Python: {reason}" if reason else "plain Python"


def version_and_form(version: str, folder: Path = _FOLDER) -> str:
    """Return a version, followed by the form in parentheses."""
    return f"{version} ({form_text(folder)})"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
