"""The embedded store's core: a replay and a snapshot give the same store, and bytes are checked."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from failover.metadata.embedded.core import EmbeddedCore, ReplayError, replayed
from failover.metadata.metastore import (
    Compact,
    Compare,
    CompareSign,
    CompareTarget,
    Delete,
    LeaseGrant,
    LeaseRevoke,
    Put,
    Range,
    Txn,
)
from failover.metadata.revision_store import RevisionStore
from failover.metadata.store_codec import (
    CodecError,
    decode_image,
    decode_request,
    encode_image,
    encode_request,
)

KEYS = st.sampled_from([b"a", b"b", b"c"])
LEASE_IDS = st.integers(0, 3)
OPERATIONS = st.one_of(
    st.builds(Put, KEYS, st.binary(max_size=3), LEASE_IDS),
    st.builds(Delete, KEYS),
    st.builds(Range, KEYS, st.booleans(), st.integers(0, 4), st.integers(0, 2)),
)
COMPARES = st.one_of(
    st.builds(Compare, KEYS, st.just(CompareTarget.VALUE), st.binary(max_size=3)),
    st.builds(
        Compare,
        KEYS,
        st.sampled_from([target for target in CompareTarget if target != CompareTarget.VALUE]),
        st.integers(0, 5),
        st.sampled_from(CompareSign),
    ),
)
LISTS = st.lists(OPERATIONS, max_size=3).map(tuple)
REQUESTS = st.one_of(
    st.builds(Txn, st.lists(COMPARES, max_size=2).map(tuple), LISTS, LISTS),
    st.builds(LeaseGrant, st.integers(0, 4), st.integers(1, 3)),
    st.builds(LeaseRevoke, LEASE_IDS),
    st.builds(Compact, st.integers(0, 30)),
    st.builds(Range, KEYS, st.booleans(), st.integers(0, 30), st.integers(0, 2)),
)


def seen(store):
    """All that a client can see of a store, and its leases."""
    reads = [
        store.apply(0, Range(b"", is_prefix=True, revision=revision))
        for revision in range(store.revision + 1)
    ]
    watches = [store.batches(b"", revision) for revision in range(1, store.revision + 2)]
    return store.revision, store.compact_revision, reads, watches, store.leases()


@settings(max_examples=300)
@given(st.lists(REQUESTS, max_size=25))
def test_what_will_change_is_known_and_replays_to_the_same_store(requests):
    core = EmbeddedCore(RevisionStore(), 0, Random(1))
    snapshot, records = encode_image(core.store.image()), []
    for request in requests:
        before = seen(core.store)
        if core.answer_now(0, request) is None:
            records.append(core.record_of(request))
            core.carry_out(0, request)
            assert seen(core.store) != before
        else:
            assert seen(core.store) == before
    store = replayed(snapshot, records)
    assert seen(store) == seen(core.store)
    again = RevisionStore.of_image(decode_image(encode_image(store.image())))
    assert seen(again) == seen(store)
    for lease_id in sorted(store.leases()):  # the same keys belong to the same leases
        for one in (store, again):
            one.apply(0, LeaseRevoke(lease_id))
    assert seen(again) == seen(store)


def test_a_snapshot_drops_history_that_is_too_long(monkeypatch):
    core = EmbeddedCore(RevisionStore(), 0, Random(1))
    for number in range(10):
        core.carry_out(0, Txn(then=(Put(b"k", b"%d" % number),)))
    monkeypatch.setattr("failover.metadata.embedded.core.HISTORY_BYTES_MAX", 6)
    store = replayed(core.snapshot(), [])
    assert [batch.revision for batch in store.batches(b"", 9)] == [9, 10, 11]
    assert store.compact_revision == 9
    assert seen(store) == seen(core.store)
    monkeypatch.undo()
    assert replayed(core.snapshot(), []).compact_revision == 9, "nothing is dropped without need"


def test_a_record_that_does_not_follow_is_refused():
    store = RevisionStore()
    core = EmbeddedCore(store, 0, Random(1))
    snapshot = encode_image(store.image())
    request = Txn(then=(Put(b"k", b"v"),))
    core.carry_out(0, request)
    record = core.record_of(request)
    with pytest.raises(ReplayError, match="follows revision 2"):
        replayed(snapshot, [record])
    with pytest.raises(ReplayError):
        replayed(snapshot, [b"short"])
    with pytest.raises(ReplayError):
        replayed(b"junk", [])


@pytest.mark.parametrize(
    "request_",
    [
        Txn((Compare(b"k", CompareTarget.VALUE, 1),)),
        Txn((Compare(b"k", CompareTarget.VERSION, b"1"),)),
        Txn(then=(Range(b"k", limit=-1),)),
        Range(b"k", revision=-1),
    ],
)
def test_a_request_that_no_caller_could_mean_is_refused(request_):
    with pytest.raises(CodecError):
        decode_request(encode_request(request_))


@settings(max_examples=200)
@given(st.one_of(st.binary(max_size=60), REQUESTS.map(encode_request).map(lambda data: data[:-1])))
def test_bytes_that_are_no_request_are_refused(data):
    with pytest.raises(CodecError):
        decode_request(data)


@pytest.mark.parametrize(
    ("tagged", "text"), [(("steal", []), "unknown kind 'steal'"), (("range", [1]), "range: ")]
)
def test_what_is_wrong_is_named(tagged, text):
    with pytest.raises(CodecError, match=text):
        decode_request(msgspec.msgpack.encode(tagged))
