"""What a copy may take from another one: only what both histories have, and both have committed."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from failover.rules.history import FailoverLog
from failover.rules.repair import why_not_taken


class Copy(NamedTuple):
    """The changes of one copy, each with a name of its own, and its failover log."""

    changes: tuple[str, ...]
    log: FailoverLog

    def grown(self, name: str, count: int) -> Copy:
        return self._replace(changes=self.changes + tuple(f"{name}{n}" for n in range(count)))

    def branched(self, vb_uuid: int, seqno: int) -> Copy:
        return Copy(self.changes[:seqno], self.log.branch(vb_uuid, seqno))


Moves = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), max_size=6)


def moved(copy: Copy, name: str, moves: list[tuple[int, int]], first_uuid: int) -> Copy:
    """Branch at a seqno (one beyond the end: none) and write, again and again."""
    for index, (seqno, count) in enumerate(moves):
        if seqno <= len(copy.changes):
            copy = copy.branched(first_uuid + index, seqno)
        copy = copy.grown(f"{name}{index}.", count)
    return copy


@given(Moves, Moves, Moves, st.integers(1, 200), st.data())
def test_what_may_be_taken_is_the_same_on_both(
    before: list[tuple[int, int]],
    here: list[tuple[int, int]],
    there: list[tuple[int, int]],
    last_seqno: int,
    data: st.DataObject,
) -> None:
    """Copies of one history that part: a change that one may take is the one that it had itself."""
    common = moved(Copy((), FailoverLog.create(1)), "c", before, 100)
    own = moved(common, "own", here, 200)
    other = moved(common, "other", there, 300)
    # A version that nobody began anew does not part: one copy may only be behind the other.
    if own.log == common.log and other.log == common.log:
        other = Copy(own.changes[: data.draw(st.integers(0, len(own.changes)))], common.log)
    elif own.log.current == other.log.current:
        return
    elif own.log.current == common.log.current:
        own = common
    elif other.log.current == common.log.current:
        other = common
    why = why_not_taken(
        own.log, other.log, last_seqno,
        own_committed=len(own.changes), committed=len(other.changes),
    )  # fmt: skip
    if not why:
        assert own.changes[:last_seqno] == other.changes[:last_seqno]
        assert len(other.changes) >= last_seqno


@given(Moves, st.data())
def test_a_copy_takes_all_that_an_equal_one_has_committed(
    moves: list[tuple[int, int]], data: st.DataObject
) -> None:
    copy = moved(Copy((), FailoverLog.create(1)), "c", moves, 100).grown("end", 3)
    end = len(copy.changes)
    last, committed = data.draw(st.integers(1, end)), data.draw(st.integers(0, end))
    why = why_not_taken(copy.log, copy.log, last, own_committed=end, committed=committed)
    assert bool(why) == (last > committed)
    why = why_not_taken(copy.log, copy.log, last, own_committed=committed, committed=end)
    assert bool(why) == (last > committed)


def test_another_version_is_refused_by_name() -> None:
    own, other = FailoverLog.create(1).branch(2, 5), FailoverLog.create(1).branch(3, 5)
    assert why_not_taken(own, other, 5, own_committed=9, committed=9) == ""
    why = why_not_taken(own, other, 6, own_committed=9, committed=9)
    assert why == "seqno 6 is of version 3 there, and 2 here"
