"""Rules over what was seen of a cluster while it ran. Pure.

- what is committed is on the disk of every member of the in-sync set;
- one node at a time answers for a partition;
- a master that was replaced does not keep streams open;
- a handover begins no version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from sim.facts import Excuse, Kept, Lacking, Mastership, Overlap
from sim.world import MS

GAP_NS: Final = 50 * MS
"""Two sightings further apart are not of one time: the process was stopped in between."""
KEPT_NS_MAX: Final = 300 * MS
"""How long a replaced master may still have a stream open: its ticks are 50 ms apart."""


def lacking(found: Iterable[Lacking]) -> list[str]:
    """No member of an in-sync set lacks what is committed."""
    return [
        f"{item.node} is in the in-sync set of vb {item.vb_id} and has synced up to"
        f" {item.synced_seqno} at {item.at_ns / 1e6:.3f} ms; {item.committed_by} has committed"
        f" {item.seqno} of version {item.vb_uuid:x}"
        for item in found
    ]


def overlaps(found: Iterable[Overlap], excuses: Sequence[Excuse]) -> list[str]:
    """One node at a time answers for a partition, but after an unclean election."""
    told: set[int] = set()
    problems = []
    for item in found:
        is_unclean = any(
            excuse.vb_id == item.vb_id and excuse.kind == "unclean" for excuse in excuses
        )
        if item.vb_id not in told and not is_unclean:
            told.add(item.vb_id)
            problems.append(
                f"{' and '.join(item.nodes)} answer for vb {item.vb_id} at the same time,"
                f" {item.at_ns / 1e6:.3f} ms"
            )
    return problems


def kept(found: Iterable[Kept]) -> list[str]:
    """A consumer that reaches only a replaced master notices it, because its streams end."""
    began: dict[tuple[str, int, str], tuple[int, int]] = {}
    """(node, partition, connection) -> when it was seen first, and last."""
    told: set[tuple[str, int, str]] = set()
    problems = []
    for item in found:
        key = item.node, item.vb_id, item.connection
        first_ns, last_ns = began.get(key, (item.at_ns, item.at_ns))
        if item.at_ns - last_ns > GAP_NS:
            first_ns = item.at_ns
        began[key] = first_ns, item.at_ns
        if item.at_ns - first_ns > KEPT_NS_MAX and key not in told:
            told.add(key)
            problems.append(
                f"{item.node} keeps the stream of vb {item.vb_id} on {item.connection} open, while"
                f" {item.master} is master since {item.since_ns / 1e6:.3f} ms: who reaches only"
                f" {item.node} stands still"
            )
    return problems


def new_versions(
    masterships: Iterable[Mastership], handed: Mapping[tuple[int, int], int]
) -> list[str]:
    """Who is master by a handover goes on in the version that was handed over."""
    return [
        f"{item.node} became master of vb {item.vb_id} by handover, epoch {item.epoch}, and began"
        f" version {item.vb_uuid:x} at {item.at_ns / 1e6:.3f} ms"
        for item in masterships
        if handed.get((item.vb_id, item.epoch), item.vb_uuid) != item.vb_uuid
    ]
