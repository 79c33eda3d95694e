"""HELLO, SASL, buckets, configuration, statistics, partition history: a test for each rule."""

from __future__ import annotations

import json

import pytest

from dcp.session.access.auth import AuthStep
from dcp.wire.feature import GRANTED, Feature
from dcp.wire.frame import Frame, pack_request
from dcp.wire.message import (
    FAILOVER_ENTRY,
    MUTATION_TOKEN,
    OBSERVE_CURRENT,
    OBSERVE_OLD,
    VB_SEQNO,
    pack_open,
    parse_failover_log,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import ERROR_TABLE, Status
from support.memory_node import MemoryNode, Peer, node_for
from vbucket.engine.partition import VbState

VB = 7


class OneUser:
    """Knows alice. SCRAM takes two steps, whatever is in them; PLAIN one, `alice`."""

    def __init__(self, names: list[str] | None = None) -> None:
        self.names = names or ["SCRAM-SHA512", "SCRAM-SHA256", "SCRAM-SHA1", "PLAIN"]

    def mechanisms(self, peer_is_loopback: bool) -> list[str]:
        return self.names

    def start(self, mechanism: str, initial: bytes, peer_is_loopback: bool) -> AuthStep:
        if mechanism == "PLAIN":
            return self.step(None, initial)
        return AuthStep(Status.AUTH_CONTINUE, b"server first", "exchange")

    def step(self, exchange: object, message: bytes) -> AuthStep:
        if message == b"alice":
            return AuthStep(Status.OK, b"v=proof", None, "alice")
        return AuthStep(Status.AUTH_ERROR)


@pytest.fixture
def node(request: pytest.FixtureRequest) -> MemoryNode:
    return node_for(request)


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    return node.connect()


@pytest.fixture
def stranger(node: MemoryNode) -> Peer:
    """A connection from another machine."""
    peer = node.connect(is_loopback=False)
    peer.state.login.authenticator = OneUser()
    return peer


def login(peer: Peer) -> Frame:
    return peer.ask(Opcode.SASL_AUTH, key=b"PLAIN", value=b"alice")


# -- HELLO -------------------------------------------------------------------------------------


def features(frame: Frame) -> list[int]:
    return [int.from_bytes(frame.value[at : at + 2], "big") for at in range(0, len(frame.value), 2)]


def test_hello_grants_what_was_asked_and_is_known_in_order_asked(peer: Peer) -> None:
    answer = peer.hello(0x12, 0x0C, 0x04, 0x0E, 0x07, 0xFFFF)
    assert answer.status == Status.OK
    assert features(answer) == [0x12, 0x04, 0x07]


def test_hello_never_echoes_what_was_not_asked(peer: Peer) -> None:
    assert features(peer.hello()) == []
    for code in range(0x30):
        with_it = () if code not in {Feature.VATTR, 0x18} else (Feature.XATTR,)
        granted = [code] if code in GRANTED else []
        assert features(peer.hello(code, *with_it)) == [*granted, *with_it]


@pytest.mark.parametrize("code", [Feature.UNORDERED_EXECUTION, Feature.DUPLEX])
def test_hello_does_not_grant_what_the_server_cannot_do(peer: Peer, code: int) -> None:
    assert features(peer.hello(code)) == []


def test_hello_grants_a_feature_once_however_often_it_is_asked(peer: Peer) -> None:
    assert features(peer.hello(4, 4, 7, 4)) == [4, 7]


def test_hello_of_odd_length_is_einval(peer: Peer) -> None:
    assert peer.ask(Opcode.HELLO, value=b"\0\4\0").status == Status.EINVAL


def test_a_second_hello_starts_afresh(node: MemoryNode, peer: Peer) -> None:
    peer.hello(Feature.MUTATION_SEQNO, Feature.COLLECTIONS, Feature.XERROR)
    assert len(peer.set(VB, b"\0k", b"v").extras) == MUTATION_TOKEN.size
    peer.hello(Feature.XERROR)
    assert peer.set(VB, b"k2", b"v").extras == b""
    peer.hello()
    assert peer.ask(Opcode.ADD, vb_id=VB, key=b"k", extras=bytes(8)).value == b""


def test_an_error_has_a_context_only_where_xerror_was_granted(peer: Peer) -> None:
    peer.hello()
    assert peer.ask(0x66).value == b""
    peer.hello(Feature.XERROR)
    document = json.loads(peer.ask(0x66).value)
    assert "0x66" in document["error"]["context"]


def test_an_error_context_is_short_whatever_the_client_sent(peer: Peer) -> None:
    peer.hello(Feature.XERROR)
    answer = peer.ask(Opcode.SELECT_BUCKET, key=b"b" * 60_000)
    assert answer.status == Status.EACCESS
    assert len(answer.value) < 500
    assert all(len(str(fields)) < 1000 for _, fields in peer.state.notes.lines)


# -- SASL and who may do what --------------------------------------------------------------------


BEFORE_LOGIN = {
    Opcode.HELLO,
    Opcode.SASL_LIST_MECHS,
    Opcode.SASL_AUTH,
    Opcode.SASL_STEP,
    Opcode.NOOP,
    Opcode.VERSION,
    Opcode.QUIT,
    Opcode.GET_ERROR_MAP,
}


@pytest.mark.parametrize("opcode", sorted(BEFORE_LOGIN))
def test_what_is_needed_to_log_in_is_allowed_before(stranger: Peer, opcode: int) -> None:
    assert stranger.ask(opcode, value=b"\0\2").status != Status.EACCESS


def test_everything_else_is_eacces_before_login(stranger: Peer) -> None:
    for opcode in set(range(256)) - BEFORE_LOGIN - {Opcode.QUITQ}:
        assert stranger.ask(opcode, key=b"k").status == Status.EACCESS
        assert not stranger.state.is_closing


def test_a_flex_request_does_not_get_around_the_login(stranger: Peer) -> None:
    plain = pack_request(Opcode.GET, key=b"k")
    (answer,) = stranger.send(b"\x08" + plain[1:2] + b"\0\1" + plain[4:])
    assert answer.status == Status.EACCESS


def test_command_behind_login_in_same_read_is_let_through(stranger: Peer) -> None:
    *_, got = stranger.send(
        pack_request(Opcode.SASL_AUTH, key=b"PLAIN", value=b"alice")
        + pack_request(Opcode.GET, key=b"k")
    )
    assert got.status == Status.KEY_ENOENT


def test_command_behind_refused_login_in_same_read_is_not(stranger: Peer) -> None:
    login(stranger)
    *_, got = stranger.send(
        pack_request(Opcode.SASL_AUTH, key=b"PLAIN", value=b"mallory")
        + pack_request(Opcode.GET, key=b"k")
    )
    assert got.status == Status.EACCESS


def test_sasl_may_come_before_hello(stranger: Peer) -> None:
    mechanisms = stranger.ask(Opcode.SASL_LIST_MECHS)
    assert mechanisms.value == b"SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN"
    begun = stranger.ask(Opcode.SASL_AUTH, key=b"SCRAM-SHA512", value=b"first")
    assert (begun.status, begun.value) == (Status.AUTH_CONTINUE, b"server first")
    ended = stranger.ask(Opcode.SASL_STEP, key=b"SCRAM-SHA512", value=b"alice")
    assert (ended.status, ended.value) == (Status.OK, b"v=proof")
    assert stranger.state.login.user == "alice"
    assert stranger.hello(4).status == Status.OK


def test_list_mechs_and_auth_may_be_pipelined(stranger: Peer) -> None:
    hello, listed, begun = stranger.send(
        pack_request(Opcode.HELLO, value=b"\0\4", opaque=1)
        + pack_request(Opcode.SASL_LIST_MECHS, opaque=2)
        + pack_request(Opcode.SASL_AUTH, key=b"SCRAM-SHA512", value=b"x", opaque=3)
    )
    assert [hello.opaque, listed.opaque, begun.opaque] == [1, 2, 3]
    assert begun.status == Status.AUTH_CONTINUE


def test_a_wrong_password_is_auth_error(stranger: Peer) -> None:
    answer = stranger.ask(Opcode.SASL_AUTH, key=b"PLAIN", value=b"mallory")
    assert answer.status == Status.AUTH_ERROR
    assert not stranger.session.is_logged_in


def test_an_unknown_mechanism_is_auth_error(stranger: Peer) -> None:
    answer = stranger.ask(Opcode.SASL_AUTH, key=b"GSSAPI\xff", value=b"alice")
    assert answer.status == Status.AUTH_ERROR


def test_a_step_without_a_beginning_is_einval(stranger: Peer) -> None:
    assert stranger.ask(Opcode.SASL_STEP, key=b"PLAIN").status == Status.EINVAL


def test_an_exchange_cannot_be_stepped_after_it_ended(stranger: Peer) -> None:
    stranger.ask(Opcode.SASL_AUTH, key=b"SCRAM-SHA1", value=b"x")
    assert stranger.ask(Opcode.SASL_STEP, value=b"mallory").status == Status.AUTH_ERROR
    assert stranger.ask(Opcode.SASL_STEP, value=b"alice").status == Status.EINVAL


def test_a_local_client_needs_no_login(peer: Peer) -> None:
    assert peer.ask(Opcode.GET, key=b"k").status == Status.KEY_ENOENT


# -- bucket, configuration, error map --------------------------------------------------------------


def test_select_bucket_takes_the_one_bucket_and_deselects_it(node: MemoryNode, peer: Peer) -> None:
    assert peer.ask(Opcode.GET_CLUSTER_CONFIG).value == node.global_config()
    assert peer.ask(Opcode.SELECT_BUCKET, key=b"default").status == Status.OK
    assert peer.ask(Opcode.GET_CLUSTER_CONFIG).value == node.bucket_config()
    assert peer.ask(Opcode.SELECT_BUCKET, key=b"@no bucket@").status == Status.OK
    assert peer.ask(Opcode.GET_CLUSTER_CONFIG).value == node.global_config()


@pytest.mark.parametrize("name", [b"travel-sample", b"", b"\xff\xfe", b"DEFAULT"])
def test_an_unknown_bucket_is_eacces_and_changes_nothing(
    node: MemoryNode, peer: Peer, name: bytes
) -> None:
    peer.ask(Opcode.SELECT_BUCKET, key=b"default")
    assert peer.ask(Opcode.SELECT_BUCKET, key=name).status == Status.EACCESS
    assert peer.ask(Opcode.GET_CLUSTER_CONFIG).value == node.bucket_config()


@pytest.mark.parametrize(
    ("known", "is_new"), [((1, 1), False), ((1, 2), False), ((2, 0), False), ((1, 0), True)]
)
def test_a_configuration_that_the_client_has_is_answered_empty(
    node: MemoryNode, peer: Peer, known: tuple[int, int], is_new: bool
) -> None:
    extras = b"".join(number.to_bytes(8, "big", signed=True) for number in known)
    answer = peer.ask(Opcode.GET_CLUSTER_CONFIG, extras=extras)
    assert answer.status == Status.OK
    assert answer.value == (node.global_config() if is_new else b"")


def test_a_client_that_knows_no_configuration_says_minus_one(node: MemoryNode, peer: Peer) -> None:
    answer = peer.ask(Opcode.GET_CLUSTER_CONFIG, extras=b"\xff" * 16)
    assert answer.value == node.global_config()


def test_a_known_version_of_another_length_is_einval(peer: Peer) -> None:
    assert peer.ask(Opcode.GET_CLUSTER_CONFIG, extras=bytes(8)).status == Status.EINVAL


def test_the_error_map_has_lowercase_hexadecimal_keys(peer: Peer) -> None:
    answer = peer.ask(Opcode.GET_ERROR_MAP, value=b"\0\2")
    document = json.loads(answer.value)
    assert (document["version"], document["revision"]) == (2, 3)
    codes = {int(key, 16) for key in document["errors"]}
    assert codes == set(ERROR_TABLE) - {Status.X_FENCED}, "the Java SDK takes 16 bits with a sign"
    assert max(codes) <= 0x7FFF
    for key, entry in document["errors"].items():
        assert key == f"{int(key, 16):x}"
        assert set(entry) == {"name", "desc", "attrs"}
    assert document["errors"]["23"]["attrs"] == ["dcp", "special-handling"]
    assert document["errors"]["1f"]["name"] == "AUTH_STALE"


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (2, 2), (9, 2)])
def test_the_error_map_has_the_newest_format_up_to_the_asked_one(
    peer: Peer, asked: int, given: int
) -> None:
    answer = peer.ask(Opcode.GET_ERROR_MAP, value=asked.to_bytes(2, "big"))
    assert json.loads(answer.value)["version"] == given


def test_there_is_no_error_map_of_version_0(peer: Peer) -> None:
    assert peer.ask(Opcode.GET_ERROR_MAP, value=b"\0\0").status == Status.KEY_ENOENT


@pytest.mark.parametrize(
    ("opcode", "parts"),
    [
        (Opcode.NOOP, {"key": b"k"}),
        (Opcode.NOOP, {"value": b"v"}),
        (Opcode.NOOP, {"extras": bytes(4)}),
        (Opcode.VERSION, {"key": b"k"}),
        (Opcode.QUIT, {"key": b"k"}),
        (Opcode.HELLO, {"extras": bytes(4), "key": b"agent"}),
        (Opcode.SASL_LIST_MECHS, {"key": b"k"}),
        (Opcode.SASL_AUTH, {"extras": bytes(4), "key": b"PLAIN", "value": b"\0guest\0guest"}),
        (Opcode.SELECT_BUCKET, {"key": b"default", "value": b"v"}),
        (Opcode.GET_CLUSTER_CONFIG, {"key": b"k"}),
        (Opcode.GET_ERROR_MAP, {"key": b"k", "value": b"\0\2"}),
        (Opcode.STAT, {"extras": bytes(4)}),
    ],
)
def test_parts_that_a_command_does_not_have_are_einval(
    peer: Peer, opcode: Opcode, parts: dict[str, bytes]
) -> None:
    assert peer.ask(opcode, **parts).status == Status.EINVAL
    assert peer.ask(Opcode.NOOP).status == Status.OK


@pytest.mark.parametrize("value", [b"", b"\2", b"\0\0\2"])
def test_an_error_map_request_names_a_version_of_two_bytes(peer: Peer, value: bytes) -> None:
    assert peer.ask(Opcode.GET_ERROR_MAP, value=value).status == Status.EINVAL


def test_every_status_but_ok_is_in_the_error_map() -> None:
    assert set(ERROR_TABLE) == set(Status) - {Status.OK}


def test_noop_answers_with_its_opaque(peer: Peer) -> None:
    answer = peer.ask(Opcode.NOOP, opaque=0xDEADBEEF)
    assert (answer.status, answer.opaque, answer.value) == (Status.OK, 0xDEADBEEF, b"")


def test_version_is_three_numbers(peer: Peer) -> None:
    assert [part.isdigit() for part in peer.ask(Opcode.VERSION).value.split(b".")] == [True] * 3


def test_quit_answers_and_closes(peer: Peer) -> None:
    noop = pack_request(Opcode.NOOP)
    answers = peer.send(noop + pack_request(Opcode.QUIT, opaque=9) + noop)
    assert [answer.opcode for answer in answers] == [Opcode.NOOP, Opcode.QUIT]
    assert peer.state.is_closing


def test_quitq_closes_without_an_answer(peer: Peer) -> None:
    assert peer.send(pack_request(Opcode.QUITQ) + pack_request(Opcode.NOOP)) == []
    assert peer.state.is_closing


def test_stat_answers_one_response_per_statistic_and_empty_one(
    node: MemoryNode, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "stats", lambda _group: [("pid", "1"), ("threads", "2")])
    answers = peer.send(pack_request(Opcode.STAT, opaque=3))
    assert [(a.key, a.value) for a in answers] == [(b"pid", b"1"), (b"threads", b"2"), (b"", b"")]
    assert {(a.opcode, a.opaque, a.status) for a in answers} == {(Opcode.STAT, 3, Status.OK)}


@pytest.mark.parametrize(
    ("datatype", "value"), [(0, b"{}"), (1, b"{no json"), (1, b"["), (1, b"[" * 100_000)]
)
def test_a_value_of_stat_is_json(node: MemoryNode, datatype: int, value: bytes) -> None:
    peer = node.connect()
    peer.hello(Feature.JSON)
    answer = peer.ask(Opcode.STAT, key=b"dcp", value=value[:60_000], datatype=datatype)
    assert answer.status == Status.EINVAL


@pytest.mark.parametrize(
    ("key", "value", "group"),
    [
        (b"dcp", b'{"stream_format":"skip","x":1}', b'dcp {"stream_format": "skip"}'),
        (b"dcp", b'{"filter":{"user":"x"}}', b"dcp"),
        (b"dcp", b"[]", b"dcp"),
        (b"vbucket-seqno 3", b'{"stream_format":"skip"}', b"vbucket-seqno 3"),
    ],
)
def test_of_the_value_of_stat_only_the_stream_format_counts(
    node: MemoryNode, monkeypatch: pytest.MonkeyPatch, key: bytes, value: bytes, group: bytes
) -> None:
    asked: list[bytes] = []
    monkeypatch.setattr(node, "stats", lambda group: asked.append(group) or [])
    peer = node.connect()
    peer.hello(Feature.JSON)
    assert peer.ask(Opcode.STAT, key=key, value=value, datatype=1).status == Status.OK
    assert asked == [group]


def test_an_unknown_group_of_statistics_is_enoent(peer: Peer) -> None:
    assert peer.ask(Opcode.STAT, key=b"no-such-group").status == Status.KEY_ENOENT


def test_seqno_statistics_of_a_bad_partition_are_not_my_vbucket(peer: Peer) -> None:
    for group in (b"vbucket-seqno", b"dcp-vbtakeover"):
        assert peer.ask(Opcode.STAT, key=group + b" 5000").status == Status.NOT_MY_VBUCKET


SENT_BY_THE_SERVER_ONLY = {
    Opcode.DCP_CLOSED_TIME,
    Opcode.DCP_PREVIOUS_VALUE,
    Opcode.DCP_SNAPSHOT_END,
    Opcode.X_REPLICA_ENTRIES,
    Opcode.X_REPLICA_GROUP,
}


def test_every_opcode_that_is_not_served_is_unknown_command(node: MemoryNode) -> None:
    served = set(Opcode) - SENT_BY_THE_SERVER_ONLY
    unknown = []
    for opcode in range(256):
        peer = node.connect()
        answers = peer.send(pack_request(opcode, opaque=opcode))
        if answers and answers[0].status == Status.UNKNOWN_COMMAND:
            unknown.append(opcode)
            assert [(a.opcode, a.opaque) for a in answers] == [(opcode, opcode)]
            assert not peer.state.is_closing
    assert set(unknown) == set(range(256)) - served


# -- collections -----------------------------------------------------------------------------------


def test_the_manifest_names_the_default_scope_and_collection(peer: Peer) -> None:
    manifest = json.loads(peer.ask(Opcode.GET_COLLECTIONS_MANIFEST).value)
    assert manifest == {
        "uid": "0",
        "scopes": [
            {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]}
        ],
    }


@pytest.mark.parametrize("where", ["key", "value"])
def test_a_collections_id_is_asked_for_in_the_key_or_the_value(peer: Peer, where: str) -> None:
    answer = peer.ask(Opcode.GET_COLLECTION_ID, **{where: b"_default._default"})
    assert (answer.status, answer.extras) == (Status.OK, bytes(12))
    answer = peer.ask(Opcode.GET_COLLECTION_ID, **{where: b"_default.hotel"})
    assert (answer.status, answer.value) == (Status.UNKNOWN_COLLECTION, b'{"manifest_uid":"0"}')
    answer = peer.ask(Opcode.GET_COLLECTION_ID, **{where: b"inventory.hotel"})
    assert (answer.status, answer.value) == (Status.UNKNOWN_SCOPE, b'{"manifest_uid":"0"}')


@pytest.mark.parametrize("where", ["key", "value"])
def test_a_scopes_id(peer: Peer, where: str) -> None:
    answer = peer.ask(Opcode.GET_SCOPE_ID, **{where: b"_default"})
    assert (answer.status, answer.extras) == (Status.OK, bytes(12))
    assert peer.ask(Opcode.GET_SCOPE_ID, **{where: b"x"}).status == Status.UNKNOWN_SCOPE


# -- partition history -----------------------------------------------------------------------------


def all_seqnos(peer: Peer, extras: bytes = b"") -> list[tuple[int, int]]:
    answer = peer.ask(Opcode.GET_ALL_VB_SEQNOS, extras=extras)
    assert answer.status == Status.OK
    return list(VB_SEQNO.iter_unpack(answer.value))


@pytest.mark.all_partitions
def test_all_vb_seqnos_are_sorted_by_partition(node: MemoryNode, peer: Peer) -> None:
    peer.hello()
    peer.set(1023, b"k", b"v")
    peer.set(VB, b"k", b"v")
    peer.set(VB, b"k", b"v")
    node.commit()
    expected = dict.fromkeys(range(1024), 0) | {VB: 2, 1023: 1}
    assert all_seqnos(peer) == list(expected.items())


@pytest.mark.all_partitions
@pytest.mark.parametrize(
    ("asked", "found"),
    [(0, {1, 2, 3}), (1, {1}), (2, {2}), (3, {3}), (4, {4})],
)
def test_all_vb_seqnos_of_a_state(
    node: MemoryNode, peer: Peer, asked: int, found: set[int]
) -> None:
    for part in node.engine.partitions[4:]:
        part.state = VbState.DEAD
    for vb_id, state in enumerate(list(VbState)[:4]):
        node.engine.partitions[vb_id].state = state
    seqnos = all_seqnos(peer, asked.to_bytes(4, "big"))
    assert {vb_id + 1 for vb_id, _ in seqnos if vb_id < 4} == found
    assert len(seqnos) == len(found) + 1020 * (asked == VbState.DEAD)


@pytest.mark.all_partitions
def test_all_vb_seqnos_take_collection_where_collections_are_on(peer: Peer) -> None:
    extras = b"\0\0\0\1" + bytes(4)
    assert peer.ask(Opcode.GET_ALL_VB_SEQNOS, extras=extras).status == Status.EINVAL
    peer.hello(Feature.COLLECTIONS)
    assert len(all_seqnos(peer, extras)) == 1024
    answer = peer.ask(Opcode.GET_ALL_VB_SEQNOS, extras=b"\0\0\0\1\0\0\0\x08")
    assert answer.status == Status.UNKNOWN_COLLECTION


@pytest.mark.parametrize("extras", [b"\0", bytes(12), b"\0\0\0\5", b"\xff\xff\xff\xff"])
def test_all_vb_seqnos_of_no_state_are_einval(peer: Peer, extras: bytes) -> None:
    assert peer.ask(Opcode.GET_ALL_VB_SEQNOS, extras=extras).status == Status.EINVAL


def test_both_opcodes_answer_the_failover_log_newest_first(node: MemoryNode, peer: Peer) -> None:
    peer.hello()
    for n in range(3):
        peer.set(VB, b"%d" % n, b"v")
    first = node.engine.partitions[VB].vb_uuid
    second = node.engine.keyspace.branch(VB, 2).failover.current.vb_uuid
    node.commit()
    expected = b"".join(FAILOVER_ENTRY.pack(*pair) for pair in ((second, 2), (first, 0)))
    assert peer.ask(Opcode.GET_FAILOVER_LOG, vb_id=VB).value == expected
    peer.send(pack_open(b"name", 1))
    assert peer.ask(Opcode.DCP_GET_FAILOVER_LOG, vb_id=VB).value == expected


@pytest.mark.parametrize(
    "opcode", [Opcode.GET_FAILOVER_LOG, Opcode.DCP_GET_FAILOVER_LOG, Opcode.OBSERVE_SEQNO]
)
def test_the_history_of_an_unknown_partition_is_not_my_vbucket(
    node: MemoryNode, peer: Peer, opcode: int
) -> None:
    peer.hello()
    answer = peer.ask(opcode, vb_id=1024, value=bytes(8 * (opcode == Opcode.OBSERVE_SEQNO)))
    assert (answer.status, answer.value) == (Status.NOT_MY_VBUCKET, node.bucket_config())


def test_what_a_dead_partition_holds_is_not_my_vbucket(node: MemoryNode, peer: Peer) -> None:
    peer.hello()
    part = node.engine.partitions[VB]
    value = part.vb_uuid.to_bytes(8, "big")
    assert peer.ask(Opcode.OBSERVE_SEQNO, vb_id=VB, value=value).status == Status.OK
    part.state = VbState.DEAD
    answer = peer.ask(Opcode.OBSERVE_SEQNO, vb_id=VB, value=value)
    assert (answer.status, answer.value) == (Status.NOT_MY_VBUCKET, node.bucket_config())


@pytest.mark.parametrize("opcode", [Opcode.GET_FAILOVER_LOG, Opcode.DCP_GET_FAILOVER_LOG])
@pytest.mark.parametrize("state", VbState)
def test_the_failover_log_is_kept_whatever_the_state(
    node: MemoryNode, peer: Peer, opcode: int, state: VbState
) -> None:
    peer.hello()
    peer.open()
    part = node.engine.partitions[VB]
    before = peer.ask(opcode, vb_id=VB).value
    part.state = state
    answer = peer.ask(opcode, vb_id=VB)
    assert (answer.status, answer.value) == (Status.OK, before)
    assert parse_failover_log(before)[0][0] == part.vb_uuid


def observe(peer: Peer, vb_uuid: int) -> Frame:
    return peer.ask(Opcode.OBSERVE_SEQNO, vb_id=VB, value=vb_uuid.to_bytes(8, "big"))


def test_observe_seqno_of_the_current_version(node: MemoryNode, peer: Peer) -> None:
    peer.hello()
    peer.set(VB, b"k", b"v")
    node.commit()
    vb_uuid = node.engine.partitions[VB].vb_uuid
    answer = observe(peer, vb_uuid)
    assert len(answer.value) == 27
    assert OBSERVE_CURRENT.unpack(answer.value) == (0, VB, vb_uuid, 1, 1)
    peer.set(VB, b"k", b"uncommitted")
    assert OBSERVE_CURRENT.unpack(observe(peer, vb_uuid).value) == (0, VB, vb_uuid, 1, 1)


def test_observe_seqno_tells_committed_from_persisted(node: MemoryNode, peer: Peer) -> None:
    peer.hello()
    peer.set(VB, b"k", b"v")
    group = node.engine.keyspace.take_group()
    assert group is not None
    node.engine.keyspace.group_synced(group, is_on_disk=False)
    vb_uuid = node.engine.partitions[VB].vb_uuid
    assert OBSERVE_CURRENT.unpack(observe(peer, vb_uuid).value)[3:] == (0, 1)
    node.engine.commits.all_synced()
    assert OBSERVE_CURRENT.unpack(observe(peer, vb_uuid).value)[3:] == (1, 1)


def test_observe_seqno_of_older_version_tells_where_next_began(
    node: MemoryNode, peer: Peer
) -> None:
    peer.hello()
    for n in range(5):
        peer.set(VB, b"%d" % n, b"v")
    oldest = node.engine.partitions[VB].vb_uuid
    older = node.engine.keyspace.branch(VB, 4).failover.current.vb_uuid
    current = node.engine.keyspace.branch(VB, 3).failover.current.vb_uuid
    peer.set(VB, b"k", b"v")
    node.commit()
    answer = observe(peer, oldest)
    assert len(answer.value) == 43
    assert OBSERVE_OLD.unpack(answer.value) == (1, VB, current, 4, 4, oldest, 3)
    assert observe(peer, older).status == Status.KEY_ENOENT


@pytest.mark.parametrize("length", [0, 4, 9])
def test_observe_seqno_names_a_version_of_eight_bytes(peer: Peer, length: int) -> None:
    answer = peer.ask(Opcode.OBSERVE_SEQNO, vb_id=VB, value=bytes(length))
    assert answer.status == Status.EINVAL
