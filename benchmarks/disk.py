"""The disk alone: how long does it take to make a commit group durable, without any server?

    python -m benchmarks.disk --seconds 600                     groups one after the other
    python -m benchmarks.disk --seconds 600 --rate 450          so many a second
    python -m benchmarks.disk --seconds 600 --rate 450 --beside 150

Each group is a write past the page cache into a file of zeros, and a sync. dcpd's log does the
same. With `--beside` a second thread writes so many megabytes a second into another file, in runs
of pages at random places, with a sync after each slice. Merges do that. The latencies are the floor
for every server that keeps what it answers on this disk, however fast its code is. A disk that
others share has good and bad hours, so run this right before and after what it is compared with.
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

from clients.cli.node.histogram import Histogram

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
GROUP_KIB_MAX: Final = 1024
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


class Log:
    """A file of zeros, whose groups are written one after another, and go round."""

    def __init__(self, folder: Path, group_bytes: int) -> None:
        os.close(filled(folder, "log", LOG_BYTES))
        self._fd = direct(folder, "log")
        self._group = mmap.mmap(-1, group_bytes)  # direct writes begin at a page's beginning
        self._group.write(random.Random(1).randbytes(group_bytes))
        self._at = 0

    def write_group(self) -> None:
        """Return when one more group is on disk."""
        os.pwrite(self._fd, self._group, self._at)
        os.fdatasync(self._fd)
        self._at += len(self._group)
        if self._at + len(self._group) > LOG_BYTES:
            self._at = 0

    def close(self) -> None:
        os.close(self._fd)


def latencies(
    write_group: Callable[[], None],
    rate: float,
    seconds: float,
    *,
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> Histogram:
    """Return the latencies of groups in microseconds.

    A latency begins when the group is due, so groups that wait for a slow one before them count
    that wait. With a rate of 0 each is due when the one before is done.
    """
    found = Histogram()
    began = due = now()
    while now() < began + seconds:
        if not rate:
            due = now()
        elif (early := due - now()) > 0:
            sleep(early)
        write_group()
        found.add(round(1e6 * (now() - due)))
        due += 1 / rate if rate else 0
    return found


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
    log = Log(folder, -(-options.group * KIB // PAGE_BYTES) * PAGE_BYTES)
    store = filled(folder, "store", STORE_BYTES if options.beside else 0)
    done = threading.Event()
    beside = threading.Thread(
        target=write_beside, args=(store, options.beside * 1e6, done), name="beside"
    )
    try:
        if options.beside:
            beside.start()
        found = latencies(
            log.write_group, options.rate, options.seconds, now=time.perf_counter, sleep=time.sleep
        )
    finally:
        done.set()
        if options.beside:
            beside.join()
        os.close(store)
        log.close()
    figures = {f"p{percent:g}, ms": found.percentile(percent) / 1000 for percent in PERCENTILES}
    return {
        "groups a second": len(found) / options.seconds,
        **figures,
        "longest, ms": found.percentile(100) / 1000,
    }


def at_least_0(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return number


def above_0(text: str) -> float:
    number = at_least_0(text)
    if not number:
        raise argparse.ArgumentTypeError("0 is not above 0")
    return number


def group_kib(text: str) -> int:
    number = int(text)
    if not 1 <= number <= GROUP_KIB_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {GROUP_KIB_MAX} KiB")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.disk", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seconds", type=above_0, default=60.0)
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
