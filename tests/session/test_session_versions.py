"""Version lists in stream requests (control x_version_log)."""

from __future__ import annotations

import json

import pytest

from dcp.wire.feature import Feature
from dcp.wire.frame import Frame
from dcp.wire.message import StreamFlag, parse_failover_log
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer

VB = 7


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


def connect(node: MemoryNode, *features: int, negotiates: bool = True) -> Peer:
    peer = node.connect()
    peer.hello(*features)
    peer.open()
    peer.control(b"enable_noop", b"true")
    if negotiates:
        assert peer.control(b"x_version_log", b"true").status == Status.OK
    return peer


def write_up_to(node: MemoryNode, seqno: int) -> None:
    writer = node.connect()
    writer.hello()
    while node.engine.partitions[VB].high_seqno < seqno:
        writer.set(VB, b"k%d" % node.engine.partitions[VB].high_seqno, b"value")
    node.commit()


def branch(node: MemoryNode, at_seqno: int) -> int:
    """Begin a version; return its uuid."""
    version = node.engine.keyspace.branch(VB, at_seqno)
    node.commit()
    return version.failover.current.vb_uuid


@pytest.fixture
def parted(node: MemoryNode) -> list[tuple[int, int]]:
    """A client followed W and, from 70, Y; the server went back to 50 and on by X, Z and V.

    Return the client's versions.
    """
    write_up_to(node, 100)
    oldest = node.engine.partitions[VB].vb_uuid
    for at_seqno, high_seqno in ((50, 80), (60, 90), (75, 120)):
        branch(node, at_seqno)
        write_up_to(node, high_seqno)
    return [(0xABC, 70), (oldest, 0)]


def ask(peer: Peer, seqno: int, versions: list[tuple[int, int]] | None, **parts: object) -> Frame:
    document = {key: value for key, value in parts.items() if key != "flags"}
    if versions is not None:
        document["version_log"] = [[str(vb_uuid), str(at)] for vb_uuid, at in versions]
    uuid = versions[0][0] if versions else 0xABC
    flags = parts.get("flags", 0)
    assert isinstance(flags, int)
    return peer.stream(
        VB, seqno, uuid=uuid, value=json.dumps(document).encode() if document else b"", flags=flags
    )


def test_list_finds_in_one_round_what_one_version_does_not(
    node: MemoryNode, parted: list[tuple[int, int]]
) -> None:
    unaware = connect(node, negotiates=False)
    alone = unaware.stream(VB, 76, uuid=0xABC)
    assert (alone.status, alone.value) == (Status.ROLLBACK, bytes(8)), "all of it again"
    answer = ask(connect(node), 76, parted)
    assert answer.status == Status.ROLLBACK
    assert int.from_bytes(answer.value[:8], "big") == 50
    kept = [version for version in parted if version[1] <= 50]
    assert ask(connect(node), 50, kept).status == Status.OK, "one round"


@pytest.mark.parametrize("features", [(), (Feature.COLLECTIONS,)])
def test_a_rollback_carries_the_version_log_where_it_is_wanted(
    node: MemoryNode, parted: list[tuple[int, int]], features: tuple[int, ...]
) -> None:
    log = node.engine.partitions[VB].failover.pairs()
    for wanted, entries in ((None, log), (True, log), (False, [])):
        parts = {} if wanted is None else {"want_version_log": wanted}
        answer = ask(connect(node, *features), 76, parted, **parts)
        assert int.from_bytes(answer.value[:8], "big") == 50
        assert parse_failover_log(answer.value[8:]) == entries


def test_an_ok_carries_the_whole_version_log_or_its_newest_entry(
    node: MemoryNode, parted: list[tuple[int, int]]
) -> None:
    log = node.engine.partitions[VB].failover.pairs()
    assert len(log) == 4
    for wanted, entries in ((None, log), (True, log), (False, log[:1])):
        parts = {} if wanted is None else {"want_version_log": wanted}
        assert parse_failover_log(ask(connect(node), 0, [(1, 0)], **parts).value) == entries


@pytest.mark.parametrize("opcode", [Opcode.DCP_GET_FAILOVER_LOG, Opcode.GET_FAILOVER_LOG])
def test_plain_client_sees_25_versions_and_one_with_control_200(
    node: MemoryNode, opcode: Opcode
) -> None:
    write_up_to(node, 9)
    oldest = node.engine.partitions[VB].vb_uuid
    for _ in range(230):
        node.engine.keyspace.branch(VB, 9)
    node.commit()
    log = node.engine.partitions[VB].failover.pairs()
    plain = connect(node, Feature.COLLECTIONS, negotiates=False)
    assert parse_failover_log(plain.ask(opcode, vb_id=VB).value) == log[:25]
    assert parse_failover_log(plain.stream(VB).value) == log[:25]
    assert parse_failover_log(node.connect().ask(opcode, vb_id=VB).value) == log[:25]
    peer = connect(node)
    assert len(log) == 200
    assert parse_failover_log(peer.ask(opcode, vb_id=VB).value) == log
    assert parse_failover_log(ask(peer, 9, [log[-1]]).value) == log, "the oldest one is known"
    refused = ask(connect(node), 9, [(oldest, 0)])
    assert refused.status == Status.ROLLBACK
    assert parse_failover_log(refused.value[8:]) == log
    named = connect(node, negotiates=False).stream(VB, 9, uuid=log[150][0])
    assert named.status == Status.OK, "what is not shown is known"


def test_without_the_control_a_list_is_an_unknown_name(
    node: MemoryNode, parted: list[tuple[int, int]]
) -> None:
    answer = ask(connect(node, Feature.COLLECTIONS, negotiates=False), 76, parted)
    assert (answer.status, answer.value) == (Status.ROLLBACK, bytes(8))
    answer = ask(connect(node, negotiates=False), 76, parted)
    assert answer.status == Status.EINVAL, "without collections there is no value"


def test_a_request_without_a_list_is_decided_by_its_one_version(node: MemoryNode) -> None:
    write_up_to(node, 9)
    uuid = node.engine.partitions[VB].vb_uuid
    peer = connect(node)
    assert peer.stream(VB, 9, uuid=uuid).status == Status.OK
    peer.ask(Opcode.DCP_CLOSE_STREAM, vb_id=VB)
    answer = peer.stream(VB, 9, uuid=uuid + 1)
    assert answer.status == Status.ROLLBACK
    assert int.from_bytes(answer.value[:8], "big") == 0


def test_from_latest_needs_no_version(node: MemoryNode, parted: list[tuple[int, int]]) -> None:
    peer = connect(node)
    value = json.dumps({"version_log": [["5", "0"]]}).encode()
    assert peer.stream(VB, flags=StreamFlag.FROM_LATEST, value=value).status == Status.OK


@pytest.mark.parametrize(
    "document",
    [
        {"version_log": None},
        {"version_log": {}},
        {"version_log": "1"},
        {"version_log": [["1"]]},
        {"version_log": [["1", "2", "3"]]},
        {"version_log": [[1, 2]]},
        {"version_log": [["1", "-2"]]},
        {"version_log": [["0x1", "2"]]},
        {"version_log": [["0", "2"]]},
        {"version_log": [["18446744073709551616", "2"]]},
        {"version_log": [["1", "18446744073709551616"]]},
        {"version_log": [["1", "2"], ["2", "3"]]},
        {"version_log": [[str(number), "2"] for number in range(1, 202)]},
        {"want_version_log": "true"},
        {"want_version_log": None},
    ],
    ids=lambda document: json.dumps(document)[:40],
)
def test_a_list_that_cannot_be_is_einval(node: MemoryNode, document: dict[str, object]) -> None:
    peer = connect(node)
    assert peer.stream(VB, value=json.dumps(document).encode()).status == Status.EINVAL
    assert not peer.producer.has_stream(VB)
