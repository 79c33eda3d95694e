"""Which seqno a partition had at a moment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.server.operate.moments import NS, NotKeptError, seqno_at
from support.stored_bytes import pack_mutation


class Kept:
    """Versions of a partition: seqno -> CAS."""

    def __init__(self, cas_of: dict[int, int]) -> None:
        self.cas_of = cas_of

    def entry_at(self, part: Any, seqno: int) -> bytes | None:
        cas = self.cas_of.get(seqno)
        return None if cas is None else pack(seqno, cas)


def pack(seqno: int, cas: int) -> bytes:
    return pack_mutation(
        vb_id=1, key=b"\0k", value=b"v", seqno=seqno, cas=cas, rev_seqno=1, flags=0, expiry=0,
        datatype=0, prev_seqno=0,
    )  # fmt: skip


def at(kept: dict[int, int], moment_s: float, *, floor: int, end: int) -> int:
    part = SimpleNamespace(history_floor=floor, committed_seqno=end)
    return seqno_at(cast("Any", Kept(kept)), cast("Any", part), moment_s)


@given(steps=st.lists(st.integers(1, 5), max_size=40), moment=st.integers(0, 120))
def test_it_is_the_last_change_that_is_not_younger(steps: list[int], moment: int) -> None:
    kept, time_s = dict[int, int](), 0
    for seqno, step in enumerate(steps, 1):
        time_s += step
        kept[seqno] = time_s * NS
    expected = max((seqno for seqno, cas in kept.items() if cas <= moment * NS), default=0)
    assert at(kept, moment, floor=0, end=len(steps)) == expected


def test_below_the_history_it_says_since_when_it_is_kept() -> None:
    kept = {5: 50 * NS, 6: 60 * NS, 7: 70 * NS}
    assert at(kept, 65, floor=5, end=7) == 6
    assert at(kept, 50, floor=5, end=7) == 5
    with pytest.raises(NotKeptError) as found:
        at(kept, 49, floor=5, end=7)
    assert found.value.since_s == 50
    del kept[5]  # a newer version took its place
    with pytest.raises(NotKeptError) as found:
        at(kept, 55, floor=5, end=7)
    assert found.value.since_s == 60


def test_a_floor_of_which_nothing_is_left_is_not_known() -> None:
    with pytest.raises(NotKeptError) as found:
        at({}, 55, floor=5, end=5)
    assert found.value.since_s is None
