"""Consumers that read from copies, while nodes die: all of it, once, and nothing uncommitted.

What a consumer sees is checked as everywhere: the stream validator, `uncommitted`, and its map at
rest (tests/sim/checkers/streams.py).
"""

from __future__ import annotations

from collections import Counter

import pytest

from dcp.session.streams import DcpCommands
from dcp.stream.hub import StreamHub
from dcp.stream.stream_limits import StreamLimits
from sim.reached import LEFT_COPIES
from sim.run import Options, replay_command, run_seed
from vbucket.engine.partition import VbState

SEEDS = 16
OPTIONS = Options(nodes=3, changes=(("from_replicas", "1"), ("scrub_ns", "0")))
SLOW_SEED, SLOW_BYTES_PER_S = 1, 300
DAMAGED_SEED = 29
"""Consumers meet damage, and leave four copies."""
OFTEN_PURGED = (("compact_share", "1.0"), ("memtable_bytes", "2048"), ("pump_bytes", "1"))


def test_consumers_of_copies_miss_nothing_and_see_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: Counter[VbState] = Counter()
    answer = DcpCommands._answer_stream

    def noted(commands, request, asked, part, producer):  # type: ignore[no-untyped-def]
        answer(commands, request, asked, part, producer)
        served[part.state] += 1

    monkeypatch.setattr(DcpCommands, "_answer_stream", noted)
    for seed in range(SEEDS):
        report = run_seed(seed, OPTIONS)
        assert report.violations == [], replay_command(seed, OPTIONS)
    assert served[VbState.REPLICA] > served[VbState.ACTIVE] > 0


@pytest.mark.parametrize("waits", [True, False])
def test_no_purge_passes_a_slow_reader_of_a_copy(
    monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    """The simulator sees it if purges do not wait for streams."""
    monkeypatch.setattr(StreamLimits, "of", lambda *_: SLOW_BYTES_PER_S)
    if not waits:
        monkeypatch.setattr(StreamHub, "reading", lambda *_: ())
    options = OPTIONS._replace(changes=(*OPTIONS.changes, *OFTEN_PURGED))
    found = [each for each in run_seed(SLOW_SEED, options).violations if "a purge has" in each]
    assert bool(found) is not waits, replay_command(SLOW_SEED, options)


def test_consumers_leave_copies_that_are_damaged() -> None:
    options = Options(nodes=3, changes=(("from_replicas", "1"),))
    report = run_seed(DAMAGED_SEED, options)
    assert report.violations == [], replay_command(DAMAGED_SEED, options)
    assert report.reached[LEFT_COPIES] > 0
