"""The collections manifest and collection ids in keys."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbucket.model.manifest import (
    ID_MAX,
    INITIAL_MANIFEST,
    SET_UID_MAX,
    SYSTEM_COLLECTION,
    UID_MAX,
    InvalidManifestError,
    Manifest,
    ManifestError,
    ManifestEvent,
    NameTakenError,
    SystemEventKind,
    UnknownCollectionIdError,
    UnknownScopeError,
    collection_of,
    decode_leb128,
    encode_leb128,
    events_between,
    is_ahead,
    manifest_from_json,
    missing_events,
    parse_system_event,
    system_key,
)

KIND = SystemEventKind
INVENTORY = INITIAL_MANIFEST.create_scope("inventory")
HOTELS = INVENTORY.create_collection("inventory", "hotel", 3600)

# -- keys ------------------------------------------------------------------------------------------


@given(st.integers(0, ID_MAX), st.binary(max_size=5))
def test_ids_come_back_whatever_follows(number: int, rest: bytes) -> None:
    encoded = encode_leb128(number)
    assert len(encoded) <= 5
    assert decode_leb128(encoded + rest) == (number, len(encoded))
    assert collection_of(encoded + rest) == number


@given(st.binary(max_size=8))
def test_only_canonical_ids_are_taken(key: bytes) -> None:
    decoded = decode_leb128(key)
    if decoded is not None:
        number, length = decoded
        assert encode_leb128(number) == key[:length]


@pytest.mark.parametrize(
    "key",
    [b"", b"\x80", b"\x80\x00", b"\x88\x00k", b"\xff\xff\xff\xff\x1f", b"\xff" * 5 + b"\x01"],
)
def test_ids_that_are_none(key: bytes) -> None:
    assert decode_leb128(key) is None


# -- changes ---------------------------------------------------------------------------------------


def test_ids_begin_at_8_and_are_never_given_twice() -> None:
    now = HOTELS
    assert (now.scope_id("inventory"), now.collection_id("inventory.hotel")) == (8, 8)
    again = now.drop_collection("inventory", "hotel").create_collection("inventory", "hotel")
    assert again.collection_id("inventory.hotel") == 9
    again = again.drop_scope("inventory").create_scope("inventory")
    assert again.scope_id("inventory") == 9
    assert again.collection_id("inventory.hotel") is None
    assert again.uid == 6
    assert (now.has_dropped, again.has_dropped) == (False, True)
    assert [now.is_gone(number) for number in (0, 8, 9, 10)] == [False] * 4, "9 and 10 may come"
    assert [again.is_gone(number) for number in (0, 8, 9, 10)] == [False, True, True, False]


@pytest.mark.parametrize("path", ["_default._default", "._default", "_default.", "."])
def test_empty_names_are_the_default_ones(path: str) -> None:
    assert HOTELS.collection_id(path) == 0


def test_a_name_may_be_used_in_two_scopes() -> None:
    now = HOTELS.create_collection("_default", "hotel")
    assert now.collection_id("_default.hotel") == 9
    assert now.path_of(8) == "inventory.hotel"
    assert [item.collection_id for item in now.in_scope(0)] == [0, 9]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda now: now.create_scope("inventory"), NameTakenError),
        (lambda now: now.create_scope("_default"), ManifestError),
        (lambda now: now.create_scope("_mine"), ManifestError),
        (lambda now: now.create_scope("%mine"), ManifestError),
        (lambda now: now.create_scope("a.b"), ManifestError),
        (lambda now: now.create_scope(""), ManifestError),
        (lambda now: now.create_scope("x" * 252), ManifestError),
        (lambda now: now.create_collection("inventory", "hotel"), NameTakenError),
        (lambda now: now.create_collection("nowhere", "hotel"), UnknownScopeError),
        (lambda now: now.create_collection("", "hotel"), UnknownScopeError),
        (lambda now: now.create_collection("inventory", "a", -1), ManifestError),
        (lambda now: now.create_collection("inventory", "a", 2**31), ManifestError),
        (lambda now: now.drop_collection("inventory", "flight"), UnknownCollectionIdError),
        (lambda now: now.drop_collection("inventory", ""), UnknownCollectionIdError),
        (lambda now: now.drop_collection("nowhere", "hotel"), UnknownScopeError),
        (lambda now: now.drop_collection("_default", "_default"), ManifestError),
        (lambda now: now.drop_scope("_default"), ManifestError),
        (lambda now: now.drop_scope("nowhere"), UnknownScopeError),
        (lambda now: now.drop_scope(""), UnknownScopeError),
    ],
)
def test_what_is_refused_says_why(change, error: type[ManifestError]) -> None:
    with pytest.raises(error) as caught:
        change(HOTELS)
    assert len(str(caught.value)) > 20


def test_longest_names_and_limits_hold() -> None:
    now = INITIAL_MANIFEST.create_scope("x" * 251)
    for number in range(1199):
        now = now.create_collection("_default", f"c{number}")
    with pytest.raises(ManifestError, match="1200 collections"):
        now.create_collection("_default", "one-more")


# -- forms -----------------------------------------------------------------------------------------


def test_the_highest_numbers_are_refused_in_words() -> None:
    """None of them leads to a manifest whose events have no room for them."""
    document = HOTELS.json()
    with pytest.raises(InvalidManifestError, match="out of range"):
        manifest_from_json(HOTELS, document | {"uid": f"{SET_UID_MAX + 1:x}"})
    high = manifest_from_json(HOTELS, document | {"uid": f"{SET_UID_MAX:x}"})
    after = high.drop_collection("inventory", "hotel").create_scope("next")
    assert [len(event.value()) for event in events_between(high, after)]
    last = HOTELS._replace(uid=UID_MAX)
    for change in (
        lambda: last.create_scope("s"),
        lambda: last.create_collection("inventory", "c"),
        lambda: last.drop_collection("inventory", "hotel"),
        lambda: last.drop_scope("inventory"),
    ):
        with pytest.raises(ManifestError, match="the highest"):
            change()
    full = HOTELS._replace(next_scope_id=ID_MAX, next_collection_id=ID_MAX)
    full = full.create_scope("last").create_collection("last", "one")
    assert [len(event.value()) for event in events_between(HOTELS, full)]
    with pytest.raises(ManifestError, match="no scope id is left"):
        full.create_scope("more")
    with pytest.raises(ManifestError, match="no collection id is left"):
        full.create_collection("last", "more")


def test_json_has_ids_in_hexadecimal() -> None:
    now = HOTELS
    for number in range(5):
        now = now.create_collection("inventory", f"c{number}")
    document = now.json()
    assert document["uid"] == "7"
    assert [scope["name"] for scope in document["scopes"]] == ["_default", "inventory"]
    hotel, *_, last = document["scopes"][1]["collections"]
    assert hotel == {"name": "hotel", "uid": "8", "maxTTL": 3600}
    assert last == {"name": "c4", "uid": "d"}


@pytest.mark.parametrize("manifest", [INITIAL_MANIFEST, INVENTORY, HOTELS])
def test_documents_and_json_bring_back_the_same(manifest: Manifest) -> None:
    assert Manifest.from_document(manifest.to_document()) == manifest
    wire = json.loads(json.dumps(manifest.json()))
    assert manifest_from_json(INITIAL_MANIFEST, wire) == manifest


def scopes_json(uid: str, *others: dict, default: str = "0") -> dict:
    first = {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": default}]}
    return {"uid": uid, "scopes": [first, *others]}


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"uid": "1"},
        {"uid": 1, "scopes": []},
        {"uid": "zz", "scopes": []},
        scopes_json("9", {"name": "a", "uid": "8"}),
        scopes_json("9", {"name": "a", "uid": "8", "collections": [{"name": "b"}]}),
        scopes_json("9", {"name": "_a", "uid": "8", "collections": []}),
        scopes_json("9", default="9"),
        scopes_json("-9"),
        scopes_json("10000000000000000"),
        scopes_json("9", {"name": "a", "uid": "-8", "collections": []}),
        scopes_json(
            "9",
            {"name": "a", "uid": "8", "collections": [{"name": "b", "uid": "8", "maxTTL": -1}]},
        ),
        scopes_json("9", {"name": "_default", "uid": "8", "collections": []}),
        scopes_json("9", {"name": "a", "uid": "100000000", "collections": []}),
        scopes_json("9", {"name": "a", "uid": "8", "collections": [{"name": "b", "uid": "0"}]}),
        scopes_json("9", {"name": "a", "uid": "8", "collections": [{"name": "b!", "uid": "8"}]}),
    ],
)
def test_what_is_no_manifest(document: dict) -> None:
    with pytest.raises(InvalidManifestError):
        manifest_from_json(INITIAL_MANIFEST, document)


@pytest.mark.parametrize(
    "document",
    [
        scopes_json("2"),
        scopes_json("1", {"name": "inventory", "uid": "8", "collections": []}),
        scopes_json("9", {"name": "renamed", "uid": "8", "collections": []}),
        scopes_json("9", {"name": "reserved", "uid": "7", "collections": []}),
        scopes_json(
            "9",
            {"name": "inventory", "uid": "8", "collections": [{"name": "inn", "uid": "8"}]},
        ),
        scopes_json(
            "9", {"name": "inventory", "uid": "8", "collections": [{"name": "inn", "uid": "5"}]}
        ),
        {"uid": "9", "scopes": [{"name": "a", "uid": "9", "collections": []}]},
    ],
)
def test_a_manifest_that_cannot_follow(document: dict) -> None:
    with pytest.raises(ManifestError) as caught:
        manifest_from_json(HOTELS, document)
    assert not isinstance(caught.value, InvalidManifestError)


def test_a_dropped_id_cannot_come_back() -> None:
    dropped = manifest_from_json(HOTELS, scopes_json("3"))
    assert dropped.has_dropped
    back = {"name": "inventory", "uid": "8", "collections": []}
    with pytest.raises(ManifestError, match="scope id 8"):
        manifest_from_json(dropped, scopes_json("4", back))


# -- events ----------------------------------------------------------------------------------------


def test_events_come_in_order_and_the_last_names_the_manifest() -> None:
    after = HOTELS.drop_scope("inventory").create_scope("b").create_collection("b", "c", 5)
    events = events_between(HOTELS, after)
    assert [event.kind for event in events] == [
        KIND.DROP_COLLECTION,
        KIND.DROP_SCOPE,
        KIND.CREATE_SCOPE,
        KIND.CREATE_COLLECTION,
    ]
    assert [event.manifest_uid for event in events] == [2, 2, 2, 5]
    assert events[-1] == ManifestEvent(KIND.CREATE_COLLECTION, 5, 9, 9, "c", 5)
    assert events_between(after, after) == []


def test_values_are_those_of_the_wire() -> None:
    """kv_engine's own example: manifest 2, collection 8 with a maximum of 72,000 s."""
    event = ManifestEvent(KIND.CREATE_COLLECTION, 2, 0, 8, "mycollection", 72_000)
    assert event.value().hex() == "0000000000000002000000000000000800011940"
    assert event.version == 1
    plain = event._replace(max_ttl_s=0)
    assert (plain.version, plain.value().hex()) == (0, "00000000000000020000000000000008")
    scope = ManifestEvent(KIND.DROP_SCOPE, 3, 9)
    assert (scope.version, scope.value().hex()) == (0, "000000000000000300000009")


@pytest.mark.parametrize(
    "event",
    [
        ManifestEvent(KIND.CREATE_COLLECTION, 2, 1, 8, "c", 7),
        ManifestEvent(KIND.CREATE_COLLECTION, 2, 1, 8, "c"),
        ManifestEvent(KIND.DROP_COLLECTION, 2, 1, 8),
        ManifestEvent(KIND.CREATE_SCOPE, 2, 9, name="s"),
        ManifestEvent(KIND.DROP_SCOPE, 2, 9),
    ],
)
def test_events_come_back_from_the_wire(event: ManifestEvent) -> None:
    parsed = parse_system_event(event.kind, event.version, event.name.encode(), event.value())
    assert parsed == event
    assert system_key(event)[0] == SYSTEM_COLLECTION
    with pytest.raises(ValueError):
        parse_system_event(event.kind, event.version, b"", event.value() + b"!")
    with pytest.raises(ValueError):
        parse_system_event(2, 0, b"", event.value())


def test_events_are_told_again_where_they_are_missing() -> None:
    told = [system_key(event) for event in events_between(INITIAL_MANIFEST, HOTELS)]
    assert missing_events(told, HOTELS) == []
    assert [event.kind for event in missing_events(told[:1], HOTELS)] == [KIND.CREATE_COLLECTION]
    assert missing_events([], HOTELS) == events_between(INITIAL_MANIFEST._replace(uid=2), HOTELS)
    gone = HOTELS.drop_scope("inventory")
    missing = missing_events(told, gone)
    assert [event.kind for event in missing] == [KIND.DROP_COLLECTION, KIND.DROP_SCOPE]
    assert missing_events(told + [system_key(event) for event in missing], gone) == []


@pytest.mark.parametrize("last", [
    HOTELS.create_collection("inventory", "car"), HOTELS.create_scope("more"),
    HOTELS.drop_collection("inventory", "hotel"), HOTELS.drop_scope("inventory"),
])  # fmt: skip
def test_events_of_a_newer_manifest_are_noticed(last: Manifest) -> None:
    manifests = (INITIAL_MANIFEST, INVENTORY, HOTELS, last)
    keys: list[bytes] = []
    for told, before in zip(manifests, (INITIAL_MANIFEST, *manifests), strict=False):
        keys += [system_key(event) for event in events_between(before, told)]
        for manifest in manifests:
            assert is_ahead(keys, manifest) == (told.uid > manifest.uid)


# -- a changed maximum time to live ----------------------------------------------------------------


def test_max_ttl_of_a_collection_can_change_without_event() -> None:
    after = HOTELS.change_max_ttl("inventory", "hotel", 90)
    assert after.collections[8].max_ttl_s == 90
    assert after.uid == HOTELS.uid + 1
    assert after.change_max_ttl("inventory", "hotel", 0).collections[8].max_ttl_s == 0
    assert events_between(HOTELS, after) == []
    assert manifest_from_json(HOTELS, after.json()) == after, "cluster managers may change it, too"


@pytest.mark.parametrize(
    ("scope", "name", "max_ttl_s", "why"),
    [
        ("inventory", "hotel", -1, "maxTTL must be 0 to"),
        ("inventory", "hotel", 2**31, "maxTTL must be 0 to"),
        ("inventory", "none", 5, '"none" in scope "inventory" is not found'),
        ("none", "hotel", 5, '"none" is not found'),
        ("_default", "_default", 5, "the default collection has no maxTTL"),
    ],
)
def test_a_max_ttl_that_cannot_be(scope: str, name: str, max_ttl_s: int, why: str) -> None:
    with pytest.raises(ManifestError, match=re.escape(why)):
        HOTELS.change_max_ttl(scope, name, max_ttl_s)
