"""Tells in which form the hot modules run, and whether what was compiled is up to date.

hatch_build.py compiles them where it can. Python loads a compiled module instead of its source. If
the source has changed since, the change would be ignored silently. If only some of the modules were
put in place, those that are compiled would call others that were never loaded. `problem` detects
that.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final, NamedTuple

_ROOT: Final = Path(__file__).resolve().parent.parent
_SOURCES: Final = "dcp/compiled_sources.txt"
"""Checksum, mark and path of each source, as hatch_build.py found them."""
_PLAIN_BECAUSE: Final = "dcp/plain_because.txt"
"""Why the build compiled nothing."""
_LOOPS: Final = "vbucket/native/loops.c"


_REMEDY: Final = (
    "compile them again (scripts/compile), "
    "or remove the compiled modules (scripts/compile --remove)"
)


class _CompiledFrom(NamedTuple):
    digest: str
    name: str
    is_module: bool
    """Whether there is a library for it. Others were compiled into one."""


def _listed(root: Path) -> list[_CompiledFrom]:
    try:
        lines = (root / _SOURCES).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [
        _CompiledFrom(
            line[:64],
            line[66:],
            line[66:] == _LOOPS or (line[64:66] == "  " and line.endswith(".py")),
        )
        for line in lines
    ]


def _is_compiled(root: Path, name: str) -> bool:
    return any((root / name).with_suffix(suffix).exists() for suffix in EXTENSION_SUFFIXES)


def compiled_modules(root: Path = _ROOT) -> list[str]:
    """Return the modules that run compiled, as paths of their sources."""
    return [
        source.name
        for source in _listed(root)
        if source.is_module and source.name != _LOOPS and _is_compiled(root, source.name)
    ]


def problem(root: Path = _ROOT) -> str:
    """Describe compiled modules that are incomplete, cannot be loaded, or do not match their
    sources; "" if all is well. Modules of another Python are not loaded, so they do no harm.
    """
    listed = _listed(root)
    modules = [source.name for source in listed if source.is_module]
    missing = [name for name in modules if not _is_compiled(root, name)]
    if len(missing) == len(modules):
        return ""
    if missing:
        return (
            f"{len(missing)} of {len(modules)} compiled modules are missing "
            f"({', '.join(missing[:3])}): compiling was interrupted; {_REMEDY}"
        )
    changed = []
    for digest, name, _ in listed:
        source = root / name
        if source.exists() and hashlib.sha256(source.read_bytes()).hexdigest() != digest:
            changed.append(name)
    if changed:
        return (
            f"{len(changed)} modules were changed after they were compiled "
            f"({', '.join(changed[:3])}), so the running code is not that of the sources; {_REMEDY}"
        )
    try:
        if root == _ROOT:
            import_module(_LOOPS.removesuffix(".c").replace("/", "."))
    except ImportError as error:
        return f"the loops in C cannot be loaded ({error}); {_REMEDY}"
    return ""


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
