"""Rules over quarantine files and loss receipts. Pure.

- an answered write that an unclean election lost is in a quarantine file, or a later one of its key
  is, unless a folder that may have held it is lost. Compaction keeps the newest one of a key only;
- the election's receipt has an end below each write that it lost;
- nothing is in a quarantine file that the master still has. A dropped copy asks nobody, so it keeps
  what it cannot know to be elsewhere: after an election what it did not know to be committed;
- a quarantine file is readable from its disk after any power cut.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from sim.checkers.histories import is_excused_by, missing
from sim.facts import (
    CutOffFact,
    Excuse,
    History,
    Kind,
    LostFact,
    LostFolder,
    Operation,
    Outcome,
    cas_of,
)
from vbucket.model.entry import META, key_of, seqno_of
from vbucket.model.manifest import decode_leb128
from vbucket.model.receipt import CutOff

UNCLEAN = frozenset({"unclean"})
OTHERS = frozenset({"branch", "lost folder", "failover"})


def lost_by_election(
    operations: Iterable[Operation], final: Iterable[History], excuses: Sequence[Excuse]
) -> list[Operation]:
    """Return the answered writes that are gone because of an unclean election alone."""
    by_vb = {history.vb_id: history for history in final}
    return [
        operation
        for operation in operations
        if operation.outcome is Outcome.OK and operation.seqno and operation.vb_id in by_vb
        and operation.kind is not Kind.OBSERVE
        and missing(operation, by_vb[operation.vb_id])
        and is_excused_by(operation, excuses, UNCLEAN)
        and not is_excused_by(operation, excuses, OTHERS)
    ]  # fmt: skip


def named(
    gone: Iterable[Operation],
    cut_off: Iterable[CutOffFact],
    lost: Sequence[LostFact],
    lost_folders: Sequence[LostFolder],
) -> list[str]:
    """Every write that is gone must be named by its key and by the election."""
    kept = [(fact.cut.vb_id, entry) for fact in cut_off for entry in fact.cut.entries]
    in_files = {(vb_id, seqno_of(entry), _cas(entry)) for vb_id, entry in kept}
    newest: dict[tuple[int, bytes], int] = {}
    for vb_id, entry in kept:
        name = vb_id, _name_of(entry)
        newest[name] = max(newest.get(name, 0), seqno_of(entry))
    problems = []
    for operation in gone:
        began_ns = operation.invoked_ns
        told = any(
            fact.lost.vb_id == operation.vb_id and fact.at_ns >= began_ns
            and (
                fact.lost.end_seqno < operation.seqno
                or operation.vb_uuid not in dict(fact.lost.versions)
            )
            for fact in lost
        )  # fmt: skip
        if not told:
            problems.append(f"no receipt of an election names the loss of {operation}")
        is_in_file = (operation.vb_id, operation.seqno, operation.cas) in in_files
        is_in_file |= newest.get((operation.vb_id, operation.key), 0) > operation.seqno
        if not is_in_file and not any(folder.at_ns >= began_ns for folder in lost_folders):
            problems.append(f"no quarantine file holds the lost write {operation}")
    return problems


def still_there(
    cut_off: Iterable[CutOffFact],
    final: Iterable[History],
    handed: Container[tuple[int, int]] = frozenset(),
    served: Container[tuple[int, int]] | None = None,
) -> list[str]:
    """What a quarantine file holds must be gone. `handed`: partition and epoch of each handover.
    `served`: those of each mastership that served. One that did not may be over before the replica
    asks again, with its file on disk, and then nothing is cut off.
    """
    by_vb = {history.vb_id: history for history in final}
    problems = []
    for fact in cut_off:
        is_over = served is not None and (fact.cut.vb_id, fact.cut.epoch) not in served
        if _knows_too_little(fact, handed) or (fact.dropped_in is None and is_over):
            continue
        history = by_vb.get(fact.cut.vb_id)
        for entry in fact.cut.entries:
            change = None if history is None else history.entries.get(seqno_of(entry))
            if change is not None and _cas(entry) and cas_of(change) == _cas(entry):
                problems.append(
                    f"{fact.node} kept seqno {seqno_of(entry)} of vb {fact.cut.vb_id} as cut off at"
                    f" {fact.at_ns / 1e6:.3f} ms, and the master has it"
                )
                break
    return problems


def _knows_too_little(fact: CutOffFact, handed: Container[tuple[int, int]]) -> bool:
    """Whether a dropped copy cannot know what others have: it was not led since an election, or
    missed more than one epoch.
    """
    epoch, known = fact.cut.epoch, fact.dropped_in
    if known is None or known == epoch:
        return False
    return known < epoch - 1 or (fact.cut.vb_id, epoch) not in handed


def readable(
    cut_off: Iterable[CutOffFact],
    lost_folders: Iterable[LostFolder],
    on_disk: Mapping[str, Sequence[CutOff]],
) -> list[str]:
    """A file that was reported as kept must be on its disk."""
    gone_ns = {folder.node: folder.at_ns for folder in lost_folders}
    return [
        f"{fact.node} lost the quarantine file {fact.cut.file_name}"
        for fact in cut_off
        if fact.at_ns > gone_ns.get(fact.node, -1) and fact.cut not in on_disk[fact.node]
    ]


def _name_of(entry: bytes) -> bytes:
    """Return the key without its collection id."""
    key = key_of(entry)
    return key[decode_leb128(key)[1] :]


def _cas(entry: bytes) -> int:
    cas: int = META.unpack_from(entry)[4]
    return cas
