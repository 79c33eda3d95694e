"""What replicas have on disk, compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .values import Step, ViolationError

if TYPE_CHECKING:
    from .model import Model
    from .rules import Entry
    from .values import Replica, Store


def check_disks(
    model: Model, store_number: int, number: int, now: list[int], told: int, step: Step
) -> None:
    """Raise ViolationError if what commits is on fewer disks than min in-sync members.

    Masters without a sender are left out: there the in-sync set says it. So are copies that may
    have been dropped since, and what a branch may have undone.
    """
    master, undone = model.replicas.values[number], model.stores.values[store_number].undone
    assert master.lead is not None
    is_undone = undone is not None and master.epoch < undone[0]
    if master.lead.sender is None or model.bounds.moves or is_undone:
        return
    log = model.committed.values[told]
    disks = sum(
        replica.log[: min(replica.synced, len(log))] == log
        for replica in (model.replicas.values[each] for each in now)
    )
    if disks < model.min_in_sync:
        raise ViolationError(f"a record is committed on too few disks: {disks}", step)


def check_undone(store: Store, log: tuple[Entry, ...], step: Step) -> None:
    """Raise ViolationError if a log has a record that a branch undid."""
    if store.undone is not None:
        epoch, seqno = store.undone
        if any(entry.epoch < epoch for entry in log[seqno:]):
            raise ViolationError("a record that a branch undid is back", step)


def disagreement(mine: Replica, theirs: Replica) -> str:
    """Return in which version two replicas differ; "" if in none."""
    is_same = (mine.epoch, mine.life) == (theirs.epoch, theirs.life)
    if mine.lead and theirs.lead and is_same:
        return f"epoch {mine.epoch} has two masters"
    for version in mine.versions.entries:
        upper = theirs.versions.upper_of(version.vb_uuid, len(theirs.log))
        if upper is None:
            continue
        own = mine.versions.upper_of(version.vb_uuid, len(mine.log))
        assert own is not None
        upto = min(upper, own, len(mine.log), len(theirs.log))
        if mine.log[:upto] != theirs.log[:upto]:
            return f"two replicas differ within version {version.vb_uuid}, up to seqno {upto}"
    return ""
