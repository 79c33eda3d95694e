"""X_READ_HASHES: a client compares a partition with its copy, and reads what differs only."""

from __future__ import annotations

from struct import Struct

import pytest

from dcp.session.access.rights import EVERYTHING, FULL_RIGHTS, Rights, Role, Scope
from dcp.session.kv.hash_reads import LISTED_BYTES_MAX
from dcp.wire.frame import Frame
from dcp.wire.hash_reads import (
    ASKED,
    BUCKET,
    SEQNO,
    KeyVersion,
    What,
    buckets_in,
    documents_in,
    pack_buckets,
    told,
    versions_in,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.engine.lifecycle import set_state
from vbucket.engine.partition import VbState
from vbucket.model.ids import vbucket_of
from vbucket.native.key_hashes import KeyHashes, RowForm, hash_of_key

NODE_PARTITIONS = MemoryNode().partitions
KEYS = [
    key for key in (b"k%d" % number for number in range(NODE_PARTITIONS * 400))
    if vbucket_of(key, NODE_PARTITIONS) == 0
]  # fmt: skip
ROW = Struct(">QQ")


@pytest.fixture
def node() -> MemoryNode:
    node = MemoryNode()
    peer = node.connect()
    for key in KEYS[:200]:
        peer.set(0, key, b"of " + key)
    node.merge()
    for key in KEYS[:3]:
        peer.delete(0, key)
    peer.set(0, KEYS[3], b"changed")
    node.commit()
    return node


def asked(
    peer: Peer, what: int, *, bits: int = 0, collection: int = 0, **parts: int | bytes
) -> Frame:
    extras = ASKED.pack(what, bits, collection)
    return peer.ask(Opcode.X_READ_HASHES, **({"vb_id": 0} | parts), extras=extras)


def all_versions(peer: Peer) -> list[KeyVersion]:
    return versions_in(asked(peer, What.KEYS, value=BUCKET.pack(0)).value)


def test_hashes_are_those_of_the_documents(node: MemoryNode) -> None:
    peer = node.connect()
    versions = all_versions(peer)
    assert [version.key for version in versions] == sorted(KEYS[3:200])
    mine = KeyHashes(8)
    rows = [(v.key, ROW.pack(v.cas, v.rev_seqno)) for v in versions]
    mine.change([], rows, RowForm(0, b"", 0, 8))
    for bits in (0, 1, 2, 8):
        answer = asked(peer, What.HASHES, bits=bits)
        facts = told(answer)
        assert facts.bits == min(bits, 4), "a table of 197 documents has 16 buckets"
        assert answer.value == mine.at(facts.bits)
        assert (facts.documents, facts.seqno) == (197, 204)
        assert facts.vb_uuid == node.engine.partitions[0].vb_uuid


def test_keys_of_some_buckets_are_listed(node: MemoryNode) -> None:
    peer = node.connect()
    for bits, buckets in ((2, [0, 3]), (4, [5]), (12, [hash_of_key(KEYS[3]) >> 52])):
        value = b"".join(map(BUCKET.pack, buckets))
        found = versions_in(asked(peer, What.KEYS, bits=bits, value=value).value)
        assert found == [
            version for version in all_versions(peer)
            if hash_of_key(version.key) >> 64 - bits in buckets
        ]  # fmt: skip
        assert found


def test_a_long_list_goes_on_where_it_ended(
    node: MemoryNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dcp.session.kv.hash_reads.LISTED_BYTES_MAX", 2000)
    peer = node.connect()
    found: list[KeyVersion] = []
    more = 1
    while more:
        first = found[-1].key + b"\0" if found else b""
        answer = asked(peer, What.KEYS, key=first, value=BUCKET.pack(0))
        found += versions_in(answer.value)
        assert len(answer.value) < 2500
        more = told(answer).has_more
    assert [version.key for version in found] == sorted(KEYS[3:200])


@pytest.mark.parametrize(("asked_bits", "bits"), [(2, 2), (4, 4), (9, 4)])
def test_what_differs_from_a_copy_is_listed(node: MemoryNode, asked_bits: int, bits: int) -> None:
    peer = node.connect()
    versions = all_versions(peer)
    stale = [version._replace(cas=1) if version.key == KEYS[7] else version for version in versions]
    for copy, changed in ((versions, []), (stale, [KEYS[7]]), (versions[1:], [versions[0].key])):
        mine = KeyHashes(asked_bits)
        rows = [(v.key, ROW.pack(v.cas, v.rev_seqno)) for v in copy]
        mine.change([], rows, RowForm(0, b"", 0, 8))
        answer = asked(peer, What.DIFFERING, bits=asked_bits, value=bytes(mine.sums))
        facts = told(answer)
        assert (facts.bits, facts.seqno, facts.has_more) == (bits, 204, 0)
        buckets, keys = buckets_in(answer.value, bits, asked_bits)
        wanted = {hash_of_key(key) >> 64 - bits for key in changed}
        assert buckets == bytes(at in wanted for at in range(1 << bits))
        assert versions_in(keys) == [
            version for version in versions if hash_of_key(version.key) >> 64 - bits in wanted
        ]
        assert facts.documents == len(versions_in(keys))


def test_the_buckets_of_an_answer_are_checked() -> None:
    assert buckets_in(b"\0\0keys", 3, 4) == (bytes(8), b"keys")
    assert buckets_in(pack_buckets(b"\0\1\0\1") + b"keys", 2, 2) == (b"\0\1\0\1", b"keys")
    for value in (b"", b"\0", b"\0\1", b"\0\2\0\0"):
        with pytest.raises(ValueError, match="cut short"):
            buckets_in(value, 3, 3)
    with pytest.raises(ValueError, match="there is no bucket 8 of 8"):
        buckets_in(b"\0\1\0\x08", 3, 3)
    with pytest.raises(ValueError, match="200 bits, where 3 were asked for"):
        buckets_in(b"\0\0", 200, 3)
    with pytest.raises(ValueError, match="200 bits, above 12"):
        KeyHashes(200, 1, b"")


def test_long_work_takes_turns_and_gives_the_same(
    node: MemoryNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = node.connect()
    for key in KEYS[150:280]:
        peer.set(0, key, b"not merged")
    node.commit()
    seqnos = b"".join(map(SEQNO.pack, range(1, 400)))

    def answers() -> list[Frame]:
        return [
            asked(peer, What.HASHES, bits=4), asked(peer, What.KEYS, value=BUCKET.pack(0)),
            asked(peer, What.DOCUMENTS, value=seqnos),
            asked(peer, What.DIFFERING, bits=2, value=bytes(32)),
        ]  # fmt: skip

    monkeypatch.setattr("dcp.session.kv.hash_reads.STEP_SEQNOS", 10_000)
    wanted = answers()
    monkeypatch.setattr("dcp.session.kv.hash_reads.STEP_SEQNOS", 10)
    monkeypatch.setattr("vbucket.engine.hashes.STEP_KEYS", 10)
    for module in ("engine.hashes", "store.hashes", "store.store"):
        monkeypatch.setattr(f"vbucket.{module}.ROWS_AT_ONCE", 20)
    entered: list[object] = []
    enter = peer.state.shared.long_queue.enter
    monkeypatch.setattr(
        peer.state.shared.long_queue, "enter", lambda *args: (entered.append(args), enter(*args))
    )
    found = answers()
    assert len(entered) == 4
    assert [each.value for each in found] == [each.value for each in wanted]
    assert len(versions_in(found[1].value)) == 277
    assert found[3].value == pack_buckets(b"\1\1\1\1") + found[1].value


def test_documents_come_by_their_seqnos(node: MemoryNode) -> None:
    peer = node.connect()
    versions = {version.key: version for version in all_versions(peer)}
    wanted = [versions[KEYS[3]].seqno, versions[KEYS[100]].seqno, 1, 201, 999]
    answer = asked(peer, What.DOCUMENTS, value=b"".join(map(SEQNO.pack, wanted)))
    found = documents_in(answer.value)
    assert [document.version for document in found[:2]] == [versions[KEYS[3]], versions[KEYS[100]]]
    assert [document.value for document in found] == [
        b"changed", b"of " + KEYS[100], b"of " + KEYS[0]
    ], "deletions and unknown seqnos are left out"  # fmt: skip
    assert not told(answer).has_more


def test_documents_are_bounded(node: MemoryNode) -> None:
    peer = node.connect()
    for key in KEYS[300:304]:
        peer.set(0, key, bytes(LISTED_BYTES_MAX // 2))
    node.commit()
    value = b"".join(SEQNO.pack(seqno) for seqno in range(205, 209))
    answer = asked(peer, What.DOCUMENTS, value=value)
    assert [each.version.seqno for each in documents_in(answer.value)] == [205, 206]
    assert told(answer).has_more


def test_an_answer_waits_until_what_it_tells_is_committed(node: MemoryNode) -> None:
    peer = node.connect()
    node.connect().set(0, KEYS[250], b"v")
    assert told(asked(peer, What.HASHES)).seqno == 205
    assert peer.must_wait
    node.commit()
    assert not peer.must_wait


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ({"what": 4}, Status.EINVAL),
        ({"what": 3}, Status.EINVAL),
        ({"what": 3, "bits": 2, "value": bytes(16)}, Status.EINVAL),
        ({"what": 3, "bits": 0, "value": bytes(8), "key": b"k"}, Status.EINVAL),
        ({"what": 0, "bits": 13}, Status.EINVAL),
        ({"what": 0, "value": b"x"}, Status.EINVAL),
        ({"what": 1}, Status.EINVAL),
        ({"what": 1, "bits": 2, "value": BUCKET.pack(4)}, Status.EINVAL),
        ({"what": 1, "value": b"x"}, Status.EINVAL),
        ({"what": 2, "value": bytes(8 * 4097)}, Status.EINVAL),
        ({"what": 0, "collection": 99}, Status.UNKNOWN_COLLECTION),
        ({"what": 0, "vb_id": 5000}, Status.NOT_MY_VBUCKET),
    ],
)
def test_what_cannot_be_read_is_refused(
    node: MemoryNode, parts: dict[str, int | bytes], status: int
) -> None:
    peer = node.connect()
    assert asked(peer, **parts).status == status  # type: ignore[arg-type]


def test_only_an_active_partition_answers(node: MemoryNode) -> None:
    set_state(node.engine, 0, VbState.REPLICA)
    node.commit()
    assert asked(node.connect(), What.HASHES).status == Status.NOT_MY_VBUCKET


def test_it_takes_the_rights_of_a_stream(node: MemoryNode) -> None:
    """Every key can be read this way, so a user who may read some only may not do it."""
    peer = node.connect()
    for rights, status in (
        (FULL_RIGHTS, Status.OK),
        (Rights({Role.STREAM: (EVERYTHING,)}), Status.OK),
        (Rights({Role.READ: (EVERYTHING,), Role.WRITE: (EVERYTHING,)}), Status.EACCESS),
        (Rights({Role.STREAM: (EVERYTHING,), Role.READ: (Scope(b"k"),)}), Status.EACCESS),
    ):
        peer.state.login.rights = rights
        assert asked(peer, What.HASHES).status == status


@pytest.mark.parametrize("cut", [1, 3, 20, 40])
def test_an_answer_that_is_cut_short_is_refused(node: MemoryNode, cut: int) -> None:
    peer = node.connect()
    answer = asked(peer, What.DOCUMENTS, value=SEQNO.pack(200))
    assert len(documents_in(answer.value)) == 1
    with pytest.raises(ValueError, match="cut short"):
        documents_in(answer.value[:-1] if cut == 1 else answer.value[:cut])
