"""SET_WITH_META and DEL_WITH_META over the bytes of real sessions: who wins, what is kept."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.session.access.auth import AuthStep
from dcp.session.access.rights import EVERYTHING, Rights, Role
from dcp.session.kv.with_meta import REV_SEQNO_MAX
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.message import CAS_SPECIAL, FIT_META
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import START_NS, MemoryNode, Peer
from vbucket.model.ids import CAS_DRIFT_NS

VB = 5
KEY = b"k"
CAS = START_NS
SKIP, FORCE, REGENERATE, EXPIRATION = 1, 2, 4, 16


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


@pytest.fixture
def peer(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello(Feature.MUTATION_SEQNO, Feature.JSON)
    return peer


def put(
    peer, rev, cas, value=b"v", *, opcode=Opcode.SET_WITH_META, flags=0, expiry=0, options=None,
    section=None, condition=0, datatype=0, key=KEY,
):  # fmt: skip
    extras = struct.pack(">IIQQ", flags, expiry, rev, cas)
    if options is not None:
        extras += struct.pack(">I", options)
    if section is not None:
        extras += struct.pack(">H", len(section))
        value += section
    return peer.ask(
        opcode, vb_id=VB, key=key, value=value, extras=extras, cas=condition, datatype=datatype
    )


def remove(peer, rev, cas, **more):
    return put(peer, rev, cas, b"", opcode=Opcode.DEL_WITH_META, **more)


def meta(peer):
    frame = peer.ask(Opcode.GET_META, vb_id=VB, key=KEY, extras=b"\2")
    deleted, flags, expiry, rev, datatype = struct.unpack(">IIIQB", frame.extras)
    return bool(deleted), flags, expiry, rev, frame.cas, datatype


def test_a_document_keeps_what_it_brings(node, peer):
    expiry = START_NS // 1_000_000_000 + 500
    answer = put(peer, 7, CAS, b"{}", flags=0xDEAD, expiry=expiry, datatype=1)
    assert answer.status == Status.OK
    assert answer.cas == CAS
    uuid, seqno = struct.unpack(">QQ", answer.extras)
    assert (uuid, seqno) == (node.engine.partitions[VB].vb_uuid, 1)
    assert peer.must_wait
    assert meta(peer) == (False, 0xDEAD, expiry, 7, CAS, 1)
    assert node.engine.partitions[VB].item_count == 1


def test_the_next_change_goes_on_from_there(peer):
    later = CAS + (1 << 40)
    put(peer, 7, later)
    assert peer.set(VB, KEY, b"w").cas == later + 1, "the partition's clock went along"
    assert meta(peer)[3] == 8


def test_a_deletion_and_an_expiry(node, peer):
    put(peer, 1, CAS)
    assert remove(peer, 2, CAS + 1).status == Status.OK
    assert meta(peer)[0]
    assert meta(peer)[3:5] == (2, CAS + 1)
    assert remove(peer, 3, CAS + 2, options=EXPIRATION, expiry=77).status == Status.OK
    assert node.engine.partitions[VB].item_count == 0
    entry = node.engine.partitions[VB].newest[b"\0" + KEY]
    assert entry[13] == Opcode.DCP_EXPIRATION
    assert struct.unpack_from(">I", entry, 12 + 24 + 16) == (77,)


def test_a_deletion_of_what_never_was_leaves_a_tombstone(node, peer):
    assert remove(peer, 5, CAS).status == Status.OK
    assert put(peer, 4, CAS + 9).status == Status.KEY_EEXISTS, "the tombstone wins"
    assert node.engine.partitions[VB].item_count == 0


@given(
    changes=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans()), max_size=12
    )
)
def test_the_higher_revision_wins_then_the_higher_cas(changes):
    peer = MemoryNode().connect()
    peer.hello()
    best, is_live = (0, 0), False
    for rev, cas, is_removal, skips in changes:
        write = remove if is_removal else put
        status = write(peer, rev, cas, options=SKIP if skips else None).status
        wins = skips or (rev, cas) > best
        assert status == (Status.OK if wins else Status.KEY_EEXISTS)
        if wins:
            best, is_live = (rev, cas), not is_removal
    found = peer.ask(Opcode.GET, vb_id=VB, key=KEY)
    assert (found.status == Status.OK) == is_live
    if is_live:
        assert found.cas == best[1]


def test_another_cas_on_request(node, peer):
    node.now_ns += 1 << 30
    answer = put(peer, 7, 5, options=SKIP | REGENERATE)
    assert answer.cas == node.now_ns & ~0xFFFF
    assert meta(peer)[3] == 7


def test_a_condition_on_what_is_there(peer):
    assert put(peer, 9, CAS, condition=3).status == Status.KEY_ENOENT
    put(peer, 9, CAS)
    assert put(peer, 10, CAS, condition=3).status == Status.KEY_EEXISTS
    assert put(peer, 10, CAS, condition=CAS).status == Status.OK


def test_quiet_forms_answer_errors_only(peer):
    extras = struct.pack(">IIQQ", 0, 0, 3, CAS)
    request = pack_request(Opcode.SETQ_WITH_META, vb_id=VB, key=KEY, extras=extras, opaque=1)
    assert peer.send(request) == []
    (refusal,) = peer.send(request)
    assert refusal.status == Status.KEY_EEXISTS
    again = struct.pack(">IIQQ", 0, 0, 4, CAS)
    request = pack_request(Opcode.DELQ_WITH_META, vb_id=VB, key=KEY, extras=again)
    assert peer.send(request) == []
    assert meta(peer)[0]


def test_extended_metadata_is_read_over(peer):
    for section, options in ((b"\1\2\0\1\0", None), (b"\1", 0), (b"", SKIP)):
        assert put(peer, 5, CAS, section=section, options=options).status in {
            Status.OK,
            Status.KEY_EEXISTS,
        }
        assert peer.ask(Opcode.GET, vb_id=VB, key=KEY).value == b"v"


@pytest.mark.parametrize(
    "wrong",
    [
        {"rev": 0}, {"rev": REV_SEQNO_MAX + 1}, {"cas": 0}, {"cas": CAS_SPECIAL},
        {"options": FIT_META}, {"options": FORCE}, {"options": REGENERATE}, {"options": 0x8000},
        {"options": EXPIRATION}, {"datatype": 2}, {"key": b""},
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(peer, wrong):
    arguments = {"rev": 1, "cas": CAS} | wrong
    answer = put(peer, arguments.pop("rev"), arguments.pop("cas"), **arguments)
    assert answer.status == Status.EINVAL


def test_shapes_that_are_refused(peer):
    for size in (0, 23, 25, 27, 29, 31):
        answer = peer.ask(Opcode.SET_WITH_META, vb_id=VB, key=KEY, extras=bytes(size))
        assert answer.status == Status.EINVAL, size
    assert put(peer, 1, CAS, opcode=Opcode.DEL_WITH_META, value=b"v").status == Status.EINVAL
    extras = struct.pack(">IIQQH", 0, 0, 1, CAS, 200)
    answer = peer.ask(Opcode.SET_WITH_META, vb_id=VB, key=KEY, extras=extras, value=b"short")
    assert answer.status == Status.EINVAL


def highest_cas(node):
    """The highest CAS that is taken now."""
    return (node.now_ns & ~0xFFFF) + CAS_DRIFT_NS


@pytest.mark.parametrize(
    "ahead", [1, 10**9, 2**62, 2**63 - 1 - START_NS, CAS_SPECIAL - 1 - START_NS]
)
@pytest.mark.parametrize("write", [put, remove])
def test_a_cas_too_far_ahead_is_refused_and_changes_nothing(node, peer, ahead, write):
    peer.hello(Feature.XERROR)
    put(peer, 1, CAS)
    cas = min(highest_cas(node) + ahead, CAS_SPECIAL - 1)
    answer = write(peer, 2, cas)
    assert answer.status == Status.CAS_VALUE_INVALID
    assert b"cas_drift_max" in answer.value
    assert b"3900 s ahead" in answer.value
    assert (meta(peer)[3], node.engine.partitions[VB].max_cas) == (1, CAS)
    assert put(peer, 2, cas, options=SKIP | REGENERATE).cas < highest_cas(node), "it is replaced"
    peer.hello()
    assert write(peer, 3, cas).status == Status.EINVAL, "an older client knows no such status"


def test_highest_cas_is_taken_and_clock_goes_on_from_there(node, peer):
    highest = highest_cas(node)
    assert put(peer, 1, highest).status == Status.OK
    assert peer.set(VB, KEY, b"w").cas == highest + 1
    node.now_ns += 2 * CAS_DRIFT_NS
    assert peer.set(VB, KEY, b"w").cas == node.now_ns & ~0xFFFF, "until the time has come"


@pytest.mark.parametrize("burst", [1, 1000])
def test_a_partition_stays_within_the_bound_whatever_comes(node, peer, burst):
    """Own changes add a nanosecond each while the clock stands still; each takes longer than that,
    so they never get further from the clock than a CAS from elsewhere may be.
    """
    part = node.engine.partitions[VB]
    for rev in range(1, 21):
        put(peer, rev, highest_cas(node) + 1, options=SKIP)
        assert put(peer, rev, highest_cas(node), options=SKIP).status == Status.OK
        for _ in range(burst // 20 + 1):
            peer.set(VB, KEY, b"w")
            node.now_ns += 1000
        assert part.max_cas - (node.now_ns & ~0xFFFF) <= CAS_DRIFT_NS + 0xFFFF
    before = part.max_cas
    for _ in range(burst):
        peer.set(VB, KEY, b"w")
    assert part.max_cas == before + burst


def test_the_highest_revision_stays(node, peer):
    """Whatever changes the document; its CAS decides then, and nothing overflows."""
    assert put(peer, REV_SEQNO_MAX, CAS).status == Status.OK
    for change in (
        lambda: peer.set(VB, KEY, b"w"),
        lambda: peer.ask(Opcode.APPEND, vb_id=VB, key=KEY, value=b"x"),
        lambda: peer.delete(VB, KEY),
        lambda: peer.set(VB, KEY, b"w"),
    ):
        assert change().status == Status.OK
        assert meta(peer)[3] == REV_SEQNO_MAX
    cas = meta(peer)[4]
    node.merge()
    assert put(peer, REV_SEQNO_MAX, cas).status == Status.KEY_EEXISTS
    assert put(peer, REV_SEQNO_MAX, cas + 1).status == Status.OK
    assert meta(peer)[3] == REV_SEQNO_MAX


@pytest.mark.parametrize("write", [put, remove])
def test_what_does_not_fit_is_made_to_fit_on_request(node, peer, write):
    peer.hello(Feature.JSON, Feature.X_FIT_META)
    far = 2**63 - 1
    answer = write(peer, REV_SEQNO_MAX + 7, far, options=FIT_META)
    assert answer.status == Status.OK
    assert answer.cas == node.now_ns & ~0xFFFF
    assert meta(peer)[3:5] == (REV_SEQNO_MAX, answer.cas)
    again = write(peer, REV_SEQNO_MAX + 7, far, options=FIT_META)
    assert again.status == Status.KEY_EEXISTS, "such a CAS says nothing; the revision is the same"
    forced = write(peer, REV_SEQNO_MAX, far, options=FIT_META | SKIP)
    assert forced.cas == answer.cas + 1
    assert put(peer, 1, CAS, key=b"other", options=FIT_META).cas == CAS, "what fits is kept"


def test_a_cas_that_does_not_fit_loses_against_the_same_revision(peer):
    peer.hello(Feature.X_FIT_META)
    put(peer, 4, CAS)
    assert put(peer, 4, 2**63, options=FIT_META).status == Status.KEY_EEXISTS
    assert put(peer, 5, 2**63, options=FIT_META).status == Status.OK


def test_it_takes_write_and_admin(node):
    def log_in(*roles):
        class Door:
            def mechanisms(self, peer_is_loopback):
                return ["PLAIN"]

            def start(self, mechanism, initial, peer_is_loopback):
                rights = Rights(dict.fromkeys(roles, (EVERYTHING,)))
                return AuthStep(Status.OK, user="ada", rights=rights)

        peer = node.connect(is_loopback=False)
        peer.state.login.authenticator = Door()
        peer.ask(Opcode.SASL_AUTH, key=b"PLAIN", value=b"\0ada\0x")
        peer.hello()
        return peer

    assert put(log_in(Role.READ, Role.WRITE), 1, CAS).status == Status.EACCESS
    assert put(log_in(Role.READ, Role.ADMIN), 1, CAS).status == Status.EACCESS
    assert put(log_in(Role.WRITE, Role.ADMIN), 1, CAS).status == Status.OK
    assert remove(log_in(Role.READ, Role.WRITE, Role.ADMIN), 2, CAS).status == Status.OK


def test_it_survives_a_crash_and_a_merge(node, peer):
    put(peer, 7, CAS, flags=3)
    node.commit()
    node.crash()
    again = node.connect()
    again.hello(Feature.JSON)
    assert meta(again)[1:5] == (3, 0, 7, CAS)
    node.merge()
    assert put(again, 7, CAS).status == Status.KEY_EEXISTS
    assert put(again, 8, CAS).status == Status.OK


def test_collections(node, peer):
    peer.hello(Feature.COLLECTIONS)
    assert put(peer, 1, CAS, key=b"\x09k").status == Status.UNKNOWN_COLLECTION
    assert put(peer, 1, CAS, key=b"\0k").status == Status.OK
