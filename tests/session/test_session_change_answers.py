"""Every command that changes one document is answered by the same rules."""

from __future__ import annotations

import pytest

from dcp.session.kv.with_meta import META_EXTRAS
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.message import MUTATION_TOKEN
from dcp.wire.opcode import QUIET_FORMS, Opcode
from dcp.wire.status import Status
from support.memory_node import START_NS, MemoryNode, Peer
from vbucket.engine.partition import VbState

VB = 5
KEY = b"k"
META = META_EXTRAS.pack(0, 0, 100, START_NS)
PARTS: dict[Opcode, dict[str, bytes]] = {
    Opcode.SET: {"extras": bytes(8), "value": b"6"},
    Opcode.ADD: {"extras": bytes(8), "value": b"6"},
    Opcode.REPLACE: {"extras": bytes(8), "value": b"6"},
    Opcode.DELETE: {},
    Opcode.APPEND: {"value": b"6"},
    Opcode.PREPEND: {"value": b"6"},
    Opcode.INCREMENT: {"extras": (1).to_bytes(8, "big") + bytes(12)},
    Opcode.DECREMENT: {"extras": (1).to_bytes(8, "big") + bytes(12)},
    Opcode.SET_WITH_META: {"extras": META, "value": b"6"},
    Opcode.DEL_WITH_META: {"extras": META},
    Opcode.TOUCH: {"extras": (60).to_bytes(4, "big")},
    Opcode.GAT: {"extras": (60).to_bytes(4, "big")},
}
"""Loud opcode -> what its request has beside the key."""
BODIES = {
    Opcode.INCREMENT: (b"", (6).to_bytes(8, "big")),
    Opcode.DECREMENT: (b"", (4).to_bytes(8, "big")),
    Opcode.GAT: (bytes(4), b"5"),
}
"""Extras and value of a successful answer, without a token."""
WITHOUT_TOKEN = {Opcode.TOUCH, Opcode.GAT}
QUIET = [quiet for quiet, loud in QUIET_FORMS.items() if loud in PARTS]


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


def connect(node: MemoryNode, opcode: Opcode, *features: int) -> Peer:
    """Return a client; the document is there, unless the command needs that it is not."""
    peer = node.connect()
    peer.hello(*features)
    if opcode != Opcode.ADD:
        peer.set(VB, KEY, b"5")
    node.commit()
    return peer


@pytest.mark.parametrize("opcode", PARTS)
@pytest.mark.parametrize("has_token", [False, True])
def test_change_answers_its_cas_and_negotiated_token(
    node: MemoryNode, opcode: Opcode, has_token: bool
) -> None:
    peer = connect(node, opcode, *[Feature.MUTATION_SEQNO] * has_token)
    answer = peer.ask(opcode, vb_id=VB, key=KEY, **PARTS[opcode])
    part = node.engine.partitions[VB]
    extras, value = BODIES.get(opcode, (b"", b""))
    if has_token and opcode not in WITHOUT_TOKEN:
        extras = MUTATION_TOKEN.pack(part.vb_uuid, part.high_seqno)
    assert (answer.status, answer.extras, answer.value) == (Status.OK, extras, value)
    assert answer.cas == node.engine.meta(VB, b"\0" + KEY).cas
    assert peer.must_wait, "nobody may see it before it is committed"


@pytest.mark.parametrize("opcode", QUIET)
def test_a_quiet_change_is_silent_and_what_follows_waits_for_it(
    node: MemoryNode, opcode: Opcode
) -> None:
    loud = QUIET_FORMS[opcode]
    peer = connect(node, loud)
    frames = peer.send(
        pack_request(opcode, vb_id=VB, key=KEY, **PARTS[loud]) + pack_request(Opcode.NOOP)
    )
    silent = [] if opcode == Opcode.GATQ else [opcode]
    assert [frame.opcode for frame in frames] == [
        code for code in (opcode, Opcode.NOOP) if code not in silent
    ]
    assert peer.must_wait


@pytest.mark.parametrize("opcode", [*PARTS, *QUIET])
def test_an_error_is_answered_loud_or_quiet(node: MemoryNode, opcode: Opcode) -> None:
    loud = QUIET_FORMS.get(opcode, opcode)
    peer = connect(node, loud)
    node.engine.partitions[VB].state = VbState.DEAD
    answer = peer.ask(opcode, vb_id=VB, key=KEY, **PARTS[loud])
    assert (answer.opcode, answer.status) == (opcode, Status.NOT_MY_VBUCKET)
    assert answer.value == node.bucket_config()
