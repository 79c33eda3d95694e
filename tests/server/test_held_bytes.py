"""One bound for what all connections hold: who goes, and who stays."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from dcp.server.net.held_bytes import PROGRESS_BYTES, STRANGERS_PART, HeldBytes, Outgoing

MIB = 1 << 20


class FakeHolder:
    def __init__(self, *, is_stranger: bool = False) -> None:
        self.is_stranger = is_stranger
        self.waits_for_peer = True
        self.closed_because = ""

    def abort(self, reason: str) -> None:
        assert not self.closed_because, "closed once"
        self.closed_because = reason


def closed(holders: list[FakeHolder]) -> list[int]:
    return [at for at, holder in enumerate(holders) if holder.closed_because]


def test_one_that_stood_still_for_longest_time_goes_and_told_why() -> None:
    held = HeldBytes(4 * MIB, "receive_buffers_bytes_max", "incomplete packets took")
    holders = [FakeHolder() for _ in range(5)]
    for holder in holders[:4]:
        held.note(holder, MIB)
    held.note(holders[0], MIB + PROGRESS_BYTES)  # which makes it too much
    assert closed(holders) == [1]
    assert holders[1].closed_because == (
        f"incomplete packets took {4 * MIB + PROGRESS_BYTES} bytes together, and this "
        "connection has not moved for the longest time (setting receive_buffers_bytes_max)"
    )
    held.note(holders[4], MIB)
    assert closed(holders) == [1, 2]
    assert held.held_bytes == 3 * MIB + PROGRESS_BYTES
    assert held.closed_total == 2


def test_a_byte_now_and_then_is_no_progress() -> None:
    held = HeldBytes(3 * MIB, "s", "w")
    holders = [FakeHolder() for _ in range(3)]
    held.note(holders[0], MIB)
    held.note(holders[1], MIB)
    for more in range(1, 100):
        held.note(holders[0], MIB + more)
    held.note(holders[2], MIB)
    assert closed(holders) == [0]


def test_bytes_that_add_up_and_taken_packets_are_progress() -> None:
    held = HeldBytes(3 * MIB, "s", "w")
    trickling, other, busy, last = holders = [FakeHolder() for _ in range(4)]
    held.note(busy, 100)
    held.note(trickling, MIB)
    held.note(other, MIB)
    for more in range(0, PROGRESS_BYTES + 1, 1024):
        held.note(trickling, MIB + more)
    held.note(busy, 90, has_moved=True)  # another packet's beginning
    held.note(last, MIB)
    assert closed(holders) == [1]


def test_who_lets_go_of_it_all_is_not_looked_at() -> None:
    held = HeldBytes(2 * MIB, "s", "w")
    first, second, third = holders = [FakeHolder() for _ in range(3)]
    held.note(first, MIB)
    held.note(second, MIB)
    held.note(first, 0)
    assert held.held_bytes == MIB
    held.note(third, MIB)
    held.forget(third)
    held.forget(third)
    assert closed(holders) == []
    assert held.held_bytes == MIB


def test_data_that_waits_is_taken_in_pieces() -> None:
    outgoing = Outgoing(4)
    outgoing.add(b"abcdefghij")
    outgoing.add(bytearray(b"kl"))
    found, sizes = [], []
    while outgoing.size:
        found.append(bytes(outgoing.take()))
        sizes.append(outgoing.size)
    assert found == [b"abcd", b"efgh", b"ij", b"kl"]
    assert sizes == [12, 12, 2, 0]
    outgoing.add(b"mnopq")
    outgoing.take()
    outgoing.clear()
    assert outgoing.size == 0
    outgoing.add(b"rst")
    assert bytes(outgoing.take()) == b"rst"


def test_one_that_is_too_large_by_itself_goes_itself() -> None:
    held = HeldBytes(MIB, "s", "w")
    holder = FakeHolder()
    held.note(holder, MIB + 1)
    assert holder.closed_because
    assert held.held_bytes == 0


def test_strangers_do_not_close_the_connections_of_users() -> None:
    held = HeldBytes(8 * MIB, "s", "w")
    users = [FakeHolder() for _ in range(4)]
    for user in users:
        held.note(user, MIB)
    strangers = [FakeHolder(is_stranger=True) for _ in range(100)]
    for stranger in strangers:
        held.note(stranger, MIB)
    assert closed(users) == []
    assert closed(strangers) == list(range(96)), "they have what users leave"


def test_large_packets_of_users_leave_room_for_logins() -> None:
    held = HeldBytes(8 * MIB, "s", "w")
    strangers = [FakeHolder(is_stranger=True) for _ in range(8 // STRANGERS_PART)]
    for stranger in strangers:
        held.note(stranger, MIB)
    users = [FakeHolder() for _ in range(20)]
    for user in users:
        held.note(user, MIB)
    assert closed(strangers) == []
    assert closed(users) == list(range(14))


def test_who_logs_in_changes_the_line() -> None:
    held = HeldBytes(4 * MIB, "s", "w")
    known = FakeHolder(is_stranger=True)
    held.note(known, MIB)
    known.is_stranger = False
    held.note(known, MIB)
    assert held.held_bytes == MIB
    strangers = [FakeHolder(is_stranger=True) for _ in range(5)]
    for stranger in strangers:
        held.note(stranger, MIB)
    assert not known.closed_because


def test_who_waits_for_the_server_goes_last() -> None:
    held = HeldBytes(2 * MIB, "s", "w")
    waiting, idle, last = holders = [FakeHolder() for _ in range(3)]
    waiting.waits_for_peer = False
    held.note(waiting, MIB)
    held.note(idle, MIB)
    held.note(last, MIB)
    assert closed(holders) == [1]
    idle.waits_for_peer = last.waits_for_peer = False
    held.note(last, 2 * MIB)
    assert closed(holders) == [0, 1], "a bound is a bound"


steps = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 3 * PROGRESS_BYTES), st.booleans(), st.booleans()),
    max_size=80,
)


@given(steps)
def test_the_sum_is_exact_and_bounded(steps: list[tuple[int, int, bool, bool]]) -> None:
    bound = 6 * PROGRESS_BYTES
    held = HeldBytes(bound, "s", "w")
    holders = [FakeHolder() for _ in range(8)]
    model: dict[int, int] = {}
    for at, size, has_moved, is_stranger in steps:
        holder = holders[at]
        if holder.closed_because:
            continue
        holder.is_stranger = is_stranger
        model[at] = size
        held.note(holder, size, has_moved=has_moved)
        total = sum(size for at, size in model.items() if not holders[at].closed_because)
        assert held.held_bytes == total <= bound
    for holder in holders:
        assert re.fullmatch(r"(w \d+ bytes .+)?", holder.closed_because)
