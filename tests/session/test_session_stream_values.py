"""The JSON value of a stream request: what of a filter is taken and what is refused."""

from __future__ import annotations

import json

import pytest

from dcp.wire.feature import Feature
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer

VB = 7


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


@pytest.fixture
def filtering(node: MemoryNode) -> Peer:
    """A DCP connection with collections, so that its requests may carry a filter."""
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS, Feature.XERROR)
    peer.open(b"filtering")
    assert peer.control(b"enable_noop", b"true").status == Status.OK
    return peer


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"uid": "0"},
        {"uid": "fF"},
        {"collections": ["0"]},
        {"collections": ["0", "0"], "uid": "0"},
        {"scope": "0"},
        {"purge_seqno": "18446744073709551615"},
        {"unknown": {"deeply": [1, None]}, "uid": "0"},
    ],
)
def test_a_filter_that_names_only_what_is_there_is_taken(
    filtering: Peer, document: dict[str, object]
) -> None:
    assert filtering.stream(VB, value=json.dumps(document).encode()).status == Status.OK


@pytest.mark.parametrize(
    ("document", "status"),
    [
        ({"collections": ["8"]}, Status.UNKNOWN_COLLECTION),
        ({"collections": ["0", "8"]}, Status.UNKNOWN_COLLECTION),
        ({"scope": "8"}, Status.UNKNOWN_SCOPE),
        ({"collections": ["0"], "scope": "0"}, Status.EINVAL),
        ({"collections": "0"}, Status.EINVAL),
        ({"collections": [0]}, Status.EINVAL),
        ({"collections": []}, Status.EINVAL),
        ({"collections": ["0x0"]}, Status.EINVAL),
        ({"collections": ["-0"]}, Status.EINVAL),
        ({"collections": [""]}, Status.EINVAL),
        ({"collections": None}, Status.EINVAL),
        ({"scope": 0}, Status.EINVAL),
        ({"scope": "g"}, Status.EINVAL),
        ({"scope": None}, Status.EINVAL),
        ({"uid": 0}, Status.EINVAL),
        ({"uid": "0_0"}, Status.EINVAL),
        ({"purge_seqno": 5}, Status.EINVAL),
        ({"purge_seqno": "-5"}, Status.EINVAL),
        ({"purge_seqno": "5" * 5000}, Status.EINVAL),
        ({"purge_seqno": "٣"}, Status.EINVAL),
        ({"sid": 1}, Status.DCP_STREAMID_INVALID),
    ],
)
def test_a_filter_with_wrong_values_is_refused(
    filtering: Peer, document: dict[str, object], status: int
) -> None:
    value = json.dumps(document, ensure_ascii=False).encode()
    assert filtering.stream(VB, value=value).status == status
    assert not filtering.producer.has_stream(VB)


@pytest.mark.parametrize(
    "value",
    [
        b"x",
        b"[]",
        b'"uid"',
        b"{",
        b'{"uid":"\xff"}',
        b'{"a":' + b"[" * 50_000,
        b'{"uid":"0"}' + b" " * 100_000,
    ],
    ids=["text", "list", "string", "cut", "no-utf8", "deep", "long"],
)
def test_a_filter_that_is_no_json_object_is_einval(filtering: Peer, value: bytes) -> None:
    assert filtering.stream(VB, value=value).status == Status.EINVAL
    assert not filtering.state.is_closing
