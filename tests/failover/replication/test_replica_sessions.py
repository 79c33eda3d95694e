"""How a replica's node gets in: control x_replicate on a real session, and what comes after it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from dcp.server.access.access import Access
from dcp.server.access.users import USERS_FILE, Users
from dcp.server.config.settings import Settings
from dcp.server.observe.event_log import EventLog
from dcp.session.access.rights import EVERYTHING, FULL_RIGHTS, NEEDS, Rights, Role
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.replication.messages import FORMAT, Greeting, encode, pack_ack, unpack_ack
from support.copies import CLUSTER, Copies
from support.memory_node import MemoryNode, Peer
from vbucket.engine.partition import VbState

GREETING = Greeting(FORMAT, CLUSTER, "b", 1, "a")


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture
def peer(copies: Copies) -> Peer:
    """A connection that a replica's node has opened, before the control."""
    peer = copies.a.accept()
    peer.hello(Feature.XERROR)
    assert peer.open(b"replica:b").status == Status.OK
    return peer


def replicate(peer: Peer, greeting: bytes = encode(GREETING)) -> Frame:
    return peer.control(b"x_replicate", greeting)


def why(answer: Frame) -> str:
    text: str = json.loads(answer.value)["error"]["context"]
    return text


# -- who gets in -----------------------------------------------------------------------------------


def test_a_member_becomes_a_replica(peer: Peer) -> None:
    assert replicate(peer).status == Status.OK
    assert peer.state.producer is None, "it is no consumer any more"
    assert peer.state.sender is peer.state.feed is not None


def test_a_node_alone_has_no_replicas() -> None:
    peer = MemoryNode().connect()
    peer.hello(Feature.XERROR)
    peer.open()
    refused = replicate(peer)
    assert refused.status == Status.NOT_SUPPORTED
    assert "this node is alone" in why(refused)
    assert peer.stream(0).status == Status.OK, "it is a consumer as before"


@pytest.mark.parametrize(
    "rights", [FULL_RIGHTS, Rights({Role.STREAM: (EVERYTHING,), Role.ADMIN: (EVERYTHING,)})]
)
def test_replicas_need_their_role_and_no_other_contains_it(peer: Peer, rights: Rights) -> None:
    peer.state.login.rights, peer.state.login.user = rights, "ada"
    refused = replicate(peer)
    assert refused.status == Status.EACCESS
    assert "dcpctl user grant ada replicate" in why(refused)
    assert peer.state.feed is None
    lines = peer.state.notes.lines
    [(event, fields)] = [line for line in lines if line[0] in {"denied", "refused"}]
    assert (event, fields["user"], fields["role"]) == ("denied", "ada", "replicate")


def test_the_role_is_all_that_a_replica_needs(copies: Copies) -> None:
    peer = copies.a.accept()
    peer.state.login.rights = Rights({Role.REPLICATE: (EVERYTHING,)})
    assert peer.open(b"replica:b").status == Status.OK
    assert replicate(peer).status == Status.OK
    assert peer.ask(Opcode.GET, key=b"k").status == Status.EACCESS
    assert peer.ask(Opcode.SET, key=b"k", extras=bytes(8)).status == Status.EACCESS


def test_a_consumers_role_does_not_let_acknowledge(peer: Peer) -> None:
    peer.state.login.rights = Rights({Role.STREAM: (EVERYTHING,)})
    [refused] = peer.send(pack_ack(1, 1))
    assert refused.status == Status.EACCESS
    assert [
        role for role in Role if any(role in each for each in NEEDS[Opcode.X_REPLICA_ACK].roles)
    ] == [Role.REPLICATE]


@pytest.mark.parametrize(
    ("greeting", "text"),
    [
        (
            Greeting(FORMAT + 1, CLUSTER, "b", 1, "a", oldest=FORMAT + 1),
            "Upgrade the older of the two",
        ),
        (
            Greeting(FORMAT, "other", "b", 1, "a"),
            "member b belongs to cluster 'other', this node to",
        ),
        (Greeting(FORMAT, CLUSTER, "stranger", 1, "a"), "stranger is no member of this cluster"),
    ],
)
def test_stranger_is_refused_with_words_and_connection_closes(
    copies: Copies, peer: Peer, greeting: Greeting, text: str
) -> None:
    refused = replicate(peer, encode(greeting))
    assert (refused.status, text in why(refused)) == (Status.EINVAL, True)
    assert peer.state.is_closing
    assert text in peer.state.close_reason
    assert peer.state.feed is None
    # The connection passes notes and reasons to the log of refusals, whose rate is bounded.
    assert [event for event, _ in peer.state.notes.lines] == ["refused"]


@pytest.mark.parametrize(
    "greeting",
    [
        b"{}",
        b"[" * 240,
        b"\xff\xfe",
        b'{"format":1,"cluster":"test","member":"b","incarnation":1,"more":1}',
        b'{"format":"1","cluster":"test","member":"b","incarnation":1}',
        b'{"format":' + b"9" * 200 + b"}",
        b"null",
    ],
)
def test_a_greeting_that_cannot_be_read_is_refused(peer: Peer, greeting: bytes) -> None:
    refused = replicate(peer, greeting)
    assert refused.status == Status.EINVAL
    assert "not a Greeting" in why(refused)
    assert peer.state.is_closing


def test_a_connection_with_streams_stays_a_consumer(copies: Copies, peer: Peer) -> None:
    copies.rest()
    assert peer.stream(1).status == Status.OK
    refused = replicate(peer)
    assert (refused.status, "streams are open" in why(refused)) == (Status.EINVAL, True)
    assert peer.state.feed is None
    assert peer.producer.stream_count == 1


def test_a_replicas_connection_opens_nothing_else(peer: Peer) -> None:
    assert replicate(peer).status == Status.OK
    feed = peer.state.feed
    assert "already open" in why(peer.open(b"again"))
    assert "feeds a replica" in why(replicate(peer))
    assert "feeds a replica" in why(peer.control(b"enable_noop", b"true"))
    assert peer.state.sender is feed


def test_a_link_ends_with_the_role_of_its_user(tmp_path: Path, peer: Peer) -> None:
    """`stream` is not enough for a connection that feeds a replica."""
    users = Users(tmp_path / USERS_FILE, iterations=4096)
    users.add("n1", "password", FULL_RIGHTS.granted(Role.REPLICATE))
    access = Access(Settings(audit="off"), users, EventLog(logging.getLogger("test")))
    assert replicate(peer).status == Status.OK
    peer.state.login.user, peer.state.login.rights = "n1", users.rights_of("n1")
    assert access.overdue(peer.session, 10**18, opened_ns=0, heard_ns=0) == "", (
        "a link is never idle"
    )
    users.revoke("n1", Role.WRITE)
    assert access.apply_rights(peer.state) is True
    users.revoke("n1", Role.REPLICATE)
    assert access.apply_rights(peer.state) is False
    assert access.apply_rights(peer.state) is None


# -- what a replica sends --------------------------------------------------------------------------


def test_an_acknowledgement_on_a_plain_connection_is_refused(peer: Peer) -> None:
    [refused] = peer.send(pack_ack(1, 1))
    assert (refused.status, "control x_replicate comes first" in why(refused)) == (
        Status.EINVAL,
        True,
    )
    assert not peer.state.is_closing


@pytest.mark.parametrize(
    "request_",
    [
        pack_ack(1, 1),
        pack_request(Opcode.X_REPLICA_ACK, extras=b"short"),
        pack_request(Opcode.DCP_STREAM_REQ, extras=bytes(47), value=b"{}"),
        pack_request(Opcode.DCP_STREAM_REQ, extras=bytes(48), value=b"{}"),
        pack_request(Opcode.DCP_STREAM_REQ, extras=bytes(48), value=b"[" * 60_000),
        pack_request(
            Opcode.DCP_STREAM_REQ, vb_id=4, extras=bytes(48), value=b'{"epoch":1,"versions":[]}'
        ),
    ],
)
def test_a_replica_that_breaks_the_rules_is_disconnected(peer: Peer, request_: bytes) -> None:
    assert replicate(peer).status == Status.OK
    assert peer.send(request_) == []
    assert peer.state.is_closing
    assert peer.state.close_reason, "it says why"


def test_an_acknowledgement_is_taken_in_any_pieces(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes alone takes a shorter way through the session."""
    taken: list[bytes] = []
    assert replicate(peer).status == Status.OK
    monkeypatch.setattr(peer.state.feed, "take_acknowledgement", lambda *got: taken.append(got[0]))
    acks = [pack_ack(number, number + 1) for number in range(1, 6)]
    first_byte = acks[2][:1]
    pieces = (acks[0], acks[1] + first_byte, acks[2][1:], acks[3] + acks[4])
    taken_bytes = peer.state.taken_bytes
    for piece in pieces:
        assert peer.send(piece) == []
    assert peer.state.taken_bytes == taken_bytes + sum(map(len, acks))
    assert [unpack_ack(extras)[:2] for extras in taken] == [(n, n + 1) for n in range(1, 6)]


def test_a_newer_link_ends_the_older_one(copies: Copies, peer: Peer) -> None:
    assert replicate(peer).status == Status.OK
    older = peer.state.feed
    assert older is not None
    other = copies.a.accept()
    other.open(b"replica:b")
    assert replicate(other).status == Status.OK
    assert older.is_superseded
    assert not older.tick(copies.now_ns)
    peer.send(pack_request(Opcode.DCP_STREAM_REQ, extras=bytes(48), value=b"{}"))
    assert "newer link" in peer.state.close_reason
    newer = other.state.feed
    assert newer is not None
    older.close()  # the connection notices
    assert newer.tick(copies.now_ns)
    assert not newer.is_superseded


# -- what a cluster refuses, or answers in its own way ---------------------------------------------


@pytest.mark.parametrize("opcode", [Opcode.STOP_PERSISTENCE, Opcode.START_PERSISTENCE])
def test_a_node_of_a_cluster_holds_no_commits(copies: Copies, opcode: Opcode) -> None:
    peer = copies.a.accept()
    peer.hello(Feature.XERROR)
    refused = peer.ask(opcode)
    assert refused.status == Status.NOT_SUPPORTED
    assert "in a cluster" in why(refused)
    assert "use a node alone" in why(refused)


def test_a_partition_that_is_dead_here_is_another_nodes(copies: Copies) -> None:
    peer = copies.a.accept()
    peer.hello()
    vb_id = next(part.vb_id for part in copies.a.engine.partitions if part.state != VbState.DEAD)
    assert peer.ask(Opcode.GET_FAILOVER_LOG, vb_id=vb_id).status != Status.NOT_MY_VBUCKET
    copies.a.engine.partitions[vb_id].state = VbState.DEAD
    assert peer.ask(Opcode.GET_FAILOVER_LOG, vb_id=vb_id).status == Status.NOT_MY_VBUCKET
