"""The disk alone: how long does it take to make a commit group durable, without any server?

    python -m benchmarks.disk --seconds 600                     groups one after the other
    python -m benchmarks.disk --seconds 600 --rate 450          so many a second
    python -m benchmarks.disk --seconds 600 --rate 450 --beside 150

Each group is a write past the page cache into a file of zeros, and a sync, as dcpd's log makes them.
With `--beside` a second thread writes so many megabytes a second into another file, in runs of
pages at random places, with a sync after each slice. That is what merges do to the disk. The
latencies are the floor for every server that keeps what it answers on this disk: one whose
processor time costs nothing has them, too. So run it shortly before and after what it is compared
with: a disk that others share has good and bad hours.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.histogram import Histogram

KIB: Final = 1024
MIB: Final = 1024 * KIB
PAGE_BYTES: Final = 4096
LOG_BYTES: Final = 64 * MIB
"""Groups go round in a file of this size, which is written before: a sync changes no metadata."""
STORE_BYTES: Final = 1024 * MIB
RUN_BYTES: Final = 32 * KIB
"""What a merge writes at one place: a block of a partition."""
SLICE_BYTES: Final = 8 * MIB
"""What it writes between two syncs."""
PERCENTILES: Final = (50, 99, 99.9, 99.99)


def filled(folder: Path, name: str, length: int) -> int:
    """Return the descriptor of a new file of zeros that are on disk."""
    fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for at in range(0, length, MIB):
        os.pwrite(fd, bytes(MIB), at)
    os.fsync(fd)
    return fd


def direct(folder: Path, name: str) -> int:
    """Return a descriptor past the page cache, or an ordinary one where there is no such thing."""
    try:
        return os.open(folder / name, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.open(folder / name, os.O_RDWR | os.O_CLOEXEC)


def write_groups(
    fd: int, group_bytes: int, rate: float, seconds: float, now: Callable[[], float]
) -> tuple[Histogram, float]:
    """Return the latencies in microseconds, and how many seconds it took.

    A latency begins when the group is due, so groups that wait for a slow one before them count
    that wait. With a rate of 0 each is due when the one before is done.
    """
    found = Histogram()
    group = mmap.mmap(-1, group_bytes)  # direct writes need an address at the beginning of a page
    group.write(random.Random(1).randbytes(group_bytes))
    began = due = now()
    at = 0
    while now() < began + seconds:
        if rate and (early := due - now()) > 0:
            time.sleep(early)
        if not rate:
            due = now()
        os.pwrite(fd, group, at)
        os.fdatasync(fd)
        found.add(round(1e6 * (now() - due)))
        due += 1 / rate if rate else 0
        at = (at + group_bytes) % (LOG_BYTES - group_bytes) // PAGE_BYTES * PAGE_BYTES
    return found, now() - began


def write_beside(fd: int, bytes_a_second: float, done: threading.Event) -> None:
    """Write and sync slices until the end."""
    rng = random.Random(2)
    run = rng.randbytes(RUN_BYTES)
    due = time.perf_counter()
    while not done.wait(max(0.0, due - time.perf_counter())):
        for _ in range(SLICE_BYTES // RUN_BYTES):
            os.pwrite(fd, run, rng.randrange(STORE_BYTES // RUN_BYTES) * RUN_BYTES)
        os.fdatasync(fd)
        due += SLICE_BYTES / bytes_a_second


def measured(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures by name: groups a second, and milliseconds."""
    group_bytes = -(-options.group * KIB // PAGE_BYTES) * PAGE_BYTES
    os.close(filled(folder, "log", LOG_BYTES))
    log = direct(folder, "log")
    store = filled(folder, "store", STORE_BYTES if options.beside else 0)
    done = threading.Event()
    beside = threading.Thread(
        target=write_beside, args=(store, options.beside * 1e6, done), name="beside"
    )
    try:
        if options.beside:
            beside.start()
        found, seconds = write_groups(
            log, group_bytes, options.rate, options.seconds, time.perf_counter
        )
    finally:
        done.set()
        if beside.ident is not None:
            beside.join()
        os.close(store)
        os.close(log)
    figures = {f"p{percent:g}, ms": found.percentile(percent) / 1000 for percent in PERCENTILES}
    return {
        "groups a second": len(found) / seconds,
        **figures,
        "longest, ms": found.percentile(100) / 1000,
    }


def at_least_0(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return number


def group_kib(text: str) -> int:
    number = int(text)
    if not 1 <= number <= MIB // KIB:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {MIB // KIB} KiB")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.disk", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seconds", type=at_least_0, default=60.0)
    parser.add_argument("--group", type=group_kib, default=48, metavar="KIB",
                        help="bytes of a group: 256 SETs of 128 bytes make 48 KiB")  # fmt: skip
    parser.add_argument("--rate", type=at_least_0, default=0.0, metavar="GROUPS",
                        help="groups a second; 0, the default: one after the other")  # fmt: skip
    parser.add_argument("--beside", type=at_least_0, default=0.0, metavar="MB",
                        help="megabytes a second that a second thread writes")  # fmt: skip
    parser.add_argument("--folder", type=Path, help="where the files are")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.folder) as folder:
        print(json.dumps(measured(Path(folder), options), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
