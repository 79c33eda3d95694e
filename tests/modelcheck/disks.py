"""On how many disks a record is that a master commits because its sender had it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .values import Step, ViolationError

if TYPE_CHECKING:
    from .model import Model


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
