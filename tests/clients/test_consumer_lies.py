"""The consumer's core beside a server that lies about what a message belongs to."""

from __future__ import annotations

import pytest
from test_consumer_core import Session

from clients.consumer.streams import advance
from clients.errors import StreamViolationError
from dcp.wire.message import DELETION_EXTRAS
from dcp.wire.opcode import Opcode


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("lie", ["mutation", "deletion", "advanced", "marker"])
def test_a_message_of_another_partition_is_a_violation_in_words(lie, count):
    """The position of the partition that it names has no snapshot, so it could not be told."""
    session = Session()
    session.accept()
    told = session.feed(session.marker(0, 9) + session.mutation(1))
    start = session.core.positions()
    lies = {
        "mutation": [session.mutation(seqno) for seqno in range(2, 2 + count)],
        "deletion": [session.message(Opcode.DCP_DELETION, DELETION_EXTRAS.pack(2, 1, 0), b"\0k")],
        "advanced": [session.message(Opcode.DCP_SEQNO_ADVANCED, (2).to_bytes(8, "big"))],
        "marker": [session.mutation(9), session.marker(10, 12)],
    }[lie]
    lies[-1:] = [lies[-1][:6] + (18).to_bytes(2, "big") + lies[-1][8:]]
    batch = session.core.receive(b"".join(lies), 0)
    positions = dict(start)
    advance(positions, batch.items, batch.markers, batch.collections)
    assert positions == session.core.positions(), "what came before the lie counts"
    assert positions.keys() == {17}
    assert len(told) == 2
    assert isinstance(session.core.failure, StreamViolationError)
    assert "a message of partition 18 in the stream of this one" in str(session.core.failure)
    assert session.core.failure.vb_id == 17
