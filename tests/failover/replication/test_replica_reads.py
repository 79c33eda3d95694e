"""GET_REPLICA while a replica follows: what is committed as far as it knows, never more."""

from __future__ import annotations

from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.replica_pair import VB, ReplicaPair


def test_replica_is_never_ahead_of_what_it_knows_to_be_committed() -> None:
    pair = ReplicaPair()
    client = pair.client(pair.replica)
    pair.follow()
    for number in range(1, 6):
        pair.set(b"a", value=b"%d" % number)
    shown = []
    for _ in range(200):
        is_moving = pair.step()
        part = pair.replica.part
        answer = client.ask(Opcode.GET_REPLICA, vb_id=VB, key=b"\0a")
        number = int(answer.value) if answer.status == Status.OK else 0
        assert number == part.committed_seqno, (number, part.committed_seqno, part.high_seqno)
        assert part.committed_seqno <= pair.master.part.committed_seqno
        shown.append(number)
        pair.replica.commit()
        if not is_moving:
            pair.replica.tick()
            pair.master.tick()
            pair.master.commit()
        if number == 5:
            break
    assert shown[-1] == 5
    assert shown == sorted(shown)
    token = pair.master.part.vb_uuid.to_bytes(8, "big") + (5).to_bytes(8, "big")
    found = client.ask(Opcode.GET_REPLICA, vb_id=VB, key=b"\0a", extras=token)
    assert found.value == b"5", "a token of the master is understood"
    pair.set(b"a", value=b"6")
    token = token[:8] + (6).to_bytes(8, "big")
    behind = client.ask(Opcode.GET_REPLICA, vb_id=VB, key=b"\0a", extras=token)
    assert behind.status == Status.ETMPFAIL
