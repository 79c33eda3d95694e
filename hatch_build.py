"""Builds C extensions: the hot modules, compiled by mypyc, and the loops in C (vbucket/native).

    pip install .          a wheel with them, where there are a C compiler and Python's headers
    scripts/install        beside the sources (scripts/compile does only this part)

Where they cannot be built, the same modules run as plain Python, and `dcpd --version` says why.
DCPD_COMPILE=0 builds plain Python; DCPD_COMPILE=1 fails where the extensions cannot be built.
DCPD_COMPILE_LEVEL is the C compiler's optimisation level (3). pip installs what the build needs
into its isolated build environment, in the versions of pyproject.toml (hatchling, and what it
requires) and of requirements/compile.txt (what compiling takes). scripts/compile takes it from
.venv. `COMPILED` lists the compiled modules: the path of a SET, a GET
and a stream, and what the store process does.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILED: Final = (
    "dcp/session/document_runs.py",
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
    "vbucket/upkeep/partition_merge.py",
    "vbucket/upkeep/staging.py",
    "vbucket/engine/partition.py",
    "vbucket/store/runs.py",
    "vbucket/store/store.py",
    "vbucket/model/collection_counts.py",
    "vbucket/engine/versions.py",
    "vbucket/store/opened_blocks.py",
)
LOOPS: Final = "vbucket.native.loops"
LOOPS_SOURCES: Final = (
    "vbucket/native/loops.c",
    "vbucket/native/attributes.c",
    "vbucket/native/blocks.c",
    "vbucket/native/changes.c",
    "vbucket/native/compaction.c",
    "vbucket/native/counts.c",
    "vbucket/native/crc32c.c",
    "vbucket/native/dict_ahead.c",
    "vbucket/native/frames.c",
    "vbucket/native/get_request.c",
    "vbucket/native/get_run.c",
    "vbucket/native/group_entry.c",
    "vbucket/native/group_run.c",
    "vbucket/native/json_scan.c",
    "vbucket/native/json_string.c",
    "vbucket/native/key_tree.c",
    "vbucket/native/live_run.c",
    "vbucket/native/log_thread.c",
    "vbucket/native/packets.c",
    "vbucket/native/presumed.c",
    "vbucket/native/replay_run.c",
    "vbucket/native/set_old.c",
    "vbucket/native/json_text.c",
    "vbucket/native/set_request.c",
    "vbucket/native/set_run.c",
    "vbucket/native/staging.c",
    "vbucket/native/stored_documents.c",
)
LOOPS_HEADERS: Final = (
    "vbucket/native/attributes.h",
    "vbucket/native/blocks.h",
    "vbucket/native/changes.h",
    "vbucket/native/compaction.h",
    "vbucket/native/counts.h",
    "vbucket/native/crc32c.h",
    "vbucket/native/dict_ahead.h",
    "vbucket/native/frames.h",
    "vbucket/native/get_request.h",
    "vbucket/native/get_run.h",
    "vbucket/native/group_entry.h",
    "vbucket/native/group_run.h",
    "vbucket/native/json_scan.h",
    "vbucket/native/json_string.h",
    "vbucket/native/key_tree.h",
    "vbucket/native/live_run.h",
    "vbucket/native/log_thread.h",
    "vbucket/native/packets.h",
    "vbucket/native/presumed.h",
    "vbucket/native/replay_run.h",
    "vbucket/native/set_parts.h",
    "vbucket/native/json_text.h",
    "vbucket/native/set_request.h",
    "vbucket/native/set_run.h",
    "vbucket/native/staging.h",
    "vbucket/native/stored_documents.h",
    "vbucket/native/key_record.h",
)
PACKAGES: Final = ("dcp", "vbucket", "failover")
"""Packages that are needed for the types of these modules."""
GROUP: Final = "dcpd"
"""The build makes one library, dcpd__mypyc, and for each module a stub that loads it."""
SOURCES: Final = "dcp/compiled_sources.txt"
"""The sources with their checksums, so that changed ones are noticed. Lines with ` *` are modules
that stay plain, and are imported by compiled ones: constants of theirs are compiled in."""
PLAIN_BECAUSE: Final = "dcp/plain_because.txt"
"""Why a wheel has no extensions."""
KEPT_FOLDER: Final = "compiled"
"""Below the environment: what was compiled in place last, of each form. It is copied from there, so
that scripts that want another form need not compile again."""
LIBRARY_PATTERNS: Final = ("*.so", "*.pyd")
NEW: Final = ".new"
"""After the name of a file that is being written: nobody loads half of a library."""
LOCK: Final = "requirements/compile.txt"
"""What a compiled build needs, hatchling included; written by scripts/lock."""
_PIN: Final = re.compile(r"^([A-Za-z0-9_.-]+==[^\\\n]+?)\s*\\?$", re.MULTILINE)
"""A locked package with version and environment marker. Its hashes are on the lines below."""

_SETUP: Final = """
import sys
from setuptools import Extension, setup
level, group, loops, *sources = sys.argv[1:]
sys.argv[1:] = ["-q", "build_ext", "--build-lib", "built"]
if sources[0].endswith(".c"):
    extensions = [Extension(loops, sources, extra_compile_args=["-O" + level, "-std=c11"])]
else:
    from mypyc.build import mypycify
    extensions = mypycify(
        ["--config-file", "mypy.ini", *sources], opt_level=level, group_name=group, multi_file=True
    )
setup(name=group, packages=[], ext_modules=extensions)
"""
_MYPY: Final = "[mypy]\nstrict = True\nignore_missing_imports = True\n"


class CompileError(Exception):
    """The modules could not be compiled; the text says why and what to try."""


def sources_text(root: Path, *, loops_only: bool = False) -> str:
    """Return a line with checksum and path for each source."""
    names = [(name, "  ") for name in (*LOOPS_SOURCES, *LOOPS_HEADERS)]
    if not loops_only:
        names += [(name, "  ") for name in COMPILED]
        names += [(name, " *") for name in imported_by_compiled(root)]
    return "".join(
        f"{hashlib.sha256((root / name).read_bytes()).hexdigest()}{mark}{name}\n"
        for name, mark in names
    )


def imported_by_compiled(root: Path) -> list[str]:
    """Return the other modules that the compiled ones import, directly or not."""
    found = set(COMPILED)
    todo = list(COMPILED)
    while todo:
        modules: set[str] = set()
        for node in ast.walk(ast.parse((root / todo.pop()).read_text())):
            if isinstance(node, ast.Import):
                modules.update(each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.update(
                    (node.module, *(f"{node.module}.{each.name}" for each in node.names))
                )
        for module in modules:
            path = module.replace(".", "/")
            for name in (f"{path}.py", f"{path}/__init__.py", f"{path}.pyi"):
                is_ours = name.split("/")[0].removesuffix(".py") in PACKAGES
                if is_ours and name not in found and (root / name).exists():
                    found.add(name)
                    todo.append(name)
    return sorted(found - set(COMPILED))


def cannot_compile() -> str:
    """Return why nothing can be compiled here, "" if it can."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    if shutil.which(compiler.split()[0]) is None:
        return f"there is no C compiler ({compiler.split()[0]})"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.exists() else f"Python's headers are missing ({header})"


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


def compile_into(root: Path, target: Path, *, loops_only: bool = False) -> list[Path]:
    """Compile the sources in `root`; put the libraries, and what they were made of, under `target`.

    Return their paths below it, in the order for `put_in_place`. Raises CompileError.
    """
    if why := cannot_compile():
        raise CompileError(f"nothing can be compiled: {why}")
    try:
        return _compile_into(root, target, loops_only=loops_only)
    except OSError as error:
        raise CompileError(f"the build could not read or write a file: {error}") from error


def _compile_into(root: Path, target: Path, *, loops_only: bool) -> list[Path]:
    with tempfile.TemporaryDirectory(prefix="dcpd-compile-") as folder:
        work = Path(folder)
        for package in PACKAGES:
            for source in (root / package).rglob("*.*"):
                if source.suffix in {".py", ".pyi", ".c", ".h"}:
                    copy = work / source.relative_to(root)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, copy)
        (work / "mypy.ini").write_text(_MYPY)
        _run_setup(work, LOOPS_SOURCES)  # first, because it fails within a second
        if not loops_only:
            _run_setup(work, COMPILED)
        built = work / "built"
        found = [path for pattern in LIBRARY_PATTERNS for path in built.rglob(pattern)]
        found.sort(key=lambda path: (path.parent != built, path))
        names = [path.relative_to(built) for path in found]
        made_of = sources_text(work, loops_only=loops_only)  # the others may have changed since
        for path, name in zip(found, names, strict=True):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target / name)
    listing = Path(SOURCES)
    (target / listing).parent.mkdir(parents=True, exist_ok=True)
    (target / listing).write_text(made_of)
    return [listing, *names]


def _run_setup(work: Path, sources: tuple[str, ...]) -> None:
    """Build C extensions of these sources below `work`. Raises CompileError."""
    level = os.environ.get("DCPD_COMPILE_LEVEL", "3")
    done = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-c", _SETUP, level, GROUP, LOOPS, *sources],
        cwd=work, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        why = (done.stdout + done.stderr)[-3000:]
        raise CompileError(
            f"the hot modules could not be compiled:\n{why}\nIt takes a C compiler, Python's "
            f"headers, and the packages of {LOCK}, which pip installs for the build unless "
            "--no-build-isolation is given. Everything also works uncompiled, only slower."
        )


def remove_from(root: Path) -> int:
    """Remove what was compiled in place; return how many files that were.

    First the modules, then what they load, then the list: while that is there, an interruption is
    noticed (dcp.compiled).
    """
    patterns = [pattern + end for pattern in LIBRARY_PATTERNS for end in ("", NEW)]
    found = [
        path
        for package in PACKAGES
        for pattern in patterns
        for path in (root / package).rglob(pattern)
    ]
    found += [path for pattern in patterns for path in root.glob(pattern)]
    found += [path for path in [root / (SOURCES + NEW), root / SOURCES] if path.exists()]
    for path in found:
        path.unlink()
    return len(found)


def put_in_place(kept: Path, root: Path, names: list[Path]) -> None:
    """Copy what was compiled beside the sources: the list, what modules load, then the modules.

    Each file appears as a whole.
    """
    for name in names:
        new = root / f"{name}{NEW}"
        shutil.copy2(kept / name, new)
        new.replace(root / name)


class CustomBuildHook(BuildHookInterface[Any]):
    """Hatchling calls it for every build. It only acts on wheels that are not editable."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return what the build needs; pip asks before it builds. If nothing is compiled, that is
        only what it has installed already, by pyproject.toml.
        """
        wish = _wish()
        if wish == "0" or (not wish and cannot_compile()):
            return []
        return locked_packages(Path(self.root))

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries to a wheel, or the reason why it has none."""
        wish = _wish()
        if self.target_name != "wheel" or version == "editable":
            return
        root = Path(self.root)
        self._folder = tempfile.TemporaryDirectory(prefix="dcpd-wheel-")
        target = Path(self._folder.name)
        try:
            if wish == "0":
                raise CompileError("DCPD_COMPILE=0")
            names = compile_into(root, target)
        except CompileError as error:
            if wish == "1":
                raise
            reason = str(error).splitlines()[0].rstrip(":")
            print(f"dcpd: built as plain Python: {reason}", file=sys.stderr)
            if str(error) != reason:
                print(error, file=sys.stderr)
            (target / "reason").write_text(reason + "\n")
            build_data["force_include"][str(target / "reason")] = PLAIN_BECAUSE
            return
        for name in names:
            build_data["force_include"][str(target / name)] = str(name)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the temporary folder of the build."""
        folder: tempfile.TemporaryDirectory[str] | None = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()


def _wish() -> str:
    """Return DCPD_COMPILE: "0", "1" or "" (where it can be done)."""
    wish = os.environ.get("DCPD_COMPILE", "")
    if wish not in {"", "0", "1"}:
        raise CompileError(f"DCPD_COMPILE is {wish!r}; it must be 0 or 1, or not be set")
    return wish


def is_in_place(root: Path, *, loops_only: bool) -> bool:
    """Whether exactly these sources are compiled in place, for this interpreter."""
    listing = root / SOURCES
    if not listing.exists():
        return False
    if listing.read_text() != sources_text(root, loops_only=loops_only):
        return False
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    names = (LOOPS_SOURCES[0], *(() if loops_only else (f"{GROUP}__mypyc.py", *COMPILED)))
    return all((root / name).with_suffix(suffix).exists() for name in names)


def compile_in_place(root: Path, *, loops_only: bool) -> str:
    """Compile beside the sources, or take what was compiled of the same sources before, from
    KEPT_FOLDER. Return what was done. Raises CompileError.
    """
    if is_in_place(root, loops_only=loops_only):
        return ""
    what = "the loops in C" if loops_only else f"the loops in C and {len(COMPILED)} modules"
    level = os.environ.get("DCPD_COMPILE_LEVEL", "3")
    lock = (root / LOCK).read_bytes() if (root / LOCK).exists() else b""
    made_of = sources_text(root, loops_only=loops_only)
    facts = f"{sys.version} {level} {made_of}".encode()
    digest = hashlib.sha256(b"".join([facts, lock, Path(__file__).read_bytes()]))
    kept = Path(sys.prefix) / KEPT_FOLDER / ("loops" if loops_only else "all")
    stamp = kept / digest.hexdigest()
    remove_from(root)
    names = kept_names(stamp)
    if not names:
        shutil.rmtree(kept, ignore_errors=True)
        names = compile_into(root, kept, loops_only=loops_only)
        if (kept / SOURCES).read_text() == made_of:
            stamp.write_text("".join(f"{_checksum(kept / name)}  {name}\n" for name in names))
    put_in_place(kept, root, names)
    return f"compiled {what} beside the sources"


def kept_names(stamp: Path) -> list[Path]:
    """Return the names of what is kept, none if it is not there, or is not what was compiled."""
    if not stamp.exists():
        return []
    rows = [line.split("  ", 1) for line in stamp.read_text().splitlines()]
    for digest, name in rows:
        path = stamp.parent / name
        if not path.exists() or _checksum(path) != digest:
            return []
    return [Path(name) for _, name in rows]


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Wait until no other process compiles in place here."""
    with (root / "hatch_build.py").open("rb") as file:
        with suppress(ImportError, OSError):  # where there is no such lock, go on without it
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


USAGE: Final = """usage: scripts/compile [--loops | --remove]
  --loops   only the loops in C (vbucket/native), which takes seconds; the rest is plain Python
  --remove  remove what was compiled
"""


def main(arguments: list[str]) -> int:
    """Compile in place, or remove that again."""
    root = Path(__file__).resolve().parent
    if arguments not in ([], ["--loops"], ["--remove"]):
        print(USAGE, end="", file=sys.stderr)
        return 2
    try:
        with alone(root):
            if arguments == ["--remove"] or _wish() == "0":
                removed = remove_from(root)
                if removed or arguments:
                    print(f"removed {removed} files: dcpd runs as plain Python")
            elif done := compile_in_place(root, loops_only=bool(arguments)):
                print(done)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"the compiled modules cannot be read or written here: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
