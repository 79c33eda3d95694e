"""Document commands over the bytes of real sessions; each test is a sentence of the protocol."""

from __future__ import annotations

import struct

import pytest

from dcp.session.node_facts import Limits
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, FrameDecoder, pack_request
from dcp.wire.message import MUTATION_TOKEN, parse_deletion, parse_mutation
from dcp.wire.opcode import QUIET_FORMS, Opcode
from dcp.wire.status import Status
from support.memory_node import START_NS, MemoryNode, Peer, node_for
from vbucket.engine.lifecycle import set_state
from vbucket.engine.partition import VbState
from vbucket.model.ids import vbucket_of

VB = 7
START_S = START_NS // 1_000_000_000
STORES = (Opcode.SET, Opcode.ADD, Opcode.REPLACE)
REMOVALS = {Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION}
QUIET_OF = {loud: quiet for quiet, loud in QUIET_FORMS.items()}


@pytest.fixture
def node(request: pytest.FixtureRequest) -> MemoryNode:
    return node_for(request)


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    """A connection that names its partitions and has neither tokens nor collections."""
    peer = node.connect()
    peer.hello()
    return peer


def store(
    peer: Peer,
    opcode: int = Opcode.SET,
    key: bytes = b"k",
    value: bytes = b"v",
    *,
    flags: int = 0,
    expiry: int = 0,
    cas: int = 0,
    vb_id: int = VB,
) -> Frame:
    extras = struct.pack(">II", flags, expiry)
    return peer.ask(opcode, vb_id=vb_id, key=key, value=value, extras=extras, cas=cas)


def get(peer: Peer, key: bytes = b"k", vb_id: int = VB) -> Frame:
    return peer.ask(Opcode.GET, vb_id=vb_id, key=key)


def history(node: MemoryNode, vb_id: int = VB) -> list[Frame]:
    """Return every version of a partition, as a stream without de-duplication would show it."""
    node.commit()
    high = node.engine.partitions[vb_id].committed_seqno
    frames: list[bytes] = []
    seqno = 1
    while seqno <= high:
        batch = node.engine.versions.frames(vb_id, seqno, high, bytes(4), (), 1 << 30)
        frames += batch.frames
        seqno = batch.next_seqno
    return FrameDecoder().feed(b"".join(frames))


# -- reads and writes --------------------------------------------------------------------------


def test_get_answers_value_flags_and_cas_of_the_set(peer: Peer) -> None:
    stored = store(peer, value=b"hello", flags=0xDEADBEEF)
    assert (stored.status, stored.extras, stored.key, stored.value) == (0, b"", b"", b"")
    found = get(peer)
    assert (found.status, found.value, found.cas) == (0, b"hello", stored.cas)
    assert found.extras == bytes.fromhex("deadbeef")
    assert found.key == b""
    assert found.datatype == 0


def test_getk_answers_the_key_too(peer: Peer) -> None:
    store(peer)
    found = peer.ask(Opcode.GETK, vb_id=VB, key=b"k")
    assert (found.key, found.value, found.extras) == (b"k", b"v", bytes(4))


def test_getk_with_collections_answers_the_key_as_it_was_asked(node: MemoryNode) -> None:
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS)
    store(peer, key=b"\0k")
    assert peer.ask(Opcode.GETK, vb_id=VB, key=b"\0k").key == b"\0k"


def test_an_empty_value_is_a_value(peer: Peer) -> None:
    store(peer, value=b"", flags=3)
    found = get(peer)
    assert (found.status, found.value, found.extras) == (0, b"", b"\0\0\0\3")


@pytest.mark.parametrize("opcode", [Opcode.GET, Opcode.GETK])
def test_a_miss_is_enoent_without_extras_and_key(peer: Peer, opcode: int) -> None:
    missed = peer.ask(opcode, vb_id=VB, key=b"k")
    assert (missed.status, missed.extras, missed.value) == (Status.KEY_ENOENT, b"", b"")


def test_add_stores_only_what_is_absent(peer: Peer) -> None:
    assert store(peer, Opcode.ADD, value=b"1").status == Status.OK
    assert store(peer, Opcode.ADD, value=b"2").status == Status.KEY_EEXISTS
    assert get(peer).value == b"1"
    peer.delete(VB, b"k")
    assert store(peer, Opcode.ADD, value=b"3").status == Status.OK
    assert get(peer).value == b"3"


def test_replace_stores_only_what_is_present(peer: Peer) -> None:
    assert store(peer, Opcode.REPLACE).status == Status.KEY_ENOENT
    store(peer)
    assert store(peer, Opcode.REPLACE, value=b"2").status == Status.OK
    assert get(peer).value == b"2"
    peer.delete(VB, b"k")
    assert store(peer, Opcode.REPLACE).status == Status.KEY_ENOENT


def test_delete_removes_and_a_second_one_is_enoent(peer: Peer) -> None:
    stored = store(peer)
    deleted = peer.delete(VB, b"k")
    assert deleted.status == Status.OK
    assert deleted.cas > stored.cas
    assert get(peer).status == Status.KEY_ENOENT
    assert peer.delete(VB, b"k").status == Status.KEY_ENOENT


# -- quiet forms -------------------------------------------------------------------------------


def quietly(peer: Peer, opcode: int, **parts: int | bytes) -> list[Frame]:
    """Send a quiet command and a NOOP; return what came before the NOOP's answer."""
    packet = pack_request(opcode, vb_id=VB, opaque=5, **parts)  # type: ignore[arg-type]
    *answers, noop = peer.send(packet + pack_request(Opcode.NOOP, opaque=6))
    assert (noop.opcode, noop.opaque) == (Opcode.NOOP, 6)
    return answers


@pytest.mark.parametrize("opcode", [Opcode.GETQ, Opcode.GETKQ])
def test_a_quiet_read_is_silent_on_a_miss_only(peer: Peer, opcode: int) -> None:
    assert quietly(peer, opcode, key=b"k") == []
    store(peer)
    (found,) = quietly(peer, opcode, key=b"k")
    assert (found.opcode, found.opaque, found.value) == (opcode, 5, b"v")
    assert found.key == (b"k" if opcode == Opcode.GETKQ else b"")


@pytest.mark.parametrize("opcode", [Opcode.SETQ, Opcode.ADDQ, Opcode.REPLACEQ])
def test_a_quiet_store_is_silent_on_success_only(peer: Peer, opcode: int) -> None:
    if opcode == Opcode.REPLACEQ:
        store(peer, value=b"before")
    assert quietly(peer, opcode, key=b"k", value=b"now", extras=bytes(8)) == []
    assert get(peer).value == b"now"
    (refused,) = quietly(peer, opcode, key=b"k", value=b"x", extras=bytes(8), cas=1)
    assert (refused.opcode, refused.opaque, refused.status) == (opcode, 5, Status.KEY_EEXISTS)
    assert get(peer).value == b"now"


def test_a_quiet_delete_is_silent_on_success_only(peer: Peer) -> None:
    store(peer)
    assert quietly(peer, Opcode.DELETEQ, key=b"k") == []
    assert get(peer).status == Status.KEY_ENOENT
    (refused,) = quietly(peer, Opcode.DELETEQ, key=b"k")
    assert (refused.opcode, refused.status) == (Opcode.DELETEQ, Status.KEY_ENOENT)


@pytest.mark.parametrize("quiet", sorted(QUIET_FORMS.keys() - {Opcode.QUITQ}))
def test_a_quiet_command_answers_what_is_wrong_with_it(peer: Peer, quiet: int) -> None:
    (refused,) = quietly(peer, quiet, key=b"", extras=b"123")
    assert refused.status == Status.EINVAL


# -- CAS ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("opcode", [Opcode.SET, Opcode.REPLACE])
def test_cas_stores_only_over_the_version_it_names(peer: Peer, opcode: int) -> None:
    first = store(peer, value=b"1").cas
    second = store(peer, opcode, value=b"2", cas=first)
    assert second.status == Status.OK
    assert second.cas > first
    assert store(peer, opcode, value=b"3", cas=first).status == Status.KEY_EEXISTS
    found = get(peer)
    assert (found.value, found.cas) == (b"2", second.cas)


def test_cas_of_a_delete(peer: Peer) -> None:
    cas = store(peer).cas
    assert peer.ask(Opcode.DELETE, vb_id=VB, key=b"k", cas=cas + 1).status == Status.KEY_EEXISTS
    assert get(peer).status == Status.OK
    assert peer.ask(Opcode.DELETE, vb_id=VB, key=b"k", cas=cas).status == Status.OK


@pytest.mark.parametrize("opcode", [Opcode.SET, Opcode.REPLACE])
def test_cas_on_a_missing_document_is_enoent(peer: Peer, opcode: int) -> None:
    assert store(peer, opcode, cas=1).status == Status.KEY_ENOENT
    cas = store(peer).cas
    tombstone = peer.delete(VB, b"k").cas
    assert store(peer, opcode, cas=cas).status == Status.KEY_ENOENT
    assert store(peer, opcode, cas=tombstone).status == Status.KEY_ENOENT
    assert peer.ask(Opcode.DELETE, vb_id=VB, key=b"k", cas=cas).status == Status.KEY_ENOENT


def test_cas_holds_for_what_was_merged_into_the_store(node: MemoryNode, peer: Peer) -> None:
    cas = store(peer).cas
    node.merge()
    assert store(peer, cas=cas + 1).status == Status.KEY_EEXISTS
    assert store(peer, Opcode.ADD).status == Status.KEY_EEXISTS
    assert get(peer).cas == cas
    assert store(peer, cas=cas).status == Status.OK


def test_cas_rises_within_a_partition_and_never_is_zero(peer: Peer) -> None:
    seen = [store(peer, key=b"%d" % (n % 3)).cas for n in range(20)]
    seen.append(peer.delete(VB, b"0").cas)
    assert seen == sorted(set(seen))
    assert seen[0] > 0


def test_cas_rises_when_the_clock_goes_back(node: MemoryNode, peer: Peer) -> None:
    before = store(peer).cas
    node.now_ns -= 3_600_000_000_000
    stored = store(peer).cas
    deleted = peer.delete(VB, b"k").cas
    assert before < stored < deleted


def test_cas_rises_over_a_restart_with_a_clock_that_went_back(node: MemoryNode) -> None:
    peer = node.connect()
    peer.hello()
    before = store(peer).cas
    node.commit()
    node.merge()
    node.now_ns -= 3_600_000_000_000
    node.crash()
    peer = node.connect()
    peer.hello()
    assert store(peer).cas > before


def test_cas_is_the_time_of_the_change(node: MemoryNode, peer: Peer) -> None:
    cas = store(peer).cas
    assert cas & ~0xFFFF == START_NS & ~0xFFFF
    node.now_ns += 5_000_000_000
    assert store(peer).cas & ~0xFFFF == (START_NS + 5_000_000_000) & ~0xFFFF


# -- tokens, revisions, seqnos -----------------------------------------------------------------


@pytest.mark.parametrize("opcode", [Opcode.SET, Opcode.ADD, Opcode.REPLACE, Opcode.DELETE])
def test_a_mutation_token_is_sent_if_it_was_granted(node: MemoryNode, opcode: int) -> None:
    plain, asking = node.connect(), node.connect()
    plain.hello(Feature.XERROR)
    asking.hello(Feature.MUTATION_SEQNO)
    seqno = 0
    for peer, key in ((plain, b"a"), (asking, b"b")):
        if opcode in {Opcode.REPLACE, Opcode.DELETE}:
            store(peer, key=key)
            seqno += 1
        answer = peer.delete(VB, key) if opcode == Opcode.DELETE else store(peer, opcode, key)
        seqno += 1
        assert answer.status == Status.OK
        if peer is plain:
            assert answer.extras == b""
        else:
            vb_uuid = node.engine.partitions[VB].failover.current.vb_uuid
            assert MUTATION_TOKEN.unpack(answer.extras) == (vb_uuid, seqno)


def test_refusals_and_reads_carry_no_token(node: MemoryNode) -> None:
    peer = node.connect()
    peer.hello(Feature.MUTATION_SEQNO)
    store(peer)
    assert store(peer, Opcode.ADD).extras == b""
    assert len(get(peer).extras) == 4


def test_rev_seqno_counts_a_documents_revisions_across_deletes(
    node: MemoryNode, peer: Peer
) -> None:
    store(peer)
    store(peer)
    peer.delete(VB, b"k")
    node.merge()
    store(peer)
    store(peer, key=b"other")
    revisions = [
        parse_mutation(frame).rev_seqno
        if frame.opcode == Opcode.DCP_MUTATION
        else parse_deletion(frame).rev_seqno
        for frame in history(node)
    ]
    assert revisions == [1, 2, 3, 4, 1]


def test_seqnos_count_per_partition(node: MemoryNode, peer: Peer) -> None:
    for n in range(3):
        store(peer, key=b"%d" % n, vb_id=VB)
    store(peer, vb_id=VB + 1)
    peer.delete(VB, b"0")
    assert node.engine.partitions[VB].high_seqno == 4
    assert node.engine.partitions[VB + 1].high_seqno == 1


def test_a_refused_operation_has_no_seqno(node: MemoryNode, peer: Peer) -> None:
    store(peer)
    store(peer, Opcode.ADD)
    store(peer, cas=1)
    peer.delete(VB, b"missing")
    get(peer)
    assert node.engine.partitions[VB].high_seqno == 1


# -- limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("opcode", [*STORES, *(QUIET_OF[opcode] for opcode in STORES)])
def test_a_value_over_the_limit_is_e2big(node: MemoryNode, opcode: int) -> None:
    peer = node.connect(limits=Limits(value_bytes_max=100))
    peer.hello()
    (refused,) = peer.send(
        pack_request(opcode, vb_id=VB, key=b"k", value=bytes(101), extras=bytes(8))
    )
    assert refused.status == Status.E2BIG
    assert not peer.state.is_closing
    assert get(peer).status == Status.KEY_ENOENT


def test_the_largest_value_fits(node: MemoryNode) -> None:
    peer = node.connect(limits=Limits(value_bytes_max=100))
    peer.hello()
    assert store(peer, value=bytes(100)).status == Status.OK


@pytest.mark.parametrize("has_collections", [False, True])
def test_a_key_has_at_most_250_bytes_and_its_collection_id(
    node: MemoryNode, has_collections: bool
) -> None:
    peer = node.connect()
    peer.hello(*[Feature.COLLECTIONS] * has_collections)
    prefix = b"\0" * has_collections
    longest, too_long = prefix + b"k" * 250, prefix + b"k" * 251
    assert store(peer, key=longest).status == Status.OK
    assert get(peer, longest).status == Status.OK
    assert peer.delete(VB, longest).status == Status.OK
    assert store(peer, key=too_long).status == Status.EINVAL
    assert get(peer, too_long).status == Status.EINVAL
    assert peer.delete(VB, too_long).status == Status.EINVAL


@pytest.mark.parametrize("has_collections", [False, True])
def test_an_empty_key_is_einval(node: MemoryNode, has_collections: bool) -> None:
    peer = node.connect()
    peer.hello(*[Feature.COLLECTIONS] * has_collections)
    for key in (b"", b"\0") if has_collections else (b"",):
        assert store(peer, key=key).status == Status.EINVAL
        assert get(peer, key).status == Status.EINVAL
        assert peer.delete(VB, key).status == Status.EINVAL


@pytest.mark.parametrize(
    ("opcode", "extras", "value"),
    [
        (Opcode.SET, b"", b"v"),
        (Opcode.SET, bytes(4), b"v"),
        (Opcode.SET, bytes(9), b"v"),
        (Opcode.GET, bytes(4), b""),
        (Opcode.GET, b"", b"v"),
        (Opcode.DELETE, bytes(4), b""),
        (Opcode.DELETE, b"", b"v"),
    ],
)
def test_extras_or_a_value_that_do_not_belong_are_einval(
    node: MemoryNode, peer: Peer, opcode: int, extras: bytes, value: bytes
) -> None:
    answer = peer.ask(opcode, vb_id=VB, key=b"k", extras=extras, value=value)
    assert answer.status == Status.EINVAL
    assert node.engine.partitions[VB].high_seqno == 0


@pytest.mark.parametrize("opcode", [Opcode.SET, Opcode.GET, Opcode.DELETE])
def test_a_key_longer_than_the_body_is_einval(peer: Peer, opcode: int) -> None:
    good = pack_request(opcode, vb_id=VB, key=b"kkkk", extras=bytes(8 * (opcode == Opcode.SET)))
    (answer,) = peer.send(good[:2] + b"\0\xff" + good[4:])
    assert answer.status == Status.EINVAL


@pytest.mark.parametrize("datatype", [0x02, 0x03, 0x04, 0x80])
def test_a_datatype_that_was_not_negotiated_is_einval(
    node: MemoryNode, peer: Peer, datatype: int
) -> None:
    """Stored, it would reach DCP consumers, who would inflate what is not Snappy."""
    answer = peer.ask(
        Opcode.SET, vb_id=VB, key=b"k", value=b"v", extras=bytes(8), datatype=datatype
    )
    assert answer.status == Status.EINVAL
    assert node.engine.partitions[VB].high_seqno == 0


def test_the_json_bit_must_be_negotiated(peer: Peer) -> None:
    answer = peer.ask(Opcode.SET, vb_id=VB, key=b"k", value=b"1", extras=bytes(8), datatype=1)
    assert answer.status == Status.EINVAL
    assert get(peer).status == Status.KEY_ENOENT


# -- collections -------------------------------------------------------------------------------


def test_connections_with_and_without_collections_see_the_same(
    node: MemoryNode,
) -> None:
    old, new = node.connect(), node.connect()
    old.hello()
    new.hello(Feature.COLLECTIONS)
    store(old, key=b"k", value=b"1")
    assert get(new, b"\0k").value == b"1"
    store(new, key=b"\0k", value=b"2")
    assert get(old, b"k").value == b"2"
    assert new.delete(VB, b"\0k").status == Status.OK
    assert get(old, b"k").status == Status.KEY_ENOENT


@pytest.mark.parametrize("prefix", [b"\x08", b"\x01", b"\x80\x01", b"\xff\xff\x03"])
def test_any_collection_but_the_default_one_is_unknown(node: MemoryNode, prefix: bytes) -> None:
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS)
    for answer in (
        store(peer, key=prefix + b"k"),
        get(peer, prefix + b"k"),
        peer.delete(VB, prefix + b"k"),
    ):
        assert (answer.status, answer.value) == (
            Status.UNKNOWN_COLLECTION,
            b'{"manifest_uid":"0"}',
        )
    assert node.engine.partitions[VB].high_seqno == 0


# -- which partition ---------------------------------------------------------------------------


@pytest.mark.all_partitions
def test_connection_that_knows_no_partitions_has_its_keys_hashed(node: MemoryNode) -> None:
    peer = node.connect()
    assert store(peer, key=b"Hello", vb_id=0).status == Status.OK
    assert vbucket_of(b"Hello") == 977
    assert node.engine.partitions[977].high_seqno == 1
    assert get(peer, b"Hello", vb_id=3).value == b"v"
    assert peer.delete(0, b"Hello").status == Status.OK
    assert node.engine.partitions[977].high_seqno == 2


@pytest.mark.all_partitions
@pytest.mark.parametrize("how", ["HELLO", "SELECT_BUCKET"])
def test_after_hello_or_select_bucket_header_names_partition(node: MemoryNode, how: str) -> None:
    peer = node.connect()
    if how == "HELLO":
        peer.hello()
    else:
        assert peer.ask(Opcode.SELECT_BUCKET, key=b"default").status == Status.OK
    store(peer, key=b"Hello", vb_id=5)
    assert node.engine.partitions[5].high_seqno == 1
    assert get(peer, b"Hello", vb_id=977).status == Status.KEY_ENOENT


@pytest.mark.parametrize("vb_id", [1024, 65535])
def test_unknown_partition_is_not_my_vbucket_with_configuration(
    node: MemoryNode, peer: Peer, vb_id: int
) -> None:
    for answer in (
        store(peer, vb_id=vb_id),
        get(peer, vb_id=vb_id),
        peer.delete(vb_id, b"k"),
    ):
        assert (answer.status, answer.value) == (Status.NOT_MY_VBUCKET, node.bucket_config())


@pytest.mark.parametrize("state", [VbState.REPLICA, VbState.PENDING, VbState.DEAD])
def test_a_partition_that_is_not_active_is_not_my_vbucket(
    node: MemoryNode, peer: Peer, state: VbState
) -> None:
    store(peer)
    node.engine.partitions[VB].state = state
    for answer in (store(peer), get(peer), peer.delete(VB, b"k")):
        assert (answer.status, answer.value) == (Status.NOT_MY_VBUCKET, node.bucket_config())
    (quiet,) = peer.send(pack_request(Opcode.GETQ, vb_id=VB, key=b"k"))
    assert quiet.status == Status.NOT_MY_VBUCKET
    assert node.engine.partitions[VB].high_seqno == 1


def test_elsewhere_is_told_when_the_moving_group_is_on_disk(node: MemoryNode, peer: Peer) -> None:
    """Who is sent away by a move that a crash takes back would look for it in vain."""
    store(peer)
    node.commit()
    assert get(peer).status == Status.OK
    assert not peer.must_wait
    set_state(node.engine, VB, VbState.DEAD)
    assert get(peer).status == Status.NOT_MY_VBUCKET
    assert peer.must_wait
    node.commit()
    assert not peer.must_wait


# -- expiry ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expiry", "lives_s"),
    [(1, 1), (2_592_000, 2_592_000), (START_S + 100, 100), (START_S + 5_000_000, 5_000_000)],
)
def test_expiry_to_30_days_counts_from_now_larger_is_unix_time(
    node: MemoryNode, peer: Peer, expiry: int, lives_s: int
) -> None:
    store(peer, expiry=expiry)
    (stored,) = history(node)
    assert parse_mutation(stored).expiration == START_S + lives_s
    node.now_ns += (lives_s - 1) * 1_000_000_000
    assert get(peer).status == Status.OK
    node.now_ns += 1_000_000_000
    assert get(peer).status == Status.KEY_ENOENT


def test_an_absolute_expiry_in_the_past_is_over_at_once(peer: Peer) -> None:
    assert store(peer, expiry=START_S - 1).status == Status.OK
    assert get(peer).status == Status.KEY_ENOENT


def test_expiry_zero_is_never(node: MemoryNode, peer: Peer) -> None:
    store(peer)
    node.now_ns += 100 * 365 * 86_400 * 1_000_000_000
    assert get(peer).status == Status.OK


@pytest.mark.parametrize("is_merged", [False, True])
def test_an_expiry_on_access_is_a_change_with_its_own_seqno(
    node: MemoryNode, peer: Peer, is_merged: bool
) -> None:
    store(peer, expiry=10)
    if is_merged:
        node.merge()
    node.now_ns += 10_000_000_000
    assert node.engine.partitions[VB].high_seqno == 1
    assert get(peer).status == Status.KEY_ENOENT
    assert get(peer).status == Status.KEY_ENOENT
    _, expiry = history(node)
    assert expiry.opcode == Opcode.DCP_EXPIRATION
    assert parse_deletion(expiry) == (2, 2, START_S + 10)
    assert node.engine.partitions[VB].item_count == 0


def test_conditions_see_an_expired_document_as_missing(node: MemoryNode, peer: Peer) -> None:
    for key in (b"add", b"replace", b"delete", b"cas"):
        cas = store(peer, key=key, expiry=10).cas
    node.now_ns += 10_000_000_000
    assert store(peer, Opcode.ADD, b"add").status == Status.OK
    assert store(peer, Opcode.REPLACE, b"replace").status == Status.KEY_ENOENT
    assert peer.delete(VB, b"delete").status == Status.KEY_ENOENT
    assert store(peer, Opcode.SET, b"cas", cas=cas).status == Status.KEY_ENOENT
    is_removal = [frame.opcode in REMOVALS for frame in history(node)[4:]]
    assert is_removal == [True, False, True, True, True]


def test_a_plain_set_renews_an_expired_document(node: MemoryNode, peer: Peer) -> None:
    store(peer, expiry=10)
    node.now_ns += 10_000_000_000
    store(peer, value=b"new")
    assert get(peer).value == b"new"
    assert node.engine.partitions[VB].item_count == 1
