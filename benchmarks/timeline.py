"""Figures over time: samples of a server while it is measured, and the picture of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.peers import Peer, folder_bytes, memory_bytes

SAMPLE_SECONDS: Final = 1.0
MIB: Final = 1024 * 1024
MEAN_SECONDS: Final = 5
"""A rate is drawn as the mean of so many seconds; p99 as the largest of them."""


class Sample(NamedTuple):
    """A server at one moment."""

    second: float
    disk_bytes: int
    anonymous_bytes: int


class Lines(NamedTuple):
    """What is drawn of a server: the generator's rows, and the samples."""

    timeline: Sequence[tuple[int, int, int, int]]
    samples: Sequence[Sample]


@contextmanager
def sampled(peer: Peer) -> Iterator[list[Sample]]:
    """Sample a server each second until the block ends."""
    samples: list[Sample] = []
    done = threading.Event()
    began = time.perf_counter()

    def run() -> None:
        while not done.wait(SAMPLE_SECONDS):
            anonymous = memory_bytes(peer.pid)["Anonymous"]
            at_s = time.perf_counter() - began
            samples.append(Sample(at_s, folder_bytes(peer.folder), anonymous))

    thread = threading.Thread(target=run, name="samples")
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def grouped(timeline: Sequence[Sequence[int]]) -> list[tuple[float, float, float]]:
    """Return (second, operations a second, largest p99 in milliseconds) of each few seconds."""
    found = []
    for at in range(0, len(timeline), MEAN_SECONDS):
        rows = timeline[at : at + MEAN_SECONDS]
        rate = sum(row[1] for row in rows) / len(rows)
        found.append((float(rows[0][0]), rate, max(row[2] for row in rows) / 1000))
    return found


def since_measuring(timeline: Sequence[Sequence[int]], samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples by the generator's clock, without those before it began to measure.

    Both end together; the generator builds its requests first.
    """
    if not samples:
        return []
    began = samples[-1].second - len(timeline)
    shifted = (sample._replace(second=sample.second - began) for sample in samples)
    return [sample for sample in shifted if sample.second >= 0]


def draw(file: Path, title: str, lines: Mapping[str, Lines]) -> None:
    """Draw rate, p99, disk and memory of each server into a PNG file."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(4, 1, sharex=True, figsize=(10, 10), layout="constrained")
    for name, (timeline, samples) in lines.items():
        seconds, rates, p99s = zip(*grouped(timeline), strict=True)
        axes[0].plot(seconds, rates, label=name)
        axes[1].plot(seconds, p99s, label=name)
        during = since_measuring(timeline, samples)
        at = [sample.second for sample in during]
        axes[2].plot(at, [sample.disk_bytes / MIB for sample in during], label=name)
        axes[3].plot(at, [sample.anonymous_bytes / MIB for sample in during], label=name)
    names = ("operations a second", "p99 of a batch, ms", "on disk, MiB", "anonymous memory, MiB")
    for axis, label in zip(axes, names, strict=True):
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_title(title)
    axes[0].legend()
    axes[-1].set_xlabel("seconds")
    figure.savefig(file, dpi=100, metadata={"Software": None})
    plt.close(figure)
