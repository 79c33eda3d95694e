"""Which of many changes from elsewhere win against what a partition has. Sans-IO.

A change wins if its revision is higher, or the revision is equal and the CAS is higher (kv_engine's
rule, conflict_resolution_mode seqno). Nothing here changes anything.

Who calls it: the engine, before it applies a packet of frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from vbucket.engine.loading.bulk import Frames
from vbucket.engine.partition import Partition
from vbucket.engine.versions import MUTATION, Versions
from vbucket.model.entry import META

_unpack_meta: Final = META.unpack_from


def winners(
    versions: Versions,
    part: Partition,
    frames: Frames,
    *,
    cas_floor: int,
    cas_max: int,
    is_forced: bool,
) -> tuple[list[int], list[int], list[bool], dict[int, int]]:
    """Return the indexes of the frames that win, the seqno that each of these replaces, whether it
    replaces a document, and index -> new CAS for frames whose own is above `cas_max`. Such a CAS
    counts as 0 in a conflict. `is_forced`: all frames win.
    """
    below, newest = versions.meta_below, part.newest
    known: dict[bytes, tuple[int, int, int, int]] = {}
    indexes: list[int] = []
    prev_seqnos: list[int] = []
    live: list[bool] = []
    replaced: dict[int, int] = {}
    seqno, newest_cas = part.high_seqno, part.max_cas
    rows = zip(frames.keys, frames.opcodes, frames.rev_seqnos, frames.cas, strict=True)
    for index, (key, opcode, rev_seqno, own_cas) in enumerate(rows):
        old = known.get(key)
        if old is None:
            entry = newest.get(key)
            meta = _unpack_meta(entry) if entry else below(part, key, entry)
            old = (meta[0], meta[4], meta[5], meta[6])
        old_opcode, old_cas, prev_seqno, old_rev_seqno = old
        cas = own_cas if own_cas <= cas_max else 0
        if not is_forced and (rev_seqno, cas) <= (old_rev_seqno, old_cas):
            known[key] = old
            continue
        if not cas:
            replaced[index] = cas = max(cas_floor, newest_cas + 1)
        newest_cas = max(newest_cas, cas)
        seqno += 1
        known[key] = (opcode, cas, seqno, rev_seqno)
        indexes.append(index)
        prev_seqnos.append(prev_seqno)
        live.append(old_opcode == MUTATION)
    return indexes, prev_seqnos, live, replaced


def are_new(part: Partition, keys: Sequence[bytes]) -> bool:
    """Return whether the keys are distinct and surely not in the partition."""
    if part.merged_seqno:
        return False
    distinct = set(keys)
    return len(distinct) == len(keys) and all(
        layer.newest.keys().isdisjoint(distinct) for layer in part.layers()
    )
