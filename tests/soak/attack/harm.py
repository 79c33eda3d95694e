"""Damage to one file or folder: what disks, copies and people do to data.

    flip      one bit is changed
    zero      a range, or a whole page of 4 KiB, is zeros
    noise     the same with random bytes
    cut       the file ends early, at any byte
    empty     the file has no bytes
    shorten   bytes in the middle are missing, and what follows moves up
    remove    the file, or a folder with its contents, is missing

It finds the files itself and does not know their contents. Zeros at the end of a file are mostly
not touched, because they are unused.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Final, NamedTuple

PAGE_BYTES: Final = 4096
IN_ZEROS: Final = 0.1
"""The share of cases that may damage the zeros at a file's end."""
FOLDER_PART: Final = 0.03
"""The share of cases in which a whole folder goes missing."""
KINDS: Final = {
    "flip": 8, "zero": 3, "noise": 3, "cut": 3, "empty": 1, "shorten": 2, "remove": 2,
}  # fmt: skip
"""Kind -> its weight."""


class Harm(NamedTuple):
    """One damage. `seed` determines the bytes of noise."""

    path: str
    """Relative to the damaged folder."""
    kind: str
    at: int = 0
    size: int = 0
    """Number of bytes; for a flip, the bit."""
    seed: int = 0

    @property
    def pages(self) -> range:
        """Pages that a flip, zeros or noise touch."""
        size = 1 if self.kind == "flip" else self.size
        return range(self.at // PAGE_BYTES, (self.at + size - 1) // PAGE_BYTES + 1)

    def __str__(self) -> str:
        if self.kind == "flip":
            return f"flip bit {self.size} of byte {self.at} of {self.path}"
        if self.kind in {"remove", "empty"}:
            return f"{self.kind} {self.path}"
        if self.kind == "cut":
            return f"cut {self.path} at byte {self.at}"
        return f"{self.kind} {self.size} bytes at {self.at} of {self.path}"


def files_in(folder: Path) -> list[str]:
    """Return all files below a folder, sorted."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in found)


def draw_harm(folder: Path, draw: random.Random, files: list[str] | None = None) -> Harm:
    """Draw a damage. Larger files are more likely, but less than in proportion to their size."""
    names = files_in(folder) if files is None else files
    folders = sorted({str(Path(name).parent) for name in names} - {"."})
    if folders and draw.random() < FOLDER_PART:
        return Harm(draw.choice(folders), "remove")
    weights = [((folder / name).stat().st_size + 1).bit_length() ** 2 for name in names]
    path = draw.choices(names, weights)[0]
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    data = (folder / path).read_bytes()
    if not data or kind == "remove":
        return Harm(path, "remove")
    used = len(data) if draw.random() < IN_ZEROS else max(1, len(data.rstrip(b"\0")))
    at = draw.randrange(used)
    if kind == "flip":
        return Harm(path, kind, at, draw.randrange(8))
    if kind == "cut":
        return Harm(path, kind, at)
    if kind == "empty":
        return Harm(path, kind)
    size = draw.choice((1, 8, 64, 512, PAGE_BYTES))
    if size == PAGE_BYTES:
        at -= at % PAGE_BYTES
    return Harm(path, kind, at, min(size, len(data) - at), draw.getrandbits(32))


def apply(folder: Path, harm: Harm) -> bool:
    """Apply a damage; return whether any byte has changed."""
    path = folder / harm.path
    if harm.kind == "remove":
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        return True
    before = path.read_bytes()
    after = damaged(before, harm)
    path.write_bytes(after)
    return before != after


def damaged(data: bytes, harm: Harm) -> bytes:
    """Return a file's bytes after the damage."""
    head, rest = data[: harm.at], data[harm.at + harm.size :]
    match harm.kind:
        case "flip":
            return head + bytes([data[harm.at] ^ 1 << harm.size]) + data[harm.at + 1 :]
        case "zero":
            return head + bytes(harm.size) + rest
        case "noise":
            return head + random.Random(harm.seed).randbytes(harm.size) + rest
        case "cut" | "empty":
            return head
        case "shorten":
            return head + rest
    raise ValueError(harm.kind)
