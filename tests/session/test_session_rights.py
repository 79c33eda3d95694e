"""What users may do: roles and key prefixes, in memory, command by command."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.session.access.auth import AuthStep
from dcp.session.access.rights import (
    DEFAULT_COLLECTION,
    EVERYTHING,
    FULL_RIGHTS,
    NEEDS,
    Rights,
    Role,
    Scope,
    split_key,
)
from dcp.wire.feature import Feature
from dcp.wire.frame import HEADER, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer

ALL = (EVERYTHING,)


def only(*roles: Role) -> Rights:
    return Rights(dict.fromkeys(roles, ALL))


def log_in(peer: Peer, rights: Rights, user: str = "ada") -> Peer:
    """Log in as a user with these rights; errors carry their context then."""

    class Door:
        def mechanisms(self, peer_is_loopback: bool) -> list[str]:
            return ["PLAIN"]

        def start(self, mechanism: str, initial: bytes, peer_is_loopback: bool) -> AuthStep:
            return AuthStep(Status.OK, user=user, rights=rights)

        def step(self, exchange: object, message: bytes) -> AuthStep:
            return AuthStep(Status.AUTH_ERROR)

    peer.state.login.authenticator = Door()
    assert peer.ask(Opcode.SASL_AUTH, key=b"PLAIN", value=b"\0ada\0x").status == Status.OK
    peer.hello(Feature.XERROR)
    return peer


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    return node.connect(is_loopback=False)


def context(frame) -> str:
    assert frame.status == Status.EACCESS
    return json.loads(frame.value)["error"]["context"]


def ask(peer: Peer, opcode: int, key: bytes = b"a:1"):
    """A well-formed request of a document command."""
    extras, value = {
        **dict.fromkeys((Opcode.SET, Opcode.ADD, Opcode.REPLACE), (bytes(8), b"v")),
        Opcode.INCREMENT: (bytes(20), b""), Opcode.DECREMENT: (bytes(20), b""),
        Opcode.APPEND: (b"", b"v"), Opcode.PREPEND: (b"", b"v"),
        Opcode.TOUCH: (bytes(4), b""), Opcode.GAT: (bytes(4), b""),
    }.get(opcode, (b"", b""))  # fmt: skip
    return peer.ask(opcode, key=key, extras=extras, value=value)


READS = (Opcode.GET, Opcode.GETK, Opcode.GET_META)
WRITES = (Opcode.SET, Opcode.ADD, Opcode.REPLACE, Opcode.DELETE, Opcode.APPEND, Opcode.TOUCH)
BOTH = (Opcode.INCREMENT, Opcode.DECREMENT, Opcode.GAT)


@pytest.mark.parametrize(
    ("rights", "allowed", "denied"),
    [
        (only(Role.READ), READS, WRITES + BOTH),
        (only(Role.WRITE), WRITES, READS + BOTH),
        (only(Role.READ, Role.WRITE), READS + WRITES + BOTH, ()),
        (only(Role.ADMIN, Role.STREAM), (), READS + WRITES + BOTH),
        (Rights({}), (), READS + WRITES + BOTH),
    ],
)
def test_roles_open_their_commands_and_no_others(peer, rights, allowed, denied):
    log_in(peer, rights)
    for opcode in allowed:
        assert ask(peer, opcode).status != Status.EACCESS, opcode.name
    for opcode in denied:
        assert "it takes the role" in context(ask(peer, opcode)), opcode.name
    assert {note[0] for note in peer.state.notes.lines} >= ({"denied"} if denied else set())


def test_full_rights_have_every_role_but_that_of_nodes():
    assert set(FULL_RIGHTS.scopes()) == set(Role) - {Role.REPLICATE}
    assert FULL_RIGHTS.is_full, "no command needs it"
    granted = FULL_RIGHTS.granted(Role.REPLICATE)
    assert granted.has(Role.REPLICATE)
    assert granted.revoked(Role.REPLICATE) == FULL_RIGHTS
    with pytest.raises(ValueError, match="cannot be restricted"):
        Rights({}).granted(Role.REPLICATE, Scope(b"a:"))


def test_a_replica_opens_streams_without_the_role_of_consumers():
    assert only(Role.REPLICATE).denial(Opcode.DCP_STREAM_REQ, None, b"") is None
    restricted = Rights({Role.REPLICATE: ALL, Role.READ: (Scope(b"a:"),)})
    assert restricted.denial(Opcode.DCP_STREAM_REQ, None, b"") is not None


def test_a_refusal_says_who_what_and_who_can_change_it(peer):
    log_in(peer, only(Role.READ))
    assert context(ask(peer, Opcode.SET)) == (
        "user 'ada' may not SET: it takes the role write; "
        "an admin grants it: dcpctl user grant ada write"
    )
    assert peer.state.notes.lines[-1] == (
        "denied",
        {
            "command": "SET",
            "user": "ada",
            "role": "write",
            "reason": "it takes the role write",
        },
    )


def test_prefixes_bound_what_is_read_and_written(node, peer):
    node.connect().ask(Opcode.SET, key=b"b:1", extras=bytes(8), value=b"secret")
    log_in(peer, Rights({Role.READ: (Scope(b"a:"), Scope(b"c:")), Role.WRITE: (Scope(b"a:"),)}))
    assert ask(peer, Opcode.SET, b"a:1").status == Status.OK
    assert ask(peer, Opcode.GET, b"a:1").value == b"v"
    assert ask(peer, Opcode.GET, b"c:1").status == Status.KEY_ENOENT
    refused = context(ask(peer, Opcode.GET, b"b:1"))
    assert (
        "read is granted for keys beginning with 'a:' or keys beginning with 'c:' only" in refused
    )
    for opcode in (Opcode.SET, Opcode.DELETE, Opcode.APPEND, Opcode.INCREMENT):
        for key in (b"c:1", b"a", b"A:1", b"b:1"):
            assert context(ask(peer, opcode, key))
    assert node.connect().ask(Opcode.GET, key=b"b:1").value == b"secret"


def test_with_collections_prefix_counts_after_collection_id(peer):
    log_in(peer, Rights({Role.READ: (Scope(b"a:"),), Role.WRITE: (Scope(b"a:"),)}))
    peer.hello(Feature.XERROR, Feature.COLLECTIONS)
    assert ask(peer, Opcode.SET, b"\0a:1").status == Status.OK
    assert context(ask(peer, Opcode.SET, b"\0b:1"))
    assert context(ask(peer, Opcode.GET, b"a:1")), "0x61 is a collection id here"
    peer.hello(Feature.XERROR)
    assert context(ask(peer, Opcode.GET, b"\0a:1"))


def test_a_collection_bounds_like_a_prefix():
    rights = Rights({Role.READ: (Scope(b"a", DEFAULT_COLLECTION),)})
    assert rights.denial(Opcode.GET, DEFAULT_COLLECTION, b"ab") is None
    assert rights.denial(Opcode.GET, None, b"ab") is not None
    assert rights.denial(Opcode.GET, DEFAULT_COLLECTION, b"b") is not None


def test_a_key_cannot_be_smuggled_past_the_check(node, peer):
    """Lengths that disagree: what is checked is what would be stored, or nothing is stored."""
    log_in(peer, Rights({Role.WRITE: (Scope(b"a:"),)}))
    vb = {"vb_id": 0, "opaque": 0}
    for extras in (b"", b"a:", b"a:a:a:a:", bytes(8), b"a:" + bytes(7)):
        for key in (b"b:1", b"", b"xa:"):
            peer.send(pack_request(Opcode.SET, extras=extras, key=key, value=b"a:value", **vb))
    stored = [part.item_count for part in node.engine.partitions]
    assert not any(stored)


@pytest.mark.parametrize("opcode", [Opcode.SET, Opcode.GET, Opcode.DELETE, Opcode.SET_WITH_META])
def test_a_key_behind_the_end_of_its_request_is_none(peer, opcode):
    log_in(peer, Rights({Role.READ: (Scope(b"a:"),), Role.WRITE: (Scope(b"a:"),)}))
    request = HEADER.pack(0x80, opcode, 1, 64, 0, 0, 1, 0, 0) + b"x"
    (refused, noop) = peer.send(request + pack_request(Opcode.NOOP) + bytes(20))
    assert context(refused)
    assert noop.status == Status.OK


def test_preserved_expiry_is_no_way_around(node, peer):
    log_in(peer, Rights({Role.READ: ALL, Role.WRITE: (Scope(b"a:"),)}))
    peer.hello(Feature.XERROR, Feature.PRESERVE_TTL)
    framing = bytes([5 << 4])
    body = bytes(8) + b"b:1" + b"v"
    head = bytes([0x08, Opcode.SET, len(framing), 3, 8, 0]) + bytes(2)
    packet = head + (len(framing) + len(body)).to_bytes(4, "big") + bytes(12) + framing + body
    (refused,) = peer.send(packet)
    assert "may not SET" in context(refused)
    (stored,) = peer.send(packet.replace(b"b:1", b"a:1"))
    assert stored.status == Status.OK


def test_flush_concerns_every_key(peer):
    log_in(peer, Rights({Role.WRITE: (Scope(b"a:"),)}))
    assert "it concerns every key" in context(peer.ask(Opcode.FLUSH))
    log_in(peer, only(Role.WRITE))
    assert peer.ask(Opcode.FLUSH).status == Status.OK


def test_streams_take_their_role_and_unrestricted_reading(peer):
    log_in(peer, only(Role.READ, Role.WRITE, Role.ADMIN))
    assert "it takes the role stream" in context(peer.open())
    log_in(peer, Rights({Role.STREAM: ALL, Role.READ: (Scope(b"a:"),)}))
    assert "a stream carries every key" in context(peer.open())
    log_in(peer, only(Role.STREAM))
    assert peer.open().status == Status.OK
    assert peer.ask(Opcode.GET_FAILOVER_LOG).status == Status.OK
    assert "read or stream" not in context(peer.ask(Opcode.STAT))


def test_commands_without_a_need_stay_open(peer):
    log_in(peer, Rights({}))
    for opcode in (Opcode.NOOP, Opcode.VERSION, Opcode.GET_CLUSTER_CONFIG):
        assert peer.ask(opcode).status == Status.OK
    assert peer.ask(Opcode.SELECT_BUCKET, key=b"default").status == Status.OK
    assert peer.ask(0xEE).status == Status.UNKNOWN_COMMAND


def test_new_rights_count_for_the_next_command(peer):
    log_in(peer, only(Role.READ, Role.WRITE))
    assert ask(peer, Opcode.SET).status == Status.OK
    peer.state.login.rights_changed(only(Role.READ))
    assert context(ask(peer, Opcode.SET))
    assert ask(peer, Opcode.GET).value == b"v"
    peer.state.login.rights_changed(only(Role.READ, Role.WRITE))
    assert ask(peer, Opcode.SET).status == Status.OK


@pytest.mark.parametrize("is_loopback", [False, True])
def test_a_removed_user_is_stale_until_the_next_login(node, is_loopback):
    peer = log_in(node.connect(is_loopback=is_loopback), FULL_RIGHTS)
    peer.state.login.rights_changed(None)
    for opcode in (Opcode.GET, Opcode.SET, Opcode.STAT, Opcode.DCP_OPEN):
        stale = ask(peer, opcode)
        assert stale.status == Status.AUTH_STALE
        assert b"user 'ada' was removed; log in again" in stale.value
    assert not peer.session.is_logged_in
    log_in(peer, FULL_RIGHTS, "bob")
    assert ask(peer, Opcode.SET).status == Status.OK


def test_every_command_that_is_answered_has_a_line_in_the_table(peer):
    known = peer.session._hot.keys() | peer.session._cold.keys()
    assert known - NEEDS.keys() == set()


@given(st.binary(max_size=8), st.binary(max_size=8))
def test_a_scope_lets_through_exactly_what_begins_with_it(prefix, key):
    rights = Rights({Role.READ: (Scope(prefix),)})
    assert (rights.denial(Opcode.GET, None, key) is None) == key.startswith(prefix)


def test_splitting_keys():
    assert split_key(b"k", has_collections=False) == (DEFAULT_COLLECTION, b"k")
    assert split_key(b"\0k", has_collections=True) == (DEFAULT_COLLECTION, b"k")
    assert split_key(b"\x08k", has_collections=True) == (None, b"k")
    assert split_key(b"\x88\x01k", has_collections=True) == (None, b"k")
    assert split_key(b"", has_collections=True) == (None, b"")
    assert split_key(b"\x80", has_collections=True) == (None, b"")


def test_granting_and_revoking():
    a, b = Scope(b"a:"), Scope(b"b:")
    rights = Rights({}).granted(Role.READ, a).granted(Role.READ, b).granted(Role.READ, a)
    assert rights.scopes() == {Role.READ: (b, a)}
    assert rights.granted(Role.READ).scopes() == {Role.READ: ALL}
    assert rights.revoked(Role.READ, a).scopes() == {Role.READ: (b,)}
    assert rights.revoked(Role.READ).scopes() == {}
    for refused in (
        lambda: FULL_RIGHTS.granted(Role.READ, a),
        lambda: rights.granted(Role.STREAM, a),
        lambda: rights.granted(Role.ADMIN, a),
        lambda: rights.revoked(Role.WRITE),
        lambda: rights.revoked(Role.READ, Scope(b"c:")),
    ):
        with pytest.raises(ValueError):
            refused()
    assert FULL_RIGHTS.is_full
    assert not only(Role.READ, Role.WRITE).is_full
    assert only(Role.READ, Role.WRITE).has_all_documents
