"""Builds the hot modules as C extensions from the same source, on request.

    DCPD_COMPILE=1 pip install .      a wheel with them
    scripts/compile                   in place, beside the sources (scripts/compile --remove)

DCPD_COMPILE_LEVEL is the C compiler's optimisation level (3). The build needs a C compiler,
Python's headers, mypyc, and the packages whose types the modules use. pip installs these packages
into its isolated build environment, in the versions that requirements/compile.txt locks.
scripts/compile takes them from .venv. Without compiling, the same modules run as plain Python.
`COMPILED` lists the compiled modules: the path of a SET, a GET and a stream.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILED: Final = (
    "dcp/session/documents.py",
    "dcp/session/session.py",
    "dcp/session/state.py",
    "dcp/stream/codec.py",
    "dcp/stream/hub.py",
    "dcp/stream/producer.py",
    "dcp/stream/snapshots.py",
    "dcp/stream/active_stream.py",
    "dcp/wire/frame.py",
    "vbucket/store/block.py",
    "vbucket/engine/bulk.py",
    "vbucket/engine/engine.py",
    "vbucket/model/entry.py",
    "vbucket/engine/item_cache.py",
    "vbucket/store/key_record.py",
    "vbucket/engine/keyspace.py",
    "vbucket/store/environment_lmdb.py",
    "vbucket/store/lmdb_file.py",
    "vbucket/store/lmdb_pages.py",
    "vbucket/log/record.py",
    "vbucket/upkeep/merge.py",
    "vbucket/engine/partition.py",
    "vbucket/store/runs.py",
    "vbucket/store/store.py",
    "vbucket/model/collection_counts.py",
    "vbucket/engine/versions.py",
    "vbucket/store/opened_blocks.py",
)
PACKAGES: Final = ("dcp", "vbucket", "failover")
"""Packages that are needed for the types of these modules."""
GROUP: Final = "dcpd"
"""The build makes one library, dcpd__mypyc, and for each module a stub that loads it."""
SOURCES: Final = "dcp/compiled_sources.txt"
"""The compiled sources with their checksums, so that changed sources are noticed."""
LIBRARY_PATTERNS: Final = ("*.so", "*.pyd")
LOCK: Final = "requirements/compile.txt"
"""What a compiled build needs in addition to hatchling; written by scripts/lock."""
_PIN: Final = re.compile(r"^([A-Za-z0-9_.-]+==[^\\\n]+?)\s*\\?$", re.MULTILINE)
"""A locked package with version and environment marker. Its hashes are on the lines below."""

_SETUP: Final = """
import sys
from mypyc.build import mypycify
from setuptools import setup
level, group, *modules = sys.argv[1:]
sys.argv[1:] = ["-q", "build_ext", "--build-lib", "built"]
extensions = mypycify(
    ["--config-file", "mypy.ini", *modules], opt_level=level, group_name=group, multi_file=True
)
setup(name=group, packages=[], ext_modules=extensions)
"""
_MYPY: Final = "[mypy]\nstrict = True\nignore_missing_imports = True\n"


class CompileError(Exception):
    """The modules could not be compiled; the text says why and what to try."""


def sources_text(root: Path) -> str:
    """Return a line with checksum and path for each module."""
    sums = (hashlib.sha256((root / name).read_bytes()).hexdigest() for name in COMPILED)
    return "".join(f"{digest}  {name}\n" for digest, name in zip(sums, COMPILED, strict=True))


def locked_packages(root: Path) -> list[str]:
    """Return the packages that compiling needs, in locked versions. Raises CompileError.

    Build requirements cannot have hashes (PEP 517), so only the versions are used.
    """
    try:
        found = _PIN.findall((root / LOCK).read_text())
    except FileNotFoundError:
        found = []
    if not found:
        raise CompileError(
            f"{LOCK} is missing or empty. It names what compiling needs: use a complete copy of "
            "the sources, or build without DCPD_COMPILE."
        )
    return found


def compile_into(root: Path, target: Path) -> list[Path]:
    """Compile the sources in `root`; put the libraries, and what they were made of, under `target`.

    Return their paths below it. Raises CompileError.
    """
    level = os.environ.get("DCPD_COMPILE_LEVEL", "3")
    with tempfile.TemporaryDirectory(prefix="dcpd-compile-") as folder:
        work = Path(folder)
        for package in PACKAGES:
            for source in (root / package).rglob("*.py"):
                copy = work / source.relative_to(root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)
        (work / "mypy.ini").write_text(_MYPY)
        done = subprocess.run(  # noqa: S603 - our own command
            [sys.executable, "-c", _SETUP, level, GROUP, *COMPILED],
            cwd=work, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            why = (done.stdout + done.stderr)[-3000:]
            raise CompileError(
                f"the hot modules could not be compiled:\n{why}\nIt takes a C compiler, Python's "
                f"headers, and the packages of {LOCK}, which pip installs for the build unless "
                "--no-build-isolation is given. Everything also works uncompiled, only slower."
            )
        built = work / "built"
        found = sorted(path for pattern in LIBRARY_PATTERNS for path in built.rglob(pattern))
        names = [path.relative_to(built) for path in found]
        for path, name in zip(found, names, strict=True):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target / name)
    sources = Path(SOURCES)
    (target / sources).write_text(sources_text(root))
    return [*names, sources]


def remove_from(root: Path) -> int:
    """Remove what was compiled in place; return how many files that were."""
    found = [path for pattern in LIBRARY_PATTERNS for path in root.glob(pattern)]
    found += [
        path
        for package in PACKAGES
        for pattern in LIBRARY_PATTERNS
        for path in (root / package).rglob(pattern)
    ]
    found += [path for path in [root / SOURCES] if path.exists()]
    for path in found:
        path.unlink()
    return len(found)


class CustomBuildHook(BuildHookInterface[Any]):
    """Hatchling calls it for every build. It only acts on wheels under DCPD_COMPILE=1."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return what the build needs besides hatchling; pip asks before it builds."""
        return locked_packages(Path(self.root)) if _is_asked_for() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries to a wheel."""
        if not _is_asked_for() or self.target_name != "wheel" or version == "editable":
            return
        root = Path(self.root)
        self._folder = tempfile.TemporaryDirectory(prefix="dcpd-wheel-")
        target = Path(self._folder.name)
        for name in compile_into(root, target):
            build_data["force_include"][str(target / name)] = str(name)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the temporary folder of the build."""
        folder: tempfile.TemporaryDirectory[str] | None = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()


def _is_asked_for() -> bool:
    return os.environ.get("DCPD_COMPILE", "") not in {"", "0"}


def main(arguments: list[str]) -> int:
    """Compile in place, or remove that again."""
    root = Path(__file__).resolve().parent
    print(f"removed {remove_from(root)} files")
    if arguments == ["--remove"]:
        return 0
    if arguments:
        print("usage: scripts/compile [--remove]", file=sys.stderr)
        return 2
    try:
        names = compile_into(root, root)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"compiled {len(COMPILED)} modules into {len(names) - 1} libraries beside the sources")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
