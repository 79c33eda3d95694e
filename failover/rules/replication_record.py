"""The replication record: a partition's copies, its master, its in-sync set and its epoch.

There is one record per partition in the metadata store. This module has its invariants and its
transitions. A transition takes a record and returns a new one. The caller writes the new record
with a transaction that compares the revision of the old one, so two writers never mix.

Who calls it: the coordinator (`elect`, `unclean_elect`, `vacate`, `want`, `add_copy`,
`drop_copies`, `reorder`), a partition's master (`shrink`, `expand`, `hand_over`, `start_branch`,
`finish_branch`), the simulator and the model checker.

A *member* is the id of a data folder. It is not the name of a node: a node that comes back with an
empty disk has a new id, so it is in no in-sync set (ISR).

Invariants, asserted when a record is made
- there is at least one copy, and no member twice
- the ISR is not empty, and each of its members holds a copy
- a copy that is being filled is not in the ISR
- the master is in the ISR; the wanted master holds a copy
- a copy that was added has a number of its own
- the epoch is at least 1, and the last unclean election is not later than it
- a handover has a master who took over
- every transition that changes the master, and every branch, has a higher epoch
- every transition has a higher partition epoch. So of two records of one partition the one with the
  higher `rank` is the newer one, also where the epoch is the same: a copy of the metadata store
  that is older than what a node has seen can be told from the present one
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

from failover.rules.history import VB_UUID_MAX
from vbucket.model.ids import SEQNO_MAX

EPOCH_MAX: Final = 2**32 - 1
"""Epochs are stored in 32 bits in every entry. One failover a second lasts for 136 years."""

COPIES_MAX: Final = 8
"""Copies of a partition. The wire has a master and three replicas; moving adds as many again."""

MEMBER_LENGTH_MAX: Final = 64
"""Characters of a folder id, so that a record stays small. Ours have 32."""


class Rank(NamedTuple):
    """Where a record stands in the history of its partition: the higher one is the newer one."""

    epoch: int
    partition_epoch: int


UNSEEN: Final = Rank(0, 0)
"""Below every record."""


class HandedOver(NamedTuple):
    """Where the old master ended when it handed the partition over: its version and last seqno."""

    vb_uuid: int
    seqno: int


class BranchUnderWay(NamedTuple):
    """An operator's branch that is not finished: the new version and the seqno at which it begins.

    The record names it before anybody rolls back. So a newly elected master can finish it.
    """

    vb_uuid: int
    seqno: int


@dataclass(frozen=True, slots=True)
class ReplicationRecord:
    """One partition's record. Immutable: a change returns a new record."""

    copies: tuple[str, ...]
    """All copies in order of preference, also those that are being filled."""
    isr: frozenset[str]
    """The in-sync set: its members hold every committed change on disk."""
    epoch: int
    """The leader epoch. It rises with each change of master and with each branch."""
    master: str | None = None
    wanted_master: str | None = None
    """Who should become master by handover; None: nobody else."""
    filling: frozenset[str] = frozenset()
    """Copies that receive their first data. They count for nothing until they join the ISR."""
    handover: HandedOver | None = None
    """Set if the present epoch began with a handover."""
    branch: BranchUnderWay | None = None
    unclean_epoch: int | None = None
    """The epoch that the last unclean election began; None: there was none."""
    added: frozenset[tuple[str, int]] = frozenset()
    """(member, number) of the copies that were added later. A member that gets a copy again has
    another number, so nothing that it acknowledged before counts for the new copy."""
    adds: int = 0
    """How many copies were ever added: the last number."""
    partition_epoch: int = 0
    """Rises by one with each transition. 0 in records that were written before there was one."""

    def __post_init__(self) -> None:
        problem = _problem_of(self)
        assert not problem, problem

    @property
    def rank(self) -> Rank:
        """What says which of two records of one partition is the newer one."""
        return Rank(self.epoch, self.partition_epoch)

    @property
    def counted_copies(self) -> int:
        """The number of copies that majorities are taken of: all but those being filled."""
        return len(self.copies) - len(self.filling)

    def number_of(self, member: str) -> int | None:
        """Return the number of a member's copy, 0 if it was never added; None: it holds none."""
        if member not in self.copies:
            return None
        return next((number for name, number in self.added if name == member), 0)

    def to_document(self) -> dict[str, Any]:
        """Return the record for CBOR or JSON. Equal records give equal documents."""
        return {
            "copies": list(self.copies),
            "isr": sorted(self.isr),
            "epoch": self.epoch,
            "master": self.master,
            "wanted_master": self.wanted_master,
            "filling": sorted(self.filling),
            "handover": None if self.handover is None else list(self.handover),
            "branch": None if self.branch is None else list(self.branch),
            "unclean_epoch": self.unclean_epoch,
            "added": sorted(map(list, self.added)),
            "adds": self.adds,
            "partition_epoch": self.partition_epoch,
        }

    @classmethod
    def from_document(cls, document: object) -> ReplicationRecord:
        """Return the record from its `to_document` form.

        Raises ValueError that says what is wrong. The caller then leaves the partition as it is.
        """
        if not isinstance(document, dict):
            raise ValueError(
                f"replication record: a map is wanted, found {type(document).__name__}"
            )
        document = _OF_OLDER | document
        missing, unknown = _FIELDS - document.keys(), document.keys() - _FIELDS
        if missing or unknown:
            raise ValueError(
                f"replication record: missing fields {sorted(missing)}, unknown fields"
                f" {sorted(map(str, unknown))}; another version of dcpd may have written it"
            )
        unclean = document["unclean_epoch"]
        values: dict[str, Any] = {
            "copies": _members("copies", document["copies"]),
            "isr": frozenset(_members("isr", document["isr"])),
            "epoch": _whole("epoch", document["epoch"]),
            "master": _member("master", document["master"]),
            "wanted_master": _member("wanted_master", document["wanted_master"]),
            "filling": frozenset(_members("filling", document["filling"])),
            "handover": _pair("handover", document["handover"], HandedOver),
            "branch": _pair("branch", document["branch"], BranchUnderWay),
            "unclean_epoch": None if unclean is None else _whole("unclean_epoch", unclean),
            "added": _numbers("added", document["added"]),
            "adds": _whole("adds", document["adds"]),
            "partition_epoch": _whole("partition_epoch", document["partition_epoch"]),
        }
        try:
            return cls(**values)
        except AssertionError as error:
            raise ValueError(str(error)) from None


_Pair = TypeVar("_Pair", HandedOver, BranchUnderWay)

_FIELDS: Final = frozenset(ReplicationRecord.__dataclass_fields__)
_OF_OLDER: Final = {"added": [], "adds": 0, "partition_epoch": 0}
"""What older records have, which lack these fields."""


def majority(count: int) -> int:
    """Return the smallest number of members that is more than half of `count`."""
    return count // 2 + 1


def create(copies: Iterable[str], filling: Iterable[str] = ()) -> ReplicationRecord:
    """Return the record of a new, empty partition.

    Its first master is the most preferred copy. All copies are empty, so all are in sync, except
    those that the caller names as being filled.
    """
    ordered, being_filled = tuple(copies), frozenset(filling)
    isr = frozenset(ordered) - being_filled
    first = next((member for member in ordered if member in isr), None)
    return ReplicationRecord(ordered, isr, 1, first, filling=being_filled)


def elect(
    record: ReplicationRecord, member: str, gone: Iterable[str] = frozenset()
) -> ReplicationRecord:
    """Return the record after a clean election: `member` is master under the next epoch.

    `gone` are members whose nodes are known to be gone. They leave the ISR in the same transaction,
    so the new master's HW does not wait for them. Who restarts may win again: it gets a new epoch.
    A branch that is under way stays, because the new master finishes it.
    """
    assert member in record.isr, f"{member} is not in sync, so it cannot be elected cleanly"
    isr = record.isr - frozenset(gone)
    assert member in isr, f"{member} is gone and cannot be elected"
    return _next(
        record,
        isr=isr,
        epoch=record.epoch + 1,
        master=member,
        wanted_master=_still_wanted(record, member),
        handover=None,
    )


def unclean_elect(record: ReplicationRecord, member: str) -> ReplicationRecord:
    """Return the record after an unclean election: `member` alone is in sync.

    Committed changes may be lost. The record keeps the epoch, so that members which return know
    that what they cut off may have been answered.
    """
    assert member in record.copies, f"{member} holds no copy"
    assert member not in record.filling, f"{member} is being filled and has only a part"
    epoch = record.epoch + 1
    return _next(
        record,
        isr=frozenset((member,)),
        epoch=epoch,
        master=member,
        wanted_master=_still_wanted(record, member),
        handover=None,
        unclean_epoch=epoch,
    )


def want(record: ReplicationRecord, member: str | None) -> ReplicationRecord:
    """Return the record with another wanted master. None, or the master itself: leave it there."""
    return _next(record, wanted_master=None if member == record.master else member)


def add_copy(record: ReplicationRecord, member: str) -> ReplicationRecord:
    """Return the record with another copy, the least preferred one, which is to be filled."""
    assert member not in record.copies, f"{member} holds a copy already"
    number = record.adds + 1
    return _next(
        record,
        copies=(*record.copies, member),
        filling=record.filling | frozenset((member,)),
        added=record.added | frozenset(((member, number),)),
        adds=number,
    )


def drop_copies(
    record: ReplicationRecord, members: Iterable[str], *, in_sync_min: int
) -> ReplicationRecord:
    """Return the record without these copies. Their members empty them. The epoch stays.

    Copies in sync may go only if at least `in_sync_min` copies in sync are left. The master counts
    on who goes until it sees the record, so this is safe as every shrink that the store confirmed.
    """
    leaving = frozenset(members)
    assert leaving <= frozenset(record.copies), f"{sorted(leaving)}: not all hold a copy"
    assert record.master is not None, "an election comes first"
    assert record.master not in leaving, "a master hands over before its copy is dropped"
    assert record.branch is None, "the branch is finished first"
    isr = record.isr - leaving
    assert isr == record.isr or len(isr) >= in_sync_min, (
        f"{len(isr)} copies in sync would be left, and {in_sync_min} are wanted"
    )
    return _next(
        record,
        copies=tuple(copy for copy in record.copies if copy not in leaving),
        isr=isr,
        filling=record.filling - leaving,
        wanted_master=None if record.wanted_master in leaving else record.wanted_master,
        added=frozenset(each for each in record.added if each[0] not in leaving),
    )


def reorder(record: ReplicationRecord, copies: Iterable[str]) -> ReplicationRecord:
    """Return the record with the same copies in another order of preference."""
    ordered = tuple(copies)
    assert sorted(ordered) == sorted(record.copies), "the same copies are wanted, in another order"
    return _next(record, copies=ordered)


def shrink(record: ReplicationRecord, members: Iterable[str]) -> ReplicationRecord:
    """Return the record with these members out of the ISR. The epoch stays."""
    leaving = frozenset(members)
    assert record.master is not None, "only a master changes its ISR"
    assert leaving <= record.isr, f"{sorted(leaving - record.isr)} not in the ISR"
    assert record.master not in leaving, "a master does not leave its own ISR"
    return _next(record, isr=record.isr - leaving)


def expand(record: ReplicationRecord, members: Iterable[str]) -> ReplicationRecord:
    """Return the record with these members in the ISR. A copy that was being filled is full now."""
    joining = frozenset(members)
    assert record.master is not None, "only a master changes its ISR"
    assert joining <= frozenset(record.copies), f"{sorted(joining)}: not all hold a copy"
    return _next(record, isr=record.isr | joining, filling=record.filling - joining)


def hand_over(record: ReplicationRecord, end: HandedOver) -> ReplicationRecord:
    """Return the record after a handover to the wanted master, which is in sync.

    `end` is the old master's newest version and its last seqno, all of it committed. The new master
    compares them with its own (`failover.rules.promotion.takes_over`).
    """
    wanted = record.wanted_master
    assert record.master is not None, "nobody can hand over"
    assert wanted is not None, "no other master is wanted"
    assert wanted in record.isr, f"{wanted} is not in sync yet"
    assert record.branch is None, "the branch is finished first"
    return _next(record, epoch=record.epoch + 1, master=wanted, wanted_master=None, handover=end)


def start_branch(record: ReplicationRecord, branch: BranchUnderWay) -> ReplicationRecord:
    """Return the record with a branch under way, under the next epoch and the same master."""
    assert record.master is not None, "only a master branches"
    assert record.branch is None, "another branch is under way"
    return _next(record, epoch=record.epoch + 1, branch=branch, handover=None)


def finish_branch(record: ReplicationRecord) -> ReplicationRecord:
    """Return the record after the whole ISR has rolled back. The epoch stays."""
    assert record.branch is not None, "no branch is under way"
    return _next(record, branch=None)


def rebuild(
    base: ReplicationRecord,
    copies: Iterable[str],
    isr: Iterable[str],
    *,
    above: Rank,
    is_clean: bool,
) -> ReplicationRecord:
    """Return a record that replaces all that were ever seen, after the metadata store went back.

    `base` is the newest record that is known, `above` the highest epoch and partition epoch that
    anybody has seen. There is no master: one of the ISR is elected. `is_clean`: every change that
    may have been answered is known to be in the logs of the ISR. If not, the record says of its
    epoch that its election was unclean, so members that come back keep what they cut off.
    """
    kept, in_sync = tuple(copies), frozenset(isr)
    epoch = max(base.epoch, above.epoch) + 1
    return replace(
        base,
        copies=kept,
        isr=in_sync,
        epoch=epoch,
        master=None,
        wanted_master=None,
        filling=(base.filling & frozenset(kept)) - in_sync,
        handover=None,
        unclean_epoch=base.unclean_epoch if is_clean else epoch,
        added=frozenset(each for each in base.added if each[0] in kept),
        partition_epoch=max(base.partition_epoch, above.partition_epoch) + 1,
    )


def is_master(record: ReplicationRecord, member: str, first_seen_epoch: int) -> bool:
    """Return whether the process that holds folder `member` is master by this record.

    `first_seen_epoch` is the epoch that the record had when the process first read it (0: it has
    seen the record from its creation). A record of that epoch may speak of an earlier process with
    the same folder. So a process that restarts waits until it is elected again.
    """
    return record.master == member and record.epoch > first_seen_epoch


def _next(record: ReplicationRecord, **changes: Any) -> ReplicationRecord:
    """Return the record after a transition."""
    return replace(record, partition_epoch=record.partition_epoch + 1, **changes)


def _still_wanted(record: ReplicationRecord, master: str) -> str | None:
    return None if record.wanted_master == master else record.wanted_master


def _problem_of(record: ReplicationRecord) -> str:
    """Return what is wrong with a record, in words; "" if nothing is."""
    copies = frozenset(record.copies)
    epoch, master = record.epoch, record.master
    texts = [*record.copies, *record.isr, *record.filling]
    checks = (
        (1 <= len(copies) <= COPIES_MAX, f"1 to {COPIES_MAX} copies wanted, found {len(copies)}"),
        (len(copies) == len(record.copies), "a member holds two copies"),
        (
            all(0 < len(text) <= MEMBER_LENGTH_MAX for text in texts),
            f"a folder id has 1 to {MEMBER_LENGTH_MAX} characters",
        ),
        (bool(record.isr), "the ISR is empty"),
        (record.isr <= copies, f"{sorted(record.isr - copies)} in the ISR without a copy"),
        (record.filling <= copies, f"{sorted(record.filling - copies)} filled without a copy"),
        (not record.filling & record.isr, "a copy that is being filled is in the ISR"),
        (1 <= epoch <= EPOCH_MAX, f"the epoch {epoch} is not 1 to {EPOCH_MAX}"),
        (master is None or master in record.isr, f"the master {master} is not in the ISR"),
        (
            record.wanted_master is None or record.wanted_master in copies,
            f"the wanted master {record.wanted_master} holds no copy",
        ),
        (record.handover is None or master is not None, "a handover without a master"),
        (
            copies.issuperset(member for member, _ in record.added)
            and len({member for member, _ in record.added}) == len(record.added)
            and all(1 <= number <= record.adds for _, number in record.added),
            f"the copies {sorted(record.added)} of {record.adds} that were added do not fit",
        ),
        (
            record.unclean_epoch is None or 1 < record.unclean_epoch <= epoch,
            f"the unclean election of epoch {record.unclean_epoch} is not 2 to {epoch}",
        ),
    )
    for is_right, problem in checks:
        if not is_right:
            return f"replication record: {problem}"
    return ""


def _whole(field: str, value: object) -> int:
    """Return a stored whole number, or raise ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(f"replication record, {field}: a whole number is wanted, found {value!r}")
    return value


def _member(field: str, value: object) -> str | None:
    """Return a stored folder id or None, or raise ValueError."""
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"replication record, {field}: a folder id or null is wanted, found {value!r}")


def _members(field: str, value: object) -> tuple[str, ...]:
    """Return stored folder ids, or raise ValueError."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"replication record, {field}: a list of folder ids is wanted: {value!r}")
    if len(set(value)) != len(value):
        raise ValueError(f"replication record, {field}: a folder id stands there twice: {value!r}")
    return tuple(value)


def _numbers(field: str, value: object) -> frozenset[tuple[str, int]]:
    """Return stored (folder id, number) pairs, or raise ValueError."""
    if not isinstance(value, list | tuple) or not all(
        isinstance(item, list | tuple)
        and len(item) == 2
        and isinstance(item[0], str)
        and type(item[1]) is int
        for item in value
    ):
        raise ValueError(
            f"replication record, {field}: a list of [folder id, number] is wanted: {value!r}"
        )
    return frozenset((member, number) for member, number in value)


def _pair(field: str, value: object, kind: type[_Pair]) -> _Pair | None:
    """Return a stored (vb_uuid, seqno) or None, or raise ValueError."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(
            f"replication record, {field}: [vb_uuid, seqno] is wanted, found {value!r}"
        )
    vb_uuid, seqno = (_whole(field, item) for item in value)
    if not 0 < vb_uuid <= VB_UUID_MAX or seqno > SEQNO_MAX:
        raise ValueError(
            f"replication record, {field}: vb_uuid {vb_uuid} or seqno {seqno} too large"
        )
    return kind(vb_uuid, seqno)
