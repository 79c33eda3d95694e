"""A fenced partition answers nothing that could be stale, and sends nobody elsewhere."""

from __future__ import annotations

import json
from base64 import b64encode
from struct import Struct
from types import SimpleNamespace

import pytest

from dcp.session.kv.scans import CONTINUE_EXTRAS
from dcp.session.text import TextSession
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.message import EndReason, parse_failover_log
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.engine.partition import VbState
from vbucket.model.ids import vbucket_of

VB, OTHER = 3, 4
KEY = b"\0k"
LATER = Status.ETMPFAIL
COUNTER = Struct(">QQI").pack(1, 1, 0)
META = Struct(">IIQQ").pack(0, 0, 9, 9)
EXPIRY = b"\0\0\1\0"


@pytest.fixture
def node() -> MemoryNode:
    """A node with a committed document in each of two partitions; one is fenced."""
    node = MemoryNode()
    peer = connect(node)
    peer.set(VB, KEY, b"v")
    peer.set(OTHER, KEY, b"v")
    node.commit()
    fence(node)
    return node


def fence(node: MemoryNode) -> None:
    node.engine.partitions[VB].state = VbState.FENCED


def unfence(node: MemoryNode) -> None:
    node.engine.partitions[VB].state = VbState.ACTIVE


def connect(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello(Feature.JSON, Feature.XERROR, Feature.COLLECTIONS, Feature.MUTATION_SEQNO)
    return peer


def dcp(node: MemoryNode) -> Peer:
    """Connect a client that knows this server's extensions."""
    peer = plain_dcp(node)
    peer.control(b"x_version_log", b"true")
    return peer


def plain_dcp(node: MemoryNode) -> Peer:
    peer = connect(node)
    peer.open()
    peer.control(b"enable_noop", b"true")
    return peer


_BARE = (
    Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ, Opcode.GET_META, Opcode.DELETE,
    Opcode.DELETEQ, Opcode.GET_AND_LOCK, Opcode.GET_REPLICA,
)  # fmt: skip
_STORES = (Opcode.SET, Opcode.SETQ, Opcode.ADD, Opcode.REPLACE, Opcode.REPLACEQ)
DOCUMENTS: dict[Opcode, tuple[bytes, bytes]] = {
    **dict.fromkeys(_BARE, (b"", b"")),
    **dict.fromkeys(_STORES, (bytes(8), b"v")),
    **dict.fromkeys((Opcode.APPEND, Opcode.PREPENDQ), (b"", b"v")),
    **dict.fromkeys((Opcode.INCREMENT, Opcode.DECREMENTQ), (COUNTER, b"")),
    **dict.fromkeys((Opcode.TOUCH, Opcode.GAT, Opcode.GATQ), (EXPIRY, b"")),
    Opcode.SET_WITH_META: (META, b"v"),
}
"""Opcode -> extras and value."""


@pytest.mark.parametrize("opcode", DOCUMENTS, ids=lambda opcode: opcode.name)
@pytest.mark.parametrize("is_uncommitted", [False, True])
def test_a_document_command_is_to_be_sent_again(
    node: MemoryNode, opcode: Opcode, is_uncommitted: bool
) -> None:
    """It does not wait for a commit either, which may not come."""
    if is_uncommitted:
        unfence(node)
        connect(node).set(VB, KEY, b"uncommitted")
        fence(node)
    peer, part = connect(node), node.engine.partitions[VB]
    before = part.high_seqno
    extras, value = DOCUMENTS[opcode]
    answer = peer.ask(opcode, vb_id=VB, key=KEY, extras=extras, value=value)
    assert answer.status == LATER
    assert "partition 3" in json.loads(answer.value)["error"]["context"]
    assert not peer.must_wait
    assert part.high_seqno == before
    assert peer.ask(Opcode.GET, vb_id=OTHER, key=KEY).status == Status.OK


def test_runs_stop_at_a_fenced_partition(node: MemoryNode) -> None:
    peer = connect(node)
    gets = [pack_request(Opcode.GET, vb_id=vb_id, key=KEY) for vb_id in (OTHER, VB, OTHER)]
    sets = [
        pack_request(Opcode.SET, vb_id=vb_id, key=KEY, extras=bytes(8)) for vb_id in (OTHER, VB)
    ]
    statuses = [frame.status for frame in peer.send(b"".join(gets + sets))]
    assert statuses == [Status.OK, LATER, Status.OK, Status.OK, LATER]


def test_no_random_key_is_not_answer_while_partition_is_fenced(node: MemoryNode) -> None:
    peer = connect(node)
    assert peer.ask(Opcode.GET_RANDOM_KEY).status == Status.OK
    peer.delete(OTHER, KEY)
    assert peer.ask(Opcode.GET_RANDOM_KEY).status == LATER
    unfence(node)
    assert peer.ask(Opcode.GET_RANDOM_KEY).key == KEY


def test_a_scan_stays_open(node: MemoryNode) -> None:
    peer = connect(node)
    unfence(node)
    bounds = {"start": b64encode(b"").decode(), "end": b64encode(b"\xff").decode()}
    create = {"vb_id": VB, "value": json.dumps({"range": bounds}).encode(), "datatype": 1}
    scan_id = peer.ask(Opcode.RANGE_SCAN_CREATE, **create).value
    go_on = {"vb_id": VB, "extras": CONTINUE_EXTRAS.pack(scan_id, 0, 0, 0)}
    fence(node)
    assert peer.ask(Opcode.RANGE_SCAN_CREATE, **create).status == LATER
    assert peer.ask(Opcode.RANGE_SCAN_CONTINUE, **go_on).status == LATER
    unfence(node)
    assert peer.ask(Opcode.RANGE_SCAN_CONTINUE, **go_on).status == Status.RANGE_SCAN_COMPLETE


@pytest.mark.parametrize(
    "line",
    [
        b"get %b\r\n", b"gets %b\r\n", b"gat 10 %b\r\n", b"set %b 0 0 1\r\n1\r\n",
        b"append %b 0 0 1\r\n1\r\n", b"incr %b 1\r\n", b"delete %b\r\n", b"touch %b 10\r\n",
    ],
)  # fmt: skip
def test_text_lines_are_to_be_sent_again(node: MemoryNode, line: bytes) -> None:
    key = next(b"%d" % n for n in range(1000) if vbucket_of(b"%d" % n, node.partitions) == VB)
    unfence(node)
    connect(node).set(VB, b"\0" + key, b"uncommitted")
    fence(node)
    session = TextSession(node.connect().state)
    session.receive(line % key, node.now_ns)
    assert session.state.answers == [b"SERVER_ERROR try again later\r\n"]
    assert not session.state.wait_group


# -- seqnos and streams ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "status"), [(0, LATER), (1, LATER), (2, Status.OK), (3, Status.OK), (4, Status.OK)]
)
def test_all_vb_seqnos_are_not_told_where_one_of_them_is_fenced(
    node: MemoryNode, state: int, status: int
) -> None:
    peer = connect(node)
    extras = state.to_bytes(4, "big")
    assert peer.ask(Opcode.GET_ALL_VB_SEQNOS, extras=extras).status == status
    unfence(node)
    assert peer.ask(Opcode.GET_ALL_VB_SEQNOS, extras=extras).status == Status.OK


def test_a_state_that_only_memory_knows_cannot_be_asked_for(node: MemoryNode) -> None:
    extras = VbState.FENCED.to_bytes(4, "big")
    assert connect(node).ask(Opcode.GET_ALL_VB_SEQNOS, extras=extras).status == Status.EINVAL


@pytest.mark.parametrize(
    "opcode", [Opcode.GET_FAILOVER_LOG, Opcode.DCP_GET_FAILOVER_LOG, Opcode.OBSERVE_SEQNO]
)
def test_the_history_of_a_fenced_partition_is_not_told(node: MemoryNode, opcode: int) -> None:
    peer = dcp(node)
    uuid = node.engine.partitions[VB].vb_uuid.to_bytes(8, "big")
    value = uuid if opcode == Opcode.OBSERVE_SEQNO else b""
    assert peer.ask(opcode, vb_id=VB, value=value).status == LATER
    unfence(node)
    assert peer.ask(opcode, vb_id=VB, value=value).status == Status.OK


@pytest.mark.parametrize("opcode", [Opcode.GET_FAILOVER_LOG, Opcode.DCP_GET_FAILOVER_LOG])
def test_couchbase_client_gets_failover_log_of_fenced_partition(
    node: MemoryNode, opcode: int
) -> None:
    """java-dcp-client closes its connection after a refusal."""
    unfence(node)
    connect(node).set(VB, KEY, b"uncommitted")
    fence(node)
    peer, part = plain_dcp(node), node.engine.partitions[VB]
    answer = peer.ask(opcode, vb_id=VB)
    assert parse_failover_log(answer.value) == part.failover.shown_pairs()
    assert not peer.must_wait, "what it waits for may not come"


@pytest.mark.parametrize("opcode", [Opcode.GET_FAILOVER_LOG, Opcode.DCP_GET_FAILOVER_LOG])
def test_couchbase_consumer_may_ask_for_a_copy_that_has_left(node: MemoryNode, opcode: int) -> None:
    """Its map is behind. java-dcp-client would close its connection, and lose what it holds."""
    plain, ours, part = plain_dcp(node), dcp(node), node.engine.partitions[VB]
    for peer in (plain, ours):
        peer.joins(SimpleNamespace(arriving=()))  # type: ignore[arg-type]
    part.state = VbState.DEAD
    assert plain.ask(opcode, vb_id=VB).status == Status.NOT_MY_VBUCKET, "there never was a copy"
    part.leader_epoch = 1
    uuid = part.vb_uuid.to_bytes(8, "big")
    part.branch_group = node.engine.commits.committed_group + 1
    assert parse_failover_log(plain.ask(opcode, vb_id=VB).value) == part.failover.pairs()[-1:]
    assert plain.ask(Opcode.OBSERVE_SEQNO, vb_id=VB, value=uuid).status == LATER
    assert not plain.must_wait, "what it waits for may not come"
    assert ours.ask(opcode, vb_id=VB).status == Status.NOT_MY_VBUCKET
    asked = ours.ask(Opcode.OBSERVE_SEQNO, vb_id=VB, value=uuid)
    assert asked.status == Status.NOT_MY_VBUCKET


@pytest.mark.parametrize("start", [0, 1, 99])
def test_a_stream_request_is_to_be_sent_again(node: MemoryNode, start: int) -> None:
    assert dcp(node).stream(VB, start, uuid=1).status == LATER


@pytest.mark.parametrize("start", [0, 1, 99])
def test_a_client_of_couchbase_looks_for_the_partition_again(node: MemoryNode, start: int) -> None:
    """java-dcp-client gives a partition up after ETMPFAIL, and repeats this."""
    answer = plain_dcp(node).stream(VB, start, uuid=1)
    assert (answer.status, answer.value) == (Status.NOT_MY_VBUCKET, b""), "the map names this node"


def test_a_fence_ends_the_streams_of_the_partition(node: MemoryNode) -> None:
    unfence(node)
    peer = dcp(node)
    assert peer.stream(VB, opaque=7).status == peer.stream(OTHER, opaque=8).status == Status.OK
    peer.drain()
    fence(node)
    node.hub.fenced(VB)
    (end,) = peer.drain()
    assert (end.opcode, end.opaque) == (Opcode.DCP_STREAM_END, 7)
    assert int.from_bytes(end.extras, "big") == EndReason.STATE_CHANGED == 2
    assert peer.producer.stream_count == 1
    node.hub.fenced(VB)
    assert peer.drain() == []


@pytest.mark.parametrize(
    ("start", "end", "flags", "refused"),
    [
        (5, 2**64 - 1, 0, Status.ROLLBACK),
        (1, 2**64 - 1, 0, Status.ROLLBACK),
        (0, 0, 0x40, Status.ERANGE),
    ],
)
@pytest.mark.parametrize("is_uncommitted", [False, True])
def test_who_may_be_behind_sends_nobody_back(
    node: MemoryNode, start: int, end: int, flags: int, refused: int, is_uncommitted: bool
) -> None:
    unfence(node)
    part, peer = node.engine.partitions[VB], dcp(node)
    uuid = part.vb_uuid if start > 1 else 1
    if flags:
        uuid = 0
    part.may_send_back = False
    if is_uncommitted:
        connect(node).set(VB, KEY, b"uncommitted")
    elsewhere = plain_dcp(node).stream(VB, start, end, uuid=uuid, flags=flags)
    assert elsewhere.status == Status.NOT_MY_VBUCKET
    answer = peer.stream(VB, start, end, uuid=uuid, flags=flags)
    assert answer.status == LATER
    assert "partition 3" in json.loads(answer.value)["error"]["context"]
    assert not peer.must_wait, "what it waits for may not come"
    node.commit()
    assert peer.stream(VB, 1, uuid=part.vb_uuid).status == Status.OK, "it is not behind this one"
    part.may_send_back = True
    answer = dcp(node).stream(VB, start, end, uuid=uuid, flags=flags)
    assert answer.status == refused


# -- replicas that hear no master -----------------------------------------------------------------


@pytest.fixture
def replica(node: MemoryNode) -> MemoryNode:
    """A node that has a replica of a partition and hears no master of it."""
    part = node.engine.partitions[VB]
    part.state, part.has_copies, part.is_unheard = VbState.REPLICA, True, True
    return node


def test_a_replica_that_hears_no_master_tells_no_seqnos(replica: MemoryNode) -> None:
    peer, part = dcp(replica), replica.engine.partitions[VB]
    uuid = part.vb_uuid.to_bytes(8, "big")
    questions = [
        {"opcode": Opcode.GET_ALL_VB_SEQNOS},
        {"opcode": Opcode.GET_ALL_VB_SEQNOS, "extras": (2).to_bytes(4, "big")},
        {"opcode": Opcode.OBSERVE_SEQNO, "vb_id": VB, "value": uuid},
        {"opcode": Opcode.GET_FAILOVER_LOG, "vb_id": VB},
        {"opcode": Opcode.DCP_GET_FAILOVER_LOG, "vb_id": VB},
    ]
    for question in questions:
        answer = peer.ask(**question)
        assert answer.status == LATER, question
        assert "partition 3" in json.loads(answer.value)["error"]["context"]
    active = peer.ask(Opcode.GET_ALL_VB_SEQNOS, extras=(1).to_bytes(4, "big"))
    assert active.status == Status.OK, "it is about other partitions"
    assert plain_dcp(replica).ask(Opcode.DCP_GET_FAILOVER_LOG, vb_id=VB).status == Status.OK
    part.is_unheard = False
    assert [peer.ask(**question).status for question in questions] == [Status.OK] * 5


def test_a_replica_that_hears_no_master_opens_no_stream(replica: MemoryNode) -> None:
    peer = dcp(replica)
    assert peer.stream(VB).status == LATER
    answer = plain_dcp(replica).stream(VB)
    assert (answer.status, answer.value) == (Status.NOT_MY_VBUCKET, replica.bucket_config())
    assert peer.stream(OTHER).status == Status.OK
    replica.engine.partitions[VB].is_unheard = False
    assert peer.stream(VB).status == Status.NOT_MY_VBUCKET


def test_replica_without_a_master_sends_commands_elsewhere(
    replica: MemoryNode,
) -> None:
    peer = connect(replica)
    assert peer.ask(Opcode.GET, vb_id=VB, key=KEY).status == Status.NOT_MY_VBUCKET
    assert peer.set(VB, KEY, b"w").status == Status.NOT_MY_VBUCKET
    assert peer.ask(Opcode.GET_REPLICA, vb_id=VB, key=KEY).value == b"v", "it may be older"


# -- where a fence is not known ----------------------------------------------------------------


def test_log_and_store_know_a_fenced_partition_as_active(node: MemoryNode) -> None:
    node.engine.keyspace.branch(VB, 0)
    node.commit()
    node.merge()
    node.crash()
    assert node.engine.partitions[VB].state == VbState.ACTIVE


def test_fenced_partition_in_quarantine_is_active_after_branch(node: MemoryNode) -> None:
    """The branch writes its state into the log again."""
    node.engine.keyspace.quarantined[VB] = "damaged"
    node.engine.keyspace.branch(VB, 0)
    node.commit()
    node.crash()
    assert node.engine.partitions[VB].state == VbState.ACTIVE


def test_fenced_partition_gets_events_of_new_collections_later(node: MemoryNode) -> None:
    """It may be handed over with its end as of the fence."""
    part, other = node.engine.partitions[VB], node.engine.partitions[OTHER]
    manifest = {
        "uid": "1",
        "scopes": [
            {
                "name": "_default", "uid": "0",
                "collections": [
                    {"name": "_default", "uid": "0"}, {"name": "c", "uid": "8"},
                ],
            }
        ],
    }  # fmt: skip
    answer = connect(node).ask(Opcode.SET_COLLECTIONS_MANIFEST, value=json.dumps(manifest).encode())
    assert answer.status == Status.OK
    assert [part.high_seqno, other.high_seqno] == [1, 2]
    node.engine.keyspace.tell_missing_events(part)  # as its master does when it serves it again
    assert [part.high_seqno, other.high_seqno] == [2, 2]
