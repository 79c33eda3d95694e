"""Flags, expiry and revision of each change: what its operation asked for, or what was there. Pure.

Operations without an answer are not looked at, but for their revisions, which rise by one with
each change but SET_WITH_META. The time of an expiry is known within a day, because clocks jump:
expiries of a few seconds, those that outlive the run (`Operation.lasts_s`) and none are told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from sim.checkers.falling import CAS_FROM_ELSEWHERE
from sim.checkers.register import TOUCHES
from sim.clock import WALL_START_NS
from sim.facts import Kind, Operation, Outcome, Place, Told
from sim.ledger import Change, Ledger
from sim.world import SECOND

DAY_S: Final = 86_400
SHOWN: Final = frozenset({Kind.GET, Kind.GET_REPLICA})
NOT_MADE: Final = SHOWN | {Kind.OBSERVE, Kind.DELETE, Kind.GET_AND_LOCK, Kind.UNLOCK}
"""What leaves no document."""
STORING: Final = frozenset({Kind.SET, Kind.ADD, Kind.REPLACE, Kind.SET_WITH_META})


class _Made(NamedTuple):
    """A change, and the one of the same key before."""

    change: Change
    before: Change | None


def wrong(operations: Iterable[Operation], told: Mapping[Place, Told], ledger: Ledger) -> list[str]:
    """Return what changes have that nobody asked for, and what was answered and told otherwise."""
    made: dict[tuple[int, int, int], _Made] = {}
    problems: dict[str, None] = {}
    for vb_id, log in ledger.logs():
        problems |= dict.fromkeys(_walked(vb_id, log[0][0], ledger, made))
    flags: dict[tuple[bytes, int], set[int]] = {}
    by_place: dict[Place, Change] = {}
    by_cas: dict[tuple[bytes, int], _Made] = {}
    for (vb_id, _, seqno), each in made.items():
        change = each.change
        flags.setdefault((change.key, change.cas), set()).add(change.flags)
        by_place[vb_id, seqno, change.cas] = change
        by_cas[change.key, change.cas] = each
    for operation in operations:
        if operation.outcome is Outcome.OK and not operation.collection:
            found = made.get((operation.vb_id, operation.vb_uuid, operation.seqno))
            if operation.kind in TOUCHES:  # they have no token
                found = by_cas.get((operation.key, operation.cas))
            if operation.kind in SHOWN:
                known = flags.get((operation.key, operation.cas))
                if known and operation.flags not in known:
                    problems[f"{operation} is answered with flags {operation.flags:x}, and has"
                             f" {known}"] = None  # fmt: skip
            elif found is not None and operation.kind not in NOT_MADE:
                problems |= dict.fromkeys(_unlike(operation, *found))
    return [*problems, *_told_otherwise(told, by_place)]


def _told_otherwise(told: Mapping[Place, Told], made: Mapping[Place, Change]) -> Iterator[str]:
    """Compare what consumers were told with the changes."""
    for place, each in told.items():
        change = made.get(place)
        if change is not None and each[1:] != (
            change.key, change.rev_seqno, change.flags, change.expiry_s
        ):  # fmt: skip
            yield f"{each.consumer} was told {each}, which is {change}"


def _walked(
    vb_id: int, uuid: int, ledger: Ledger, made: dict[tuple[int, int, int], _Made]
) -> Iterator[str]:
    """Note the changes of a version, and look at their revisions."""
    log = ledger.log_of(vb_id, uuid)
    newest: dict[bytes, Change] = {}
    for change in ledger.changes(vb_id, log, 1, 1 << 62):
        before = newest.get(change.key)
        newest[change.key] = change
        if change.seqno > log[0][1]:
            made[vb_id, uuid, change.seqno] = _Made(change, before)
        if before is None or change.key[:1] == CAS_FROM_ELSEWHERE:
            continue
        is_forgotten = before.value is None and change.rev_seqno == 1  # it may have been purged
        if change.rev_seqno != before.rev_seqno + 1 and not is_forgotten:
            yield f"vb {vb_id}: the revision of {change} does not follow that of {before}"


def _unlike(operation: Operation, change: Change, before: Change | None) -> Iterator[str]:
    """Compare a change with what was asked for, and with what was there."""
    kind = operation.kind
    if kind in TOUCHES and (before is None or before.value != change.value):
        return  # the document had this expiry already: it is the change that made it
    is_live = before is not None and before.value is not None
    flags = before.flags if before is not None and is_live else 0
    if kind in STORING:
        flags = operation.flags
    if change.flags != flags:
        yield f"{operation} has flags {change.flags:x}, not {flags:x}"
    if kind is Kind.APPEND or (kind is Kind.INCREMENT and is_live):
        if before is not None and change.expiry_s != before.expiry_s:
            yield f"{operation} has expiry {change.expiry_s}, and had {before.expiry_s}"
        return
    asked_s = operation.expiry_s or operation.lasts_s
    wanted_s = (WALL_START_NS + operation.invoked_ns) // SECOND + asked_s if asked_s else 0
    if bool(change.expiry_s) != bool(asked_s) or abs(change.expiry_s - wanted_s) > DAY_S:
        yield f"{operation} has expiry {change.expiry_s}, not about {wanted_s}"
