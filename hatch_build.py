"""What a wheel has: the packages below `dcpd`, and the loops in C (vbucket/native).

    pip install .          a wheel with both
    scripts/compile        the loops beside the sources (scripts/build_beside.py); scripts/install
                           calls it

In a wheel all packages are in `dcpd`, so that they take no other name of a program that uses them:
`clients` becomes `dcpd.clients`, and its imports are changed to that. An editable installation has
them as they are. docs/decisions.md says why.

The loops are built where there are a C compiler and Python's headers.

Without them everything works, only slower, and `dcpd --version` says why they are missing.
DCPD_COMPILE=0 builds none; DCPD_COMPILE=1 fails where they cannot be built. DCPD_COMPILE_LEVEL is
the C compiler's optimisation level (3).
"""

from __future__ import annotations

import ast
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER: Final = Path("vbucket/native")
BUILT_FROM: Final = FOLDER / "built_from.txt"
"""Each source with its checksum, so that changed ones are noticed (vbucket/native/form.py)."""
NOT_BUILT: Final = FOLDER / "not_built.txt"
"""Why a wheel has no loops."""

PACKAGES: Final = ("clients", "dcp", "failover", "vbucket")
NAME: Final = "dcpd"
"""The one name that a wheel takes."""
FRONT: Final = Path("clients/front") / NAME
"""What this name has itself: the public names of the packages."""
NOT_COPIED: Final = ("__pycache__", "*.so*", "*.pyd*", "built_from.txt", "not_built.txt", "front")

SAY_S: Final = 3.0
"""Between two lines that say how far the compiler is."""


class CompileError(Exception):
    """The loops could not be built; the text says why and what to try."""


def library() -> Path:
    """Return the path of the library for this interpreter."""
    return FOLDER / f"loops{sysconfig.get_config_var('EXT_SUFFIX')}"


def sources_text(root: Path) -> str:
    """Return a line with checksum and path for each source."""
    names = sorted(path.name for path in (root / FOLDER).iterdir() if path.suffix in {".c", ".h"})
    digests = {name: hashlib.sha256((root / FOLDER / name).read_bytes()) for name in names}
    return "".join(f"{digests[name].hexdigest()}  {FOLDER / name}\n" for name in names)


def cannot_compile() -> str:
    """Return why nothing can be compiled here, "" if it can."""
    if shutil.which(_compiler()[0]) is None:
        return f"there is no C compiler ({_compiler()[0]})"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.exists() else f"Python's headers are missing ({header})"


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def build(root: Path, target: Path) -> str:
    """Build the library as the file `target`; return what it was made of. Raises CompileError."""
    if why := cannot_compile():
        raise CompileError(f"nothing can be compiled: {why}")
    try:
        with tempfile.TemporaryDirectory(prefix="dcpd-compile-") as folder:
            work = Path(folder)
            shutil.copytree(root / FOLDER, work / FOLDER)  # the sources may change meanwhile
            made_of = sources_text(work)
            _compile(work / FOLDER, work / "library")
            shutil.copyfile(work / "library", target)
            return made_of
    except OSError as error:
        raise CompileError(f"the build could not read or write a file: {error}") from error


def _compile(folder: Path, target: Path) -> None:
    level = os.environ.get("DCPD_COMPILE_LEVEL", "3")
    flags = [*shlex.split(sysconfig.get_config_var("CFLAGS") or ""), f"-O{level}", "-std=c11",
             *shlex.split(sysconfig.get_config_var("CCSHARED") or "-fPIC"),
             "-I", sysconfig.get_path("include")]  # fmt: skip
    linker = shlex.split(sysconfig.get_config_var("LDSHARED") or "cc -shared")
    sources = sorted(folder.glob("*.c"))
    objects = [source.with_suffix(".o") for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        steps = [
            [*_compiler(), *flags, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        print(f"compiling the loops in C: {len(steps)} files", flush=True)
        said_s = time.monotonic()
        for count, done in enumerate(threads.map(_run, steps), 1):
            _check(done)
            if time.monotonic() - said_s > SAY_S:
                said_s = time.monotonic()
                print(f"  {count} of {len(steps)}", flush=True)
    _check(_run([*_compiler(), *linker[1:], *map(str, objects), "-o", str(target)]))


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603


def _check(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        why = (done.stdout + done.stderr)[-3000:]
        raise CompileError(f"the loops in C could not be compiled:\n{why}")


def module_names(root: Path) -> frozenset[str]:
    """Return the dotted names of the modules of all packages."""
    return frozenset(
        ".".join(path.relative_to(root).with_suffix("").parts)
        for package in PACKAGES
        for path in (root / package).rglob("*.py")
    )


def moved(source: str, modules: frozenset[str]) -> str:
    """Return a module's source for a wheel: what it imports from the packages is below `dcpd`.

    So are strings that are a module's name (`python -m dcp.server.main`). Lines keep their numbers.
    Raises ValueError for an import that binds a package's own name, as no name can stand for it.
    """
    lines = source.encode().splitlines(keepends=True)
    for line, column, name in sorted(_names_to_move(ast.parse(source), modules), reverse=True):
        text = lines[line - 1]
        if not text[column:].startswith(name.encode()):
            raise ValueError(f"line {line}: {name!r} is written in a form that is not understood")
        lines[line - 1] = text[:column] + f"{NAME}.".encode() + text[column:]
    return b"".join(lines).decode()


def _names_to_move(tree: ast.Module, modules: frozenset[str]) -> Iterator[tuple[int, int, str]]:
    """Yield line, column in bytes, and text of each name that a wheel has below `dcpd`."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(name), level=0) if name.split(".")[0] in PACKAGES:
                yield node.lineno, node.col_offset + len("from "), name
            case ast.Import(names=aliases):
                for alias in aliases:
                    if alias.name.split(".")[0] in PACKAGES:
                        if alias.asname is None:
                            raise ValueError(
                                f"line {node.lineno}: `import {alias.name}` has no `as`"
                            )
                        yield alias.lineno, alias.col_offset, alias.name
            case ast.Constant(value=str(name)) if "." in name and name in modules:
                yield node.lineno, node.col_offset + len('"'), name


def lay_out(root: Path, target: Path) -> None:
    """Write the package `dcpd` of a wheel into a new folder, without the loops."""
    ignored = shutil.ignore_patterns(*NOT_COPIED)
    shutil.copytree(root / FRONT, target, ignore=ignored)
    for package in PACKAGES:
        shutil.copytree(root / package, target / package, ignore=ignored)
    modules = module_names(root)
    for path in [*target.rglob("*.py"), *target.rglob("*.pyi")]:
        try:
            path.write_text(moved(path.read_text(), modules))
        except ValueError as error:
            raise ValueError(f"{path.relative_to(target)}: {error}") from error


def wish() -> str:
    """Return DCPD_COMPILE: "0", "1" or "" (where it can be done)."""
    asked = os.environ.get("DCPD_COMPILE", "")
    if asked not in {"", "0", "1"}:
        raise CompileError(f"DCPD_COMPILE is {asked!r}; it must be 0 or 1, or not be set")
    return asked


class CustomBuildHook(BuildHookInterface[Any]):
    """Hatchling calls it for every build. It only acts on wheels that are not editable."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the packages to a wheel, and the library or the reason why it has none."""
        asked = wish()
        if self.target_name != "wheel" or version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="dcpd-wheel-")
        made, text = Path(self._folder.name) / "loops", Path(self._folder.name) / "text"
        included = build_data["force_include"]
        lay_out(Path(self.root), Path(self._folder.name) / NAME)
        included[str(Path(self._folder.name) / NAME)] = NAME
        # Man pages and completion, which scripts/pages writes. File by file: where the selection is
        # bypassed, hatchling leaves out a folder of shared data.
        for path in sorted((Path(self.root) / "deploy/share").rglob("*")):
            if path.is_file():
                relative = path.relative_to(Path(self.root) / "deploy/share")
                build_data["shared_data"][str(path)] = str(Path("share") / relative)
        try:
            if asked == "0":
                raise CompileError("DCPD_COMPILE=0")
            text.write_text(build(Path(self.root), made))
        except CompileError as error:
            if asked == "1":
                raise
            reason = str(error).splitlines()[0].rstrip(":")
            print(f"dcpd: built without the loops in C: {reason}", file=sys.stderr)
            text.write_text(reason + "\n")
            included[str(text)] = str(NAME / NOT_BUILT)
            return
        included[str(text)] = str(NAME / BUILT_FROM)
        included[str(made)] = str(NAME / library())
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the temporary folder of the build."""
        folder: tempfile.TemporaryDirectory[str] | None = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()
