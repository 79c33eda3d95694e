"""Streams show committed changes only, and consumers end with the master's documents. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from sim.facts import Committed, Map, Streamed

DIFFERENCES_MAX = 5
"""Differences of one map that are named; more of them tell nothing more."""


def uncommitted(streamed: Iterable[Streamed], committed: Iterable[Committed]) -> list[str]:
    """Whatever a consumer receives was committed before, in the version of its stream."""
    by_version: dict[tuple[int, int], list[Committed]] = defaultdict(list)
    for fact in committed:
        by_version[fact.vb_id, fact.vb_uuid].append(fact)
    reached = {key: _highest(facts) for key, facts in by_version.items()}
    problems = []
    for event in streamed:
        times, highest = reached.get((event.vb_id, event.vb_uuid), ([], []))
        at = bisect_right(times, event.at_ns)
        seqno = highest[at - 1] if at else 0
        if event.seqno > seqno:
            problems.append(
                f"{event.consumer} received seqno {event.seqno} of vb {event.vb_id} (version"
                f" {event.vb_uuid:x}) at {event.at_ns / 1e6:.3f} ms; {seqno} was committed"
            )
    return problems


def _highest(facts: list[Committed]) -> tuple[list[int], list[int]]:
    """Return times, and the highest seqno that was committed up to each."""
    times, highest, most = [], [], 0
    for fact in facts:
        most = max(most, fact.seqno)
        times.append(fact.at_ns)
        highest.append(most)
    return times, highest


def maps(master: Map, consumers: Iterable[Map]) -> list[str]:
    """At rest, every consumer holds exactly the documents of the master."""
    problems = []
    for consumer in consumers:
        ours, theirs = consumer.documents, master.documents
        different = sorted(
            key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)
        )
        problems += [
            f"{consumer.holder} has {_shown(ours.get(key))} for key {key!r}, {master.holder} has"
            f" {_shown(theirs.get(key))}"
            for key in different[:DIFFERENCES_MAX]
        ]
        if len(different) > DIFFERENCES_MAX:
            problems.append(f"{consumer.holder} differs in {len(different)} keys")
    return problems


def _shown(value: bytes | None) -> str:
    return "nothing" if value is None else repr(value[:60])
