"""X_PUT_FRAMES over the bytes of real sessions: what it leaves is what SET_WITH_META and
DEL_WITH_META leave, byte for byte, and what is no sound frame changes nothing.
"""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.session.access.auth import AuthStep
from dcp.session.access.rights import EVERYTHING, Rights, Role, Scope
from dcp.session.node_facts import Limits
from dcp.wire.feature import Feature
from dcp.wire.frame import HEADER, HEADER_BYTES, pack_request
from dcp.wire.message import (
    CAS_SPECIAL,
    DELETION_EXTRAS,
    DELETION_V2_EXTRAS,
    FIT_META,
    MUTATION_EXTRAS,
    PUT_FRAMES_ANSWER,
    PUT_FRAMES_BYTES_MAX,
    PUT_FRAMES_FITTED_ANSWER,
    PUT_FRAMES_MAX,
    PUT_FRAMES_REFUSED,
    PUT_FRAMES_REQUEST,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from dcp.wire.xattrs import DATATYPE_XATTR, pack_xattrs
from support.memory_node import START_NS, MemoryNode
from vbucket.engine.loading.bulk import REV_SEQNO_MAX
from vbucket.engine.partition import VbState
from vbucket.model.entry import DATATYPE_AT, head_of, key_of, seqno_of
from vbucket.model.entry import value_of as stored_value
from vbucket.model.manifest import INITIAL_MANIFEST
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import put_manifest

VB = 5
FORCE = 1
FEATURES = (
    Feature.COLLECTIONS, Feature.JSON, Feature.XERROR, Feature.X_PUT_FRAMES, Feature.X_FIT_META,
)  # fmt: skip
FAR = 2**63 - 1
"""A CAS that is too far ahead."""
KINDS = (Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION)


def frame(
    key=b"\0k", rev=1, cas=START_NS, value=b"v", *, kind=Opcode.DCP_MUTATION, flags=0, expiry=0,
    datatype=0, vb_id=VB, has_time=True,
):  # fmt: skip
    """A stored frame; its seqno and opaque mean nothing."""
    if kind == Opcode.DCP_MUTATION:
        extras = MUTATION_EXTRAS.pack(77, rev, flags, expiry, 0, 0, 0)
    elif kind == Opcode.DCP_EXPIRATION:
        extras, value = struct.pack(">QQI", 77, rev, expiry), b""
    else:
        value = b""
        extras = (
            DELETION_V2_EXTRAS.pack(77, rev, 9, 0) if has_time else DELETION_EXTRAS.pack(77, rev, 0)
        )
    return pack_request(
        kind, vb_id=vb_id, opaque=0xABCD, cas=cas, extras=extras, key=key, value=value,
        datatype=datatype if kind == Opcode.DCP_MUTATION else 0,
    )  # fmt: skip


def with_xattrs(made, section, datatype=DATATYPE_XATTR):
    """A frame, and a section of XATTRs before its value."""
    head = list(HEADER.unpack_from(made))
    head[4], head[6] = datatype, head[6] + len(section)
    value_at = HEADER_BYTES + head[3] + head[2]
    return HEADER.pack(*head) + made[HEADER_BYTES:value_at] + section + made[value_at:]


def test_xattrs_come_with_frames():
    node = MemoryNode()
    section = pack_xattrs([(b"u", b"1.0"), (b"_s", b"2")])
    frames = [with_xattrs(frame(b"\0%d" % n, kind=kind), section) for n, kind in enumerate(KINDS)]
    plain = frame(b"\0plain", datatype=1)
    peer = connect(node, *FEATURES, Feature.XATTR)
    assert counts(put(peer, plain, *frames)) == (4, 0)
    entries = [
        node.engine.versions.newest_entry(node.engine.partitions[VB], b"\0%d" % n) for n in range(3)
    ]
    assert [stored_value(entry) for entry in entries] == [section + b"v", section, section]
    assert [entry[DATATYPE_AT] for entry in entries] == [DATATYPE_XATTR] * 3
    node.merge()
    assert counts(put(peer, *reversed(frames), plain)) == (0, 4)
    assert put(connect(node), *frames).status == Status.EINVAL, "it did not negotiate them"
    for bad in (
        with_xattrs(frame(b"\0x"), b"\0\0\0\x09", DATATYPE_XATTR),
        with_xattrs(frame(b"\0x"), section, 0x02),
        with_xattrs(frame(b"\0x", kind=Opcode.DCP_DELETION), section + b"body"),
        with_xattrs(frame(b"\0x", kind=Opcode.DCP_DELETION), b"", DATATYPE_XATTR),
        with_xattrs(frame(b"\0x", kind=Opcode.DCP_DELETION), section, 0),
    ):
        assert put(peer, plain, bad).status == Status.EINVAL
    lower = [
        with_xattrs(frame(b"\0%d" % n, rev=9, kind=kind), section) for n, kind in enumerate(KINDS)
    ]
    assert counts(put(peer, *frames[:2], *lower)) == (3, 2)


def connect(node, *features, **more):
    peer = node.connect(**more)
    peer.hello(*(features or FEATURES))
    return peer


def put(peer, *frames, options=0, vb_id=VB):
    return put_value(peer, value_of(*frames), len(frames), options=options, vb_id=vb_id)


def value_of(*frames):
    sizes = [len(frame) - HEADER_BYTES for frame in frames]
    return struct.pack(f">{len(sizes)}I", *sizes) + b"".join(frames)


def put_value(peer, value, count, *, options=0, vb_id=VB):
    extras = PUT_FRAMES_REQUEST.pack(options, count)
    return peer.ask(Opcode.X_PUT_FRAMES, vb_id=vb_id, extras=extras, value=value)


def counts(answer):
    assert answer.status == Status.OK, answer
    return PUT_FRAMES_ANSWER.unpack(answer.extras[:8])


def replaced(answer):
    return PUT_FRAMES_FITTED_ANSWER.unpack(answer.extras)[2]


def single(peer, vb_id, key, rev, cas, value, kind, flags, expiry, datatype, options):
    is_removal = kind != Opcode.DCP_MUTATION
    options |= 0x10 if kind == Opcode.DCP_EXPIRATION else 0
    extras = struct.pack(">IIQQI", 0 if is_removal else flags, expiry, rev, cas, options)
    return peer.ask(
        Opcode.DEL_WITH_META if is_removal else Opcode.SET_WITH_META, vb_id=vb_id, key=key,
        extras=extras, value=b"" if is_removal else value, datatype=0 if is_removal else datatype,
    )  # fmt: skip


def state_of(node, vb_id=VB):
    part = node.engine.partitions[vb_id]
    return {
        "high": part.high_seqno, "cas": part.max_cas, "items": part.item_count,
        "tally": part.tally.to_document(), "last_group": part.last_group,
        "layers": [(layer.entries, layer.newest) for layer in part.layers()],
        "due": [sorted(map(sorted, layer.lists())) for layer in node.engine.due.layers()],
        "pending": node.engine.keyspace.has_pending,
    }  # fmt: skip


keys = st.sampled_from([b"\0a", b"\0b", b"\0c", b"\x08a", b"\x08b", b"\x09a"])
puts = st.tuples(
    keys, st.integers(1, 3) | st.sampled_from([REV_SEQNO_MAX, REV_SEQNO_MAX + 1, 2**64 - 1]),
    st.integers(START_NS, START_NS + 3) | st.sampled_from([FAR, CAS_SPECIAL - 1]),
    st.binary(max_size=3),
    st.sampled_from([*KINDS, *KINDS[:1] * 6]), st.integers(0, 3),
    st.sampled_from([0, 0, START_NS // 10**9 + 50]),
    st.integers(0, 1),
)  # fmt: skip
steps = st.one_of(
    st.tuples(st.just("put"), st.lists(puts, min_size=1, max_size=8), st.sampled_from([0, FORCE])),
    st.tuples(st.just("set"), st.sampled_from([b"\0a", b"\x08a"])),
    st.sampled_from([("commit",), ("freeze",), ("merge",), ("crash",)]),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(steps, max_size=10), st.booleans())
def test_it_leaves_what_single_commands_leave(story, has_json):
    features = [feature for feature in FEATURES if has_json or feature != Feature.JSON]
    vb_id, nodes = VB, [ShopNode(partitions=8), ShopNode(partitions=8)]
    peers = [connect(node, *features) for node in nodes]
    one, many = peers
    for step, *arguments in story:
        if step == "put":
            items, options = arguments
            won = lost = refitted = 0
            unknown = []
            for index, item in enumerate(items):
                # A single command refuses a bit that was not negotiated. The same is stored.
                known = item[7] if has_json else item[7] & ~1
                answer = single(one, vb_id, *item[:7], known, options | FIT_META)
                status = answer.status
                won += status == Status.OK
                refitted += status == Status.OK and answer.cas != item[2]
                lost += status == Status.KEY_EEXISTS
                if status == Status.UNKNOWN_COLLECTION:
                    unknown.append((index, Status.UNKNOWN_COLLECTION))
            frames = [
                frame(
                    *item[:4], kind=item[4], flags=item[5], expiry=item[6], datatype=item[7],
                    has_time=index % 2 == 0, vb_id=vb_id,
                )
                for index, item in enumerate(items)
            ]  # fmt: skip
            answer = put(many, *frames, options=options | FIT_META, vb_id=vb_id)
            assert (*counts(answer), replaced(answer)) == (won, lost, refitted)
            assert list(PUT_FRAMES_REFUSED.iter_unpack(answer.value)) == unknown
            assert many.must_wait == one.must_wait
        elif step == "set":
            for peer in peers:
                assert peer.set(vb_id, arguments[0], b"own").status == Status.OK
        else:
            for place, node in enumerate(nodes):
                _do(node, step)
                if step == "crash":
                    peers[place] = connect(node, *features)
            one, many = peers
        assert state_of(nodes[0], vb_id) == state_of(nodes[1], vb_id)
    for node in nodes:
        _do(node, "merge")
    records = [node.store.partitions()[vb_id] for node in nodes]
    assert records[0] == records[1]


class ShopNode(MemoryNode):
    """Has a collection from the beginning; making it would be a change of every partition."""

    is_frozen = False

    def _new_env(self, seed):
        env = super()._new_env(seed)
        with env.write() as write:
            put_manifest(write, INITIAL_MANIFEST.create_scope("s").create_collection("s", "c"))
        return env


def _do(node, step):
    if step == "commit" and not node.is_frozen:
        node.commit()
    elif step == "freeze" and not node.is_frozen:
        node.begin_merge()
        node.is_frozen = True
    elif step == "merge":
        if not node.is_frozen:
            node.begin_merge()
        node.end_merge()
        node.is_frozen = False
    elif step == "crash":
        node.crash()
        node.is_frozen = False


def test_streams_show_what_came():
    node = MemoryNode()
    peer = connect(node)
    frames = [frame(b"\0k%d" % n, 3, START_NS + n, b"%d" % n, flags=n) for n in range(9)]
    assert counts(put(peer, *frames)) == (9, 0)
    assert peer.must_wait, "the answer waits for its group"
    node.commit()
    consumer = connect(node, Feature.JSON)
    consumer.open()
    consumer.stream(VB, end=9)
    shown = [found for found in consumer.drain() if found.opcode == Opcode.DCP_MUTATION]
    assert [(found.key, found.value, found.cas) for found in shown] == [
        (b"k%d" % n, b"%d" % n, START_NS + n) for n in range(9)
    ]
    metas = [MUTATION_EXTRAS.unpack(found.extras)[:3] for found in shown]
    assert metas == [(n + 1, 3, n) for n in range(9)]


WRONG = {
    "another partition": frame(vb_id=VB + 1),
    "a marker": pack_request(Opcode.DCP_SNAPSHOT_MARKER, vb_id=VB, extras=bytes(20)),
    "a system event": pack_request(
        Opcode.DCP_SYSTEM_EVENT, vb_id=VB, extras=bytes(13), key=b"\0k", value=b"v"
    ),
    "a response": b"\x81" + frame()[1:],
    "no key": frame(key=b"\0"),
    "no collection id": frame(key=b"\x80\x80k"),
    "a long key": frame(key=b"\0" + b"k" * 251),
    "a revision of 0": frame(rev=0),
    "a high revision": frame(rev=REV_SEQNO_MAX + 1),
    "a CAS of 0": frame(cas=0),
    "a special CAS": frame(cas=CAS_SPECIAL),
    "Snappy": frame(datatype=2),
    "short extras": pack_request(
        Opcode.DCP_MUTATION, vb_id=VB, cas=1, extras=bytes(30), key=b"\0k"
    ),
    "a lock time": frame()[:48] + b"\0\0\0\1" + frame()[52:],
    "a deletion with a value": pack_request(
        Opcode.DCP_DELETION, vb_id=VB, cas=1, extras=DELETION_EXTRAS.pack(1, 1, 0), key=b"\0k",
        value=b"v",
    ),
    "a key beyond its frame": frame()[:2] + b"\0\x0f" + frame()[4:],
    "cut short": frame()[:-1],
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
@pytest.mark.parametrize("beside", [Opcode.DCP_MUTATION, Opcode.DCP_DELETION])
def test_a_frame_that_is_not_sound_refuses_the_packet(wrong, beside):
    node = MemoryNode()
    peer = connect(node)
    before = state_of(node)
    answer = put(peer, frame(b"\0sound", kind=beside), wrong)
    assert answer.status == Status.EINVAL
    assert b"frame 1" in answer.value, answer
    assert state_of(node) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_cas_that_is_too_far_ahead_refuses_the_packet(kind):
    node = MemoryNode()
    peer = connect(node)
    before = state_of(node)
    frames = [frame(b"\0sound"), frame(b"\0far", cas=FAR, kind=kind)]
    answer = put(peer, *frames)
    assert answer.status == Status.CAS_VALUE_INVALID
    assert b"cas_drift_max" in answer.value
    assert state_of(node) == before
    fitted = put(peer, *frames, options=FIT_META)
    assert (*counts(fitted), replaced(fitted)) == (2, 0, 1)
    again = put(peer, *frames, options=FIT_META)
    assert (*counts(again), replaced(again)) == (0, 2, 0), "it can be repeated"


def test_fitting_is_negotiated():
    peer = connect(MemoryNode(), *FEATURES[:-1])
    assert put(peer, frame(), options=FIT_META).status == Status.EINVAL
    assert put(peer, frame(cas=FAR)).status == Status.CAS_VALUE_INVALID


TABLES = {
    "no frames": (b"", 0),
    "no table": (b"", 1),
    "half a table": (value_of(frame(), frame())[:6], 2),
    "no frames behind it": (value_of(frame())[:4], 1),
    "half a header": (value_of(frame())[:24], 1),
    "a byte too many": (value_of(frame()) + b"\0", 1),
    "fewer than there are": (value_of(frame(), frame()), 1),
    "more than there are": (struct.pack(">II", 33, 33) + frame(), 2),
    "another border": (
        struct.pack(">II", len(frame()) - 23, len(frame()) - 25) + frame() + frame(), 2
    ),
    "a length of 4 GiB": (struct.pack(">I", 0xFFFF_FFFF) + frame(), 1),
}  # fmt: skip


@pytest.mark.parametrize(("value", "count"), TABLES.values(), ids=list(TABLES))
def test_a_table_that_does_not_fit_refuses_the_packet(value, count):
    node = MemoryNode()
    before = state_of(node)
    answer = put_value(connect(node), value, count)
    assert answer.status == Status.EINVAL
    assert answer.value
    assert state_of(node) == before


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_garbage_changes_nothing_or_is_stored_soundly(data):
    vb_id = VB
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    frames = [frame(b"\0k%d" % n, kind=kind, vb_id=vb_id) for n, kind in enumerate(kinds)]
    packet = bytearray(value_of(*frames))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(packet) - 1))
        packet[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    node = ShopNode(partitions=8)
    part = node.engine.partitions[vb_id]
    first, before = part.high_seqno + 1, state_of(node, vb_id)
    answer = put_value(connect(node), bytes(packet), len(frames), vb_id=vb_id)
    if answer.status:
        assert answer.status in {Status.EINVAL, Status.CAS_VALUE_INVALID}
        assert state_of(node, vb_id) == before
    else:
        applied, _ = counts(answer)
        assert part.high_seqno == first - 1 + applied
        entries = part.active.between(first, part.high_seqno)
        for seqno, entry in enumerate(entries, first):
            assert head_of(entry).entry_bytes == len(entry)
            assert seqno_of(entry) == seqno
            assert node.engine.keyspace.is_reachable(key_of(entry))
        node.commit()


def test_limits_of_a_packet():
    peer = connect(MemoryNode())
    frames = [frame(b"\0%d" % n) for n in range(PUT_FRAMES_MAX + 1)]
    assert put(peer, *frames).status == Status.EINVAL
    assert counts(put(peer, *frames[1:])) == (PUT_FRAMES_MAX, 0)
    room = PUT_FRAMES_BYTES_MAX - len(value_of(frame(value=b"")))
    assert put(peer, frame(rev=2, value=bytes(room + 1))).status == Status.EINVAL
    assert counts(put(peer, frame(rev=2, value=bytes(room)))) == (1, 0)
    assert put(peer).status == Status.EINVAL, "a packet without frames"
    assert put(peer, frame(rev=3), options=2).status == Status.EINVAL
    bare = peer.ask(Opcode.X_PUT_FRAMES, vb_id=VB, value=value_of(frame(rev=3)))
    assert bare.status == Status.EINVAL


def test_it_has_to_be_negotiated():
    node = MemoryNode()
    for features in ((Feature.COLLECTIONS,), (Feature.X_PUT_FRAMES,)):
        assert put(connect(node, *features), frame()).status == Status.NOT_SUPPORTED
    limits = Limits(value_bytes_max=PUT_FRAMES_BYTES_MAX - 1)
    small = node.connect(limits=limits)
    granted = small.hello(*FEATURES).value
    assert Feature.X_PUT_FRAMES.to_bytes(2, "big") not in granted, "no value may be too large"
    assert put(small, frame()).status == Status.NOT_SUPPORTED


def test_where_a_partition_takes_no_writes():
    node = MemoryNode()
    peer = connect(node)
    assert put(peer, frame(vb_id=1024), vb_id=1024).status == Status.NOT_MY_VBUCKET
    node.engine.refuse_writes("the disk is full")
    answer = put(peer, frame())
    assert answer.status == Status.ETMPFAIL
    assert b"the disk is full" in answer.value
    node.engine.refuse_writes("")
    node.engine.partitions[VB].state = VbState.REPLICA
    assert put(peer, frame()).status == Status.NOT_MY_VBUCKET
    assert not node.engine.keyspace.has_pending


def test_damaged_data_changes_nothing(monkeypatch):
    node = MemoryNode()
    peer = connect(node)
    counts(put(peer, frame(b"\0a"), frame(b"\0b")))
    node.merge()
    before = state_of(node)
    below = node.engine.versions.meta_below

    def damaged(part, key, entry):
        if key == b"\0b":
            raise StoreDamagedError("a bit was flipped")
        return below(part, key, entry)

    monkeypatch.setattr(node.engine.versions, "meta_below", damaged)
    answer = put(peer, frame(b"\0a", rev=2), frame(b"\0b", rev=2))
    assert answer.status == Status.EINTERNAL
    assert state_of(node) == before


SOME = (Scope(prefix=b"a"),)


@pytest.mark.parametrize(
    ("roles", "status"),
    [
        ({Role.WRITE: (EVERYTHING,)}, Status.EACCESS),
        ({Role.ADMIN: (EVERYTHING,)}, Status.EACCESS),
        ({Role.WRITE: SOME, Role.ADMIN: (EVERYTHING,)}, Status.EACCESS),
        ({Role.WRITE: (EVERYTHING,), Role.ADMIN: (EVERYTHING,)}, Status.OK),
        (dict.fromkeys(Role, (EVERYTHING,)), Status.OK),
    ],
)
def test_it_takes_write_for_every_key_and_admin(roles, status):
    class Door:
        def mechanisms(self, peer_is_loopback):
            return ["PLAIN"]

        def start(self, mechanism, initial, peer_is_loopback):
            return AuthStep(Status.OK, user="ada", rights=Rights(roles))

    peer = MemoryNode().connect(is_loopback=False)
    peer.state.login.authenticator = Door()
    peer.ask(Opcode.SASL_AUTH, key=b"PLAIN", value=b"\0ada\0x")
    peer.hello(*FEATURES)
    assert put(peer, frame(b"\0a")).status == status


def test_before_the_login_it_is_refused():
    peer = MemoryNode().connect(is_loopback=False)
    peer.hello(*FEATURES)
    assert put(peer, frame()).status == Status.EACCESS
