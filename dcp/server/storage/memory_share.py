"""How much memory the item cache gets with `item_cache_bytes = auto`: a share of what the process
may use.

What the process may use is the smallest of the machine's memory, the limits of its cgroup and of
the cgroups above it (version 2 or 1), and its limit of address space. A limit that cannot be read
does not count. The numbers are read once, at start.

`tune_memory` is about the same memory: how much of what a process frees stays with it, and how
rarely the cyclic collector looks for garbage.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

SHARE: Final = 8
"""The cache gets an eighth. Memtables, buffers, the store process and the page cache, in which LMDB
has the store, need the rest; several nodes may run on one machine."""
AUTO_BYTES_MAX: Final = 384 << 20
"""Limit of `auto`: 1,100,000 documents of 128 bytes. A larger cache is a decision: the page cache
has the store anyway, and gives its memory back."""
AUTO_BYTES_MIN: Final = 1 << 20

KEPT_SHARE: Final = 32
KEPT_BYTES_MAX: Final = 64 << 20
"""Freed memory at the end of the heap that a process keeps for the next large value: a share of
what it may use, or this if that is less."""
LARGE_BYTES: Final = 32 << 20
"""Size from which memory comes from the kernel by itself, and goes back at once: the most that
glibc takes for it."""
GC_THRESHOLDS: Final = (50_000, 20, 50)
"""The data is bytes in dictionaries and lists, which the cyclic collector does not track. It should
look at the rest rarely: a full pass stops the loop, and merges make many objects that end soon."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""

_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
_CGROUPS_OF_SELF: Final = Path("/proc/self/cgroup")


class CacheSize(NamedTuple):
    """The size of the item cache, and where it comes from."""

    bytes_max: int
    reason: str
    """In words, for the log."""


def item_cache_size(setting: int | None) -> CacheSize:
    """Return the size of the item cache. None stands for `auto`."""
    if setting is not None:
        return CacheSize(setting, "item_cache_bytes")
    return auto_size(usable_bytes())


def auto_size(limits: dict[str, int]) -> CacheSize:
    """Return the size for `auto`; `limits` are the bytes by what limits them, at least one."""
    what = min(limits, key=lambda name: (limits[name], name))
    size = max(AUTO_BYTES_MIN, min(limits[what] // SHARE, AUTO_BYTES_MAX))
    return CacheSize(size, f"auto: 1/{SHARE} of {what} ({limits[what] >> 20} MiB), 384 MiB at most")


def usable_bytes(
    root: Path = _CGROUP_ROOT, cgroups_of_self: Path = _CGROUPS_OF_SELF
) -> dict[str, int]:
    """Return the limits of this process's memory by name."""
    limits = {"the machine's memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    cgroup = _cgroup_limit(root, cgroups_of_self)
    if cgroup is not None:
        limits["the cgroup's limit"] = cgroup
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits["the limit of address space"] = soft
    return limits


def _cgroup_limit(root: Path, cgroups_of_self: Path) -> int | None:
    """Return the lowest limit of the process's cgroup and those above it; None: there is none.

    In a container the path of the host may not exist below the root, which then is the container's
    own cgroup.
    """
    try:
        lines = cgroups_of_self.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        relative = PurePosixPath(path.lstrip("/"))
        for folder in (relative, *relative.parents):
            found += _read_limit(top / folder / name)
    return min(found, default=None)


def _read_limit(file: Path) -> list[int]:
    """Return the limit in a file; nothing if there is no file, or it has no number ("max")."""
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isascii() and text.isdigit() else []


def tune_memory() -> None:
    """Let the cyclic collector look rarely, and malloc keep some of what is freed. Without the
    latter, a value of a megabyte gives its pages back to the kernel when it is freed, and the next
    one waits for new ones: a quarter of the processor time of such a SET. Only glibc has it.
    """
    gc.set_threshold(*GC_THRESHOLDS)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        kept_bytes = min(*usable_bytes().values(), KEPT_SHARE * KEPT_BYTES_MAX) // KEPT_SHARE
        mallopt(_M_TRIM_THRESHOLD, kept_bytes)
