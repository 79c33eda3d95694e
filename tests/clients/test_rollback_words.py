"""What a rollback says: what happens to the data that a client holds, in one line."""

from __future__ import annotations

import pytest

from clients.position import Position, rollback_reason

BRANCHED = "history branched at seqno"


@pytest.mark.parametrize(
    ("held", "server", "back_to", "words"),
    [
        (2, 1, 0, f"{BRANCHED} 1: 1 change (seqno 2) is undone, 1 change (seqno 1) is sent again"),
        (1500, 300, 300, f"{BRANCHED} 300: 1,200 changes (seqnos 301 to 1500) are undone"),
        (9, 9, 4, f"{BRANCHED} 9: 5 changes (seqnos 5 to 9) are sent again"),
        (3, 0, 0, "the server does not know version 7: 3 changes (seqnos 1 to 3) are undone"),
        (3, 4, 3, f"{BRANCHED} 4: no change is undone"),
    ],
)
def test_a_rollback_says_what_happens_to_the_changes(held, server, back_to, words) -> None:
    before = Position(versions=((7, 0),), seqno=held, snap_start=held, snap_end=held)
    assert rollback_reason(before, server, back_to) == words
