"""Sub-document commands over the bytes of real sessions."""

from __future__ import annotations

import json
import struct

import pytest

from dcp.session.access.rights import Rights, Role, Scope
from dcp.session.node_facts import Limits
from dcp.wire.feature import Feature
from dcp.wire.frame import HEADER, pack_request
from dcp.wire.message import MUTATION_TOKEN
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import START_NS, MemoryNode, Peer, node_for
from support.subdoc_client import (
    ADD,
    MKDIR_P,
    MKDOC,
    XATTR,
    aware_peer,
    body,
    look_up,
    lookup_value,
    mutate,
    mutation_results,
    mutation_value,
    packed_mutation,
    results,
    single,
)
from vbucket.engine.partition import VbState

VB = 5
KEY = b"k"
START_S = START_NS // 1_000_000_000
DOCUMENT = b'{"a":1,"b":{"c":[1,2.50,3]},"s":"text"}'
GET, EXISTS, COUNT = Opcode.SUBDOC_GET, Opcode.SUBDOC_EXISTS, Opcode.SUBDOC_GET_COUNT
UPSERT, COUNTER = Opcode.SUBDOC_DICT_UPSERT, Opcode.SUBDOC_COUNTER


@pytest.fixture
def node(request: pytest.FixtureRequest) -> MemoryNode:
    return node_for(request)


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    peer = aware_peer(node)
    peer.set(VB, KEY, DOCUMENT)
    return peer


def test_single_look_ups(peer: Peer) -> None:
    answer = single(peer, GET, KEY, b"b.c[1]")
    assert (answer.status, answer.value, answer.datatype) == (0, b"2.50", 1)
    assert answer.cas == peer.ask(Opcode.GET, vb_id=VB, key=KEY).cas
    assert single(peer, EXISTS, KEY, b"b.c").status == Status.OK
    assert single(peer, COUNT, KEY, b"b.c").value == b"3"
    assert single(peer, COUNT, KEY, b"").value == b"3"
    assert single(peer, GET, KEY, b"zz").status == Status.SUBDOC_PATH_ENOENT
    assert single(peer, GET, KEY, b"a.b").status == Status.SUBDOC_PATH_MISMATCH
    assert single(peer, GET, KEY, b"a..b").status == Status.SUBDOC_PATH_EINVAL
    assert single(peer, GET, b"none", b"a").status == Status.KEY_ENOENT
    assert single(peer, GET, KEY, b"a", cas=7).status == Status.KEY_EEXISTS


def test_a_multi_look_up_answers_each(peer: Peer) -> None:
    status, found = look_up(
        peer, KEY, (GET, 0, b"a"), (EXISTS, 0, b"b.c[9]"), (COUNT, 0, b"b"), (GET, 0, b"s.x"),
        (Opcode.GET, 0, b""),
    )  # fmt: skip
    assert status == Status.SUBDOC_MULTI_PATH_FAILURE
    assert found == [
        (0, b"1"), (Status.SUBDOC_PATH_ENOENT, b""), (0, b"1"),
        (Status.SUBDOC_PATH_MISMATCH, b""), (0, DOCUMENT),
    ]  # fmt: skip
    assert look_up(peer, KEY, (GET, 0, b"a")) == (0, [(0, b"1")])
    assert look_up(peer, b"none", (GET, 0, b"a")) == (Status.KEY_ENOENT, [])


CHANGES = [
    (Opcode.SUBDOC_DICT_ADD, b"b.n", b"5", b'{"a":1,"b":{"c":[1,2.50,3],"n":5},"s":"text"}'),
    (Opcode.SUBDOC_DICT_UPSERT, b"a", b"2", b'{"a":2,"b":{"c":[1,2.50,3]},"s":"text"}'),
    (Opcode.SUBDOC_DELETE, b"b.c[0]", b"", b'{"a":1,"b":{"c":[2.50,3]},"s":"text"}'),
    (Opcode.SUBDOC_REPLACE, b"b.c[1]", b"{}", b'{"a":1,"b":{"c":[1,{},3]},"s":"text"}'),
    (Opcode.SUBDOC_ARRAY_PUSH_LAST, b"b.c", b"4,5", b'{"a":1,"b":{"c":[1,2.50,3,4,5]},"s":"text"}'),
    (Opcode.SUBDOC_ARRAY_PUSH_FIRST, b"b.c", b"0", b'{"a":1,"b":{"c":[0,1,2.50,3]},"s":"text"}'),
    (Opcode.SUBDOC_ARRAY_INSERT, b"b.c[1]", b"9", b'{"a":1,"b":{"c":[1,9,2.50,3]},"s":"text"}'),
    (Opcode.SUBDOC_ARRAY_ADD_UNIQUE, b"b.c", b"7", b'{"a":1,"b":{"c":[1,2.50,3,7]},"s":"text"}'),
    (Opcode.SUBDOC_COUNTER, b"a", b"-11", b'{"a":-10,"b":{"c":[1,2.50,3]},"s":"text"}'),
]  # fmt: skip


@pytest.mark.parametrize(("opcode", "path", "value", "wanted"), CHANGES)
def test_single_changes(peer: Peer, opcode: int, path: bytes, value: bytes, wanted: bytes) -> None:
    before = peer.ask(Opcode.GET, vb_id=VB, key=KEY)
    answer = single(peer, opcode, KEY, path, value, cas=before.cas)
    assert answer.status == Status.OK
    assert answer.cas > before.cas
    part = peer.node.engine.partitions[VB]
    assert (
        MUTATION_TOKEN.unpack(answer.extras) == (part.vb_uuid, 2) == (part.vb_uuid, part.high_seqno)
    )
    assert answer.value == (b"-10" if opcode == COUNTER else b"")
    after = peer.ask(Opcode.GET, vb_id=VB, key=KEY)
    assert (after.value, after.cas, after.datatype) == (wanted, answer.cas, 1)
    assert single(peer, opcode, KEY, path, value, cas=before.cas).status == Status.KEY_EEXISTS
    assert single(peer, opcode, b"none", path, value).status == Status.KEY_ENOENT


@pytest.mark.parametrize("opcode", [row[0] for row in CHANGES])
def test_single_and_multi_changes_do_the_same(peer: Peer, opcode: int) -> None:
    path, value, wanted = next(row[1:] for row in CHANGES if row[0] == opcode)
    answer = mutate(peer, KEY, (opcode, 0, path, value))
    assert answer.status == Status.OK
    assert body(peer, KEY) == wanted
    counted = [(0, 0, b"-10")] if opcode == COUNTER else []
    assert mutation_results(answer.value) == counted


def test_a_multi_mutation_is_one_change(peer: Peer) -> None:
    answer = mutate(
        peer, KEY, (UPSERT, MKDIR_P, b"x.y", b"[]"), (COUNTER, 0, b"n", b"5"),
        (Opcode.SUBDOC_ARRAY_PUSH_LAST, 0, b"x.y", b"1"), (COUNTER, 0, b"n", b"2"),
        (Opcode.SUBDOC_DELETE, 0, b"b"),
    )  # fmt: skip
    assert answer.status == Status.OK
    assert mutation_results(answer.value) == [(1, 0, b"5"), (3, 0, b"7")]
    assert body(peer, KEY) == b'{"a":1,"s":"text","x":{"y":[1]},"n":7}'
    part = peer.node.engine.partitions[VB]
    assert MUTATION_TOKEN.unpack(answer.extras) == (part.vb_uuid, 2)
    assert part.high_seqno == 2


def test_if_one_operation_fails_nothing_is_changed(peer: Peer) -> None:
    answer = mutate(
        peer, KEY, (UPSERT, 0, b"a", b"9"), (Opcode.SUBDOC_DICT_ADD, 0, b"s", b"1"),
        (UPSERT, 0, b"s", b"1"),
    )  # fmt: skip
    assert answer.status == Status.SUBDOC_MULTI_PATH_FAILURE
    assert answer.value == struct.pack(">BH", 1, Status.SUBDOC_PATH_EEXISTS)
    assert answer.extras == b""
    assert body(peer, KEY) == DOCUMENT
    assert peer.node.engine.partitions[VB].high_seqno == 1


def test_documents_are_created_when_asked_for(peer: Peer) -> None:
    assert mutate(peer, b"new", (UPSERT, 0, b"a.b", b"1"), doc_flags=MKDOC).status == Status.OK
    assert body(peer, b"new") == b'{"a":{"b":1}}'
    again = mutate(peer, b"new", (UPSERT, 0, b"a.c", b"2"), doc_flags=ADD)
    assert again.status == Status.KEY_EEXISTS
    assert mutate(peer, b"new", (UPSERT, 0, b"a.c", b"2"), doc_flags=MKDOC).status == Status.OK
    assert body(peer, b"new") == b'{"a":{"b":1,"c":2}}'
    push = (Opcode.SUBDOC_ARRAY_PUSH_LAST, 0, b"", b"1")
    assert mutate(peer, b"list", push, doc_flags=ADD).status == Status.OK
    assert body(peer, b"list") == b"[1]"
    assert single(peer, UPSERT, b"one", b"a", b"1", doc_flags=MKDOC).status == Status.OK
    failed = mutate(peer, b"bad", (Opcode.SUBDOC_DICT_ADD, 0, b"a[0].b", b"1"), doc_flags=MKDOC)
    assert failed.status == Status.SUBDOC_MULTI_PATH_FAILURE
    assert single(peer, GET, b"bad", b"a").status == Status.KEY_ENOENT
    only = mutate(peer, b"only", (UPSERT, XATTR, b"x", b"1"), doc_flags=MKDOC)
    assert only.status == Status.OK
    assert body(peer, b"only") == b"{}"


def test_the_whole_body_in_a_multi_request(peer: Peer) -> None:
    answer = mutate(peer, KEY, (UPSERT, XATTR, b"x", b"1"), (Opcode.SET, 0, b"", b'{"new":1.0}'))
    assert answer.status == Status.OK
    found = peer.ask(Opcode.GET, vb_id=VB, key=KEY)
    assert (found.value, found.datatype) == (b'{"new":1.0}', 1)
    mutate(peer, KEY, (Opcode.SET, 0, b"", b"\x00binary"))
    found = peer.ask(Opcode.GET, vb_id=VB, key=KEY)
    assert (found.value, found.datatype) == (b"\x00binary", 0)
    assert single(peer, GET, KEY, b"a").status == Status.SUBDOC_DOC_NOTJSON
    assert mutate(peer, KEY, (Opcode.DELETE, 0, b"")).status == Status.OK
    assert peer.ask(Opcode.GET, vb_id=VB, key=KEY).status == Status.KEY_ENOENT
    made = mutate(peer, b"made", (Opcode.SET, 0, b"", b"plain"), doc_flags=ADD)
    assert made.status == Status.OK
    assert body(peer, b"made") == b"plain"


def test_expiry(node: MemoryNode, peer: Peer) -> None:
    single(peer, UPSERT, KEY, b"a", b"5", expiry=100)
    document = single(peer, GET, KEY, b"$document.exptime", flags=XATTR)
    assert int(document.value) == START_S + 100
    mutate(peer, KEY, (UPSERT, 0, b"a", b"6"), expiry=START_S + 500)
    assert single(peer, GET, KEY, b"$document.exptime", flags=XATTR).value == b"%d" % (
        START_S + 500
    )
    mutate(peer, KEY, (UPSERT, 0, b"a", b"7"))
    assert single(peer, GET, KEY, b"$document.exptime", flags=XATTR).value == b"0"
    single(peer, UPSERT, KEY, b"a", b"8", expiry=10)
    node.now_ns += 11 * 10**9
    assert look_up(peer, KEY, (GET, 0, b"a"))[0] == Status.KEY_ENOENT
    assert single(peer, UPSERT, KEY, b"a", b"1").status == Status.KEY_ENOENT


def test_expiry_is_kept_when_a_frame_info_asks_for_it(node: MemoryNode) -> None:
    peer = aware_peer(node, Feature.PRESERVE_TTL, Feature.ALT_REQUEST)
    peer.ask(Opcode.SET, vb_id=VB, key=KEY, value=DOCUMENT, extras=struct.pack(">II", 0, 50))
    specs = mutation_value((UPSERT, 0, b"a", b"5"))
    packed = pack_request(Opcode.SUBDOC_MULTI_MUTATION, vb_id=VB, key=KEY, value=specs)
    head = list(HEADER.unpack_from(packed))
    head[0], head[2], head[6] = 0x08, 1 << 8 | len(KEY), head[6] + 1
    (answer,) = peer.send(HEADER.pack(*head) + b"\x50" + packed[24:])
    assert answer.status == Status.OK
    assert single(peer, GET, KEY, b"$document.exptime", flags=XATTR).value == b"%d" % (START_S + 50)
    assert single(peer, GET, KEY, b"a").value == b"5"


UNSOUND = {
    "no extras": (GET, b"", b"a", Status.EINVAL),
    "path longer than the body": (GET, b"\0\x09\0", b"a", Status.EINVAL),
    "no path": (GET, b"\0\0\0", b"", Status.EINVAL),
    "a look-up with a value": (GET, b"\0\1\0", b"abc", Status.EINVAL),
    "a look-up with a mutation's flag": (GET, b"\0\1\1", b"a", Status.EINVAL),
    "unknown document flag": (GET, b"\0\1\0\x80", b"a", Status.EINVAL),
    "an upsert without a value": (UPSERT, b"\0\1\0", b"a", Status.EINVAL),
    "macro without XATTR": (UPSERT, b"\0\1\x10", b"a1", Status.SUBDOC_XATTR_INVALID_FLAG_COMBO),
    "add and mkdoc": (UPSERT, b"\0\1\0\3", b"a1", Status.EINVAL),
    "create as deleted alone": (UPSERT, b"\0\1\4\x08", b"a1", Status.EINVAL),
    "create as deleted with a body": (UPSERT, b"\0\1\0\x09", b"a1", Status.EINVAL),
    "revive alone": (UPSERT, b"\0\1\0\x10", b"a1", Status.EINVAL),
    "replace with mkdoc": (Opcode.SUBDOC_REPLACE, b"\0\1\0\1", b"a1", Status.EINVAL),
    "5 bytes of extras": (UPSERT, b"\0\1\0\0\0", b"a1", Status.EINVAL),
    "a long path": (GET, b"\x04\x01\0", b"a" * 1025, Status.EINVAL),
    "a body moved without XATTR": (
        Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR, b"\0\1\0", b"a", Status.EINVAL,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("opcode", "extras", "value", "status"), UNSOUND.values(), ids=UNSOUND)
def test_requests_that_are_not_sound(
    peer: Peer, opcode: int, extras: bytes, value: bytes, status: Status
) -> None:
    answer = peer.ask(opcode, vb_id=VB, key=KEY, extras=extras, value=value)
    assert answer.status == status
    assert json.loads(answer.value)["error"]["context"]
    assert body(peer, KEY) == DOCUMENT


UNSOUND_LISTS = {
    "nothing": (b"", Status.SUBDOC_INVALID_COMBO),
    "cut short": (b"\xc5\0\0", Status.EINVAL),
    "path longer": (b"\xc5\0\0\x05ab", Status.EINVAL),
    "a mutation": (b"\xc8\0\0\1a", Status.SUBDOC_INVALID_COMBO),
    "17 paths": (lookup_value(*[(GET, 0, b"a")] * 17), Status.SUBDOC_INVALID_COMBO),
    "XATTRs last": (
        lookup_value((GET, 0, b"a"), (GET, XATTR, b"x")), Status.SUBDOC_INVALID_XATTR_ORDER,
    ),
    "a path of the whole body": (lookup_value((Opcode.GET, 0, b"a")), Status.EINVAL),
}  # fmt: skip


@pytest.mark.parametrize(("value", "status"), UNSOUND_LISTS.values(), ids=UNSOUND_LISTS)
def test_lists_of_look_ups_that_are_not_sound(peer: Peer, value: bytes, status: Status) -> None:
    answer = peer.ask(Opcode.SUBDOC_MULTI_LOOKUP, vb_id=VB, key=KEY, value=value)
    assert answer.status == status


def test_lists_of_mutations_that_are_not_sound(peer: Peer) -> None:
    sixteen = [(UPSERT, 0, b"p%d" % number, b"1") for number in range(16)]
    assert mutate(peer, KEY, *sixteen).status == Status.OK
    assert mutate(peer, KEY, *sixteen, sixteen[0]).status == Status.SUBDOC_INVALID_COMBO
    two = mutate(peer, KEY, (UPSERT, 0, b"a", b"1"), (Opcode.DELETE, 0, b""))
    assert two.status == Status.SUBDOC_INVALID_COMBO
    two = mutate(peer, KEY, (Opcode.DELETE, 0, b""), (UPSERT, 0, b"a", b"1"))
    assert two.status == Status.SUBDOC_INVALID_COMBO
    assert mutate(peer, KEY, (GET, 0, b"a")).status == Status.SUBDOC_INVALID_COMBO
    assert mutate(peer, KEY, sixteen[0], doc_flags=ADD, cas=5).status == Status.EINVAL
    cut = peer.ask(Opcode.SUBDOC_MULTI_MUTATION, vb_id=VB, key=KEY, value=b"\xc8\0\0\1\0\0\0\x09a1")
    assert cut.status == Status.EINVAL


def test_a_document_does_not_outgrow_the_limit(node: MemoryNode) -> None:
    peer = node.connect(limits=Limits(value_bytes_max=100))
    peer.hello(Feature.XATTR)
    peer.set(VB, KEY, b'{"a":1}')
    for specs in ([(UPSERT, 0, b"b", b'"' + b"x" * 90 + b'"')], [(UPSERT, XATTR, b"x", b"1" * 95)]):
        assert mutate(peer, KEY, *specs).status == Status.E2BIG
    assert body(peer, KEY) == b'{"a":1}'


def test_what_an_answer_tells_is_committed_first(node: MemoryNode, peer: Peer) -> None:
    assert peer.must_wait
    node.commit()
    assert single(peer, GET, KEY, b"a").status == Status.OK
    assert not peer.must_wait
    single(peer, UPSERT, KEY, b"a", b"2")
    assert peer.must_wait
    node.commit()
    other = aware_peer(node)
    single(peer, UPSERT, KEY, b"a", b"3")
    assert single(other, GET, KEY, b"zz").status == Status.SUBDOC_PATH_ENOENT
    assert other.must_wait
    third = aware_peer(node)
    assert mutate(third, KEY, (Opcode.SUBDOC_DICT_ADD, 0, b"a", b"1")).status == 0xCC
    assert third.must_wait


def test_partitions_elsewhere_and_busy_ones(node: MemoryNode, peer: Peer) -> None:
    assert single(peer, GET, KEY, b"a", vb_id=999).status == Status.NOT_MY_VBUCKET
    node.engine.refuse_writes("the disk is full")
    assert single(peer, UPSERT, KEY, b"a", b"1").status == Status.ETMPFAIL
    assert single(peer, GET, KEY, b"a").status == Status.OK
    node.engine.refuse_writes("")
    node.engine.partitions[VB].state = VbState.REPLICA
    assert single(peer, GET, KEY, b"a").status == Status.NOT_MY_VBUCKET
    assert single(peer, UPSERT, KEY, b"a", b"1").status == Status.NOT_MY_VBUCKET
    assert look_up(peer, KEY, (GET, 0, b"a"))[0] == Status.NOT_MY_VBUCKET


def test_roles(node: MemoryNode) -> None:
    peer = aware_peer(node)
    peer.set(VB, b"a1", DOCUMENT)
    for role in (Role.READ, Role.WRITE):
        peer.state.login.rights = Rights({role: (Scope(),)})
        can_read = Status.OK if role is Role.READ else Status.EACCESS
        assert single(peer, GET, b"a1", b"a").status == can_read
        assert single(peer, UPSERT, b"a1", b"a", b"1").status == Status.EACCESS
    peer.state.login.rights = Rights(dict.fromkeys((Role.READ, Role.WRITE), (Scope(b"a"),)))
    assert single(peer, UPSERT, b"a1", b"a", b"1").status == Status.OK
    assert look_up(peer, b"a1", (GET, 0, b"a"))[0] == Status.OK
    assert single(peer, GET, b"b1", b"a").status == Status.EACCESS


BATCH = [
    (b"a", b"10"), (b"b.c", b"[]"), (b"s", b'"\xc3\xa9"'), (b"new", b"1"), (b"b", b'{"x":{}}'),
    (b"a.b", b"1"), (b"a", b"tru"), (b"b.c[0]", b"1"), (b"a", b"10"), (b"s", b"[" * 40 + b"]" * 40),
    (b"`s`", b"2"), (b"b", b'{"c":[[1.0], {"x":2}, 3]}'), (b"b.c[0]", b"5"), (b"b.c[1].x", b"7"),
    (b"b.c[-1]", b"4"), (b"b.c[1].y", b"1"), (b"b.c[9].x", b"1"), (b"b.c[0][0]", b"2"),
    (b"..", b"2"), (b"a", b"-1.50"),
]  # fmt: skip


def test_requests_of_one_read_are_answered_as_single_ones_are(node: MemoryNode) -> None:
    """The loops for the usual requests answer what the handlers answer."""
    alone, batched = (aware_peer(node, Feature.COLLECTIONS) for _ in range(2))
    # The loops take those that follow another one of the same kind.
    kinds = (GET, GET, UPSERT, UPSERT, Opcode.SUBDOC_REPLACE)
    keys = {alone: b"\0alone", batched: b"\0batch"}
    for peer, key in keys.items():
        peer.set(VB, key, b'{"b":{"c":{}},"a":1,"s":"\\u0061"}')
    asked = [(kind, *each) for each in BATCH * 3 for kind in kinds]

    def request(peer: Peer, kind: int, path: bytes, value: bytes) -> bytes:
        if kind == GET:
            specs = lookup_value((GET, 0, path))
            return pack_request(Opcode.SUBDOC_MULTI_LOOKUP, vb_id=VB, key=keys[peer], value=specs)
        return packed_mutation(keys[peer], (kind, 0, path, value), vb_id=VB)

    one_by_one = [
        peer_answer for each in asked for peer_answer in alone.send(request(alone, *each))
    ]
    together = batched.send(b"".join(request(batched, *each) for each in asked))
    assert [(each.status, each.value) for each in together] == [
        (each.status, each.value) for each in one_by_one
    ]
    assert body(batched, keys[batched]) == body(alone, keys[alone])
    assert {0, Status.SUBDOC_MULTI_PATH_FAILURE} <= {each.status for each in together}


@pytest.mark.parametrize("is_merged", [False, True])
def test_runs_of_plain_requests(node: MemoryNode, is_merged: bool) -> None:
    peer = aware_peer(node, Feature.COLLECTIONS)
    for number in range(20):
        peer.set(VB, b"\0k%d" % number, b'{"n":%d,"m":{"x":1.50}}' % number)
    if is_merged:
        node.commit()
        node.merge()
    specs = lookup_value((GET, 0, b"m.x"))
    packed = [
        pack_request(Opcode.SUBDOC_MULTI_LOOKUP, vb_id=VB, key=b"\0k%d" % number, value=specs)
        for number in range(20)
    ]
    packed.insert(10, pack_request(Opcode.SUBDOC_MULTI_LOOKUP, vb_id=VB, key=b"\0no", value=specs))
    answers = peer.send(b"".join(packed))
    assert [results(each.value) for each in answers if not each.status] == [[(0, b"1.50")]] * 20
    assert answers[10].status == Status.KEY_ENOENT
    changes = b"".join(
        packed_mutation(b"\0k%d" % number, (UPSERT, 0, b"n", b"%d" % (number * 7)), opaque=number)
        for number in range(20)
    )
    answers = peer.send(changes)
    assert [each.opaque for each in answers] == list(range(20))
    tokens = [MUTATION_TOKEN.unpack(each.extras)[1] for each in answers]
    assert tokens == list(range(21, 41))
    assert peer.must_wait
    node.commit()
    fresh = aware_peer(node, Feature.COLLECTIONS)
    fresh.send(packed_mutation(b"k", (UPSERT, 0, b"n", b"1")) + changes)
    assert fresh.must_wait, "the first one was refused, the others were stored"
    assert body(peer, b"\0k9") == b'{"n":63,"m":{"x":1.50}}'
