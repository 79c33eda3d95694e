"""Builds the loops in C beside the sources, unless they are built already.

    scripts/compile [--remove]

Run it again after a change of a source in C: until then dcpd and the tests refuse to start.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hatch_build


def remove_from(root: Path) -> bool:
    """Remove what was built beside the sources; return whether there was anything."""
    found = [
        *(root / hatch_build.FOLDER).glob("loops*.so*"),
        *(root / hatch_build.FOLDER).glob("loops*.pyd*"),
    ]
    found += [path for path in [root / hatch_build.BUILT_FROM] if path.exists()]
    for path in found:
        path.unlink()
    return bool(found)


def build_beside(root: Path) -> bool:
    """Build beside the sources, unless they are built already. Raises CompileError."""
    listing, made = root / hatch_build.BUILT_FROM, root / hatch_build.library()
    if made.exists() and listing.exists() and listing.read_text() == hatch_build.sources_text(root):
        return False
    remove_from(root)
    new = made.with_name(made.name + ".new")
    listing.write_text(hatch_build.build(root, new))
    new.replace(made)  # nobody loads half of a library
    return True


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Wait until no other process builds beside the sources here."""
    with (root / "hatch_build.py").open("rb") as file:
        with suppress(ImportError, OSError):  # where there is no such lock, go on without it
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """Build beside the sources, or remove that again."""
    root = Path(__file__).resolve().parents[1]
    if arguments not in ([], ["--remove"]):
        print("usage: scripts/compile [--remove]", file=sys.stderr)
        return 2
    try:
        with alone(root):
            if arguments or hatch_build.wish() == "0":
                if remove_from(root):
                    print("removed the loops in C: dcpd runs as plain Python")
            elif build_beside(root):
                print("compiled the loops in C beside the sources")
    except hatch_build.CompileError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"the loops cannot be read or written here: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
