"""Faults of documents, collections, streams and disks that are put in are found."""

from __future__ import annotations

from functools import cache

import pytest

from sim.command import attempt
from sim.run import Options, run_seed
from sim.wide_bugs import WIDE_BUGS

FOUND_BY = {
    "touch-in-vain": (7, "an expired document is answered"),
    "expiry-is-lost": (26, "an expired document is answered"),
    "due-is-answered": (30, "an expired document is answered"),
    "pages-anywhere": (1, "AssertionError"),
    "revision-again": (1, "the revision of"),
    "last-one-wins": (1, "the revision of"),
    "cas-of-the-clock": (1, "the CAS of"),
    "cas-unchecked": (1, "is not linearizable"),
    "pushed-first": (1, "is not linearizable"),
    "counts-from-initial": (1, "is not linearizable"),
    "appends-before": (6, "is not linearizable"),
    "replica-shows-newest": (17, "a replica answered what was not committed"),
    "drop-keeps-count": (23, "documents, and it counts"),
    "collection-id-again": (23, "the record says item_count"),
    "drop-untold": (67, "the master has nothing"),
    "no-rollback": (11, "without a rollback"),
    "rollback-miscounts": (39, "documents, and it counts"),
    "folder-unsynced": (5, "refuses to start"),
    "log-unsynced": (5, "refuses to start"),
    "seal-unsynced": (5, "refuses to start"),
    "checksum-unread": (37, "refuses to start"),
    "deletes-unmerged": (1, "documents, and it counts"),
    "timeout-is-success": (0, "is not linearizable"),
    "level-is-nothing": (17, "is not linearizable"),
    "cut-of-committed": (15, "and then received"),
    "cut-beyond": (4, "the cut"),
    "cut-passed": (38, "a marker up to"),
    "cut-told-early": (38, "held the cut"),
    "cut-commits-on": (18, "and lacks what was answered before"),
    "cut-meets-anywhere": (18, "and lacks what was answered before"),
    "cut-closes-nothing": (18, "and then received"),
    "cut-held-for-ever": (69, "20 s after the faults"),
    "cut-waits-for-clock": (139, "consumers do not catch up"),
    "scan-moves-on": (13, "read_view"),
    "scan-uncommitted": (13, "what was there at no moment"),
    "hashes-keep-old": (1, "are not those of its documents"),
    "hashes-miss-one": (13, "and it counts"),
    "hashes-at-once": (4, "where it was not"),
    "batch-one-by-one": (13, "a batch was refused"),
    "batch-lacks-last": (13, "a part of a batch"),
    "gap-is-read-over": (18, "MergeRefusedError"),
    "repair-takes-all": (36, "may take seqno"),
    "repair-takes-older": (18, "its block is not what it was"),
    "early-end-is-good": (84, "history was not cut back"),
}
"""Bug -> a seed that finds it, and how it is told. After a change of the simulator, look for others
with `python -m tests.sim --bug all --seeds 400`.
"""


@cache
def violations_of(seed: int, options: Options) -> list[str]:
    """Return what a run without a planted fault violates; seeds are shared by several faults."""
    return run_seed(seed, options).violations


@pytest.mark.parametrize("bug", FOUND_BY)
def test_a_fault_that_is_put_in_is_found(bug: str) -> None:
    seed, words = FOUND_BY[bug]
    options = Options(nodes=WIDE_BUGS[bug].nodes)
    violations = attempt(seed, options._replace(bug=bug)).violations
    assert any(words in violation for violation in violations), violations
    assert violations_of(seed, options) == [], "without the bug it passes"


def test_every_fault_is_found() -> None:
    assert FOUND_BY.keys() == WIDE_BUGS.keys()
