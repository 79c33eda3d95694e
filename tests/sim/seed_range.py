"""Runs many seeds, on several processors if that is asked for. The order is that of the seeds."""

from __future__ import annotations

import gc
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Final

from sim.checks import CRASH
from sim.decoded import Decoder
from sim.run import Options, Report, run_seed
from sim.world import Trace

GC_THRESHOLDS: Final = (400_000, 20, 50)
"""The garbage collector looks when a seed is over, and passes over what was imported: else it takes
a tenth of the time."""
AHEAD: Final = 4
"""Seeds of each process that are begun before their turn to be told."""


def attempt(seed: int, options: Options, *, trace: bool = False) -> Report:
    """Run a seed; an exception of the simulated code is a violation like any other."""
    lines = Trace(print, Decoder()) if trace else None
    try:
        return run_seed(seed, options, lines)
    except Exception:  # noqa: BLE001 - whatever it is, the seed is told
        return Report(seed, [traceback.format_exc()], 0, 0, 0, 0, {}, "", (CRASH,))
    finally:
        gc.collect(0)  # all of the run


def collect_less() -> None:
    """Let the garbage collector of this process look less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def reports(
    seeds: Iterable[int], options_of: Callable[[int], Options], jobs: int
) -> Iterator[tuple[Options, Report]]:
    """Yield the report of each seed, in their order. The caller may stop at any time."""
    if jobs == 1:
        for seed in seeds:
            options = options_of(seed)
            yield options, attempt(seed, options)
        return
    with ProcessPoolExecutor(jobs, initializer=collect_less) as pool:
        begun: deque[tuple[Options, Future[Report]]] = deque()
        left = iter(seeds)
        try:
            while True:
                while len(begun) < AHEAD * jobs and (seed := next(left, None)) is not None:
                    options = options_of(seed)
                    begun.append((options, pool.submit(attempt, seed, options)))
                if not begun:
                    return
                options, future = begun.popleft()
                yield options, future.result()
        finally:
            pool.shutdown(cancel_futures=True)
