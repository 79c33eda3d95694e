"""The revision of a key never falls, nor does its CAS, unless that comes from elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

CAS_FROM_ELSEWHERE: Final = b"m"
"""Keys that begin so have a CAS from SET_WITH_META (`sim.wide_workload`)."""


class Change(NamedTuple):
    """A change of a key, as it is stored. `rev_seqno` is 0 for a system event."""

    key: bytes
    seqno: int
    rev_seqno: int
    cas: int
    is_deletion: bool = False


def falls(where: str, changes: Iterable[Change], purge_seqno: int) -> list[str]:
    """Look at one history, in the order of its seqnos. Changes may be missing. What was deleted at
    or below the purge seqno is forgotten with its revision, and a replica may lack that deletion.
    """
    newest: dict[bytes, Change] = {}
    problems = []
    for change in changes:
        before = newest.get(change.key)
        newest[change.key] = change
        if before is None or not change.rev_seqno:
            continue
        is_forgotten = before.seqno <= purge_seqno
        if change.rev_seqno < before.rev_seqno and not is_forgotten:
            problems.append(
                f"{where}: the revision of {change.key!r} fell from {before.rev_seqno} (seqno"
                f" {before.seqno}) to {change.rev_seqno} (seqno {change.seqno})"
            )
        if change.cas <= before.cas and change.key[1:2] != CAS_FROM_ELSEWHERE:
            problems.append(
                f"{where}: the CAS of {change.key!r} fell from {before.cas:x} (seqno"
                f" {before.seqno}) to {change.cas:x} (seqno {change.seqno})"
            )
    return problems
