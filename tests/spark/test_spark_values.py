"""JSON values: each document gives the same, whatever stands beside it, and none ends a task."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.spark.values import fitted, value_parser


@pytest.mark.parametrize(
    ("documents", "wanted"),
    [
        ([{"a": 1, "b": "x"}, {"a": 2, "c": 3}], [{"a": 1, "b": "x"}, {"a": 2, "b": None}]),
        ([{"a": "no number", "b": "x"}], [{"a": None, "b": "x"}]),
        ([[1]], [None]),
        (["text"], [None]),
    ],
)
def test_json_values(documents, wanted):
    shape = pa.struct([("a", pa.int32()), ("b", pa.string())])
    values = [json.dumps(document).encode() for document in documents]
    parsed = value_parser("json", shape)(pa.array([*values, b"{broken", None], pa.binary()))
    assert parsed.type == shape
    assert parsed.to_pylist() == [*wanted, None, None]


@pytest.mark.parametrize(
    ("value", "wanted", "result"),
    [
        ("2013-01-05", pa.date32(), "2013-01-05"),
        ("2013-01-05T10:00:00Z", pa.timestamp("us", tz="UTC"), "2013-01-05 10:00:00+00:00"),
        ("1.50", pa.decimal128(10, 2), "1.50"),
        (2**40, pa.int32(), "None"),
        (True, pa.int32(), "None"),
        ([1, "x"], pa.list_(pa.int64()), "[1, None]"),
        ({"k": 1}, pa.map_(pa.string(), pa.int64()), "{'k': 1}"),
    ],
)
def test_members_of_other_types(value, wanted, result):
    assert str(fitted(value, wanted)) == result


SCALARS = (
    pa.bool_(), pa.int8(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(),
    pa.binary(), pa.date32(), pa.timestamp("us", tz="UTC"), pa.timestamp("us"),
    pa.decimal128(10, 2),
)  # fmt: skip
TYPES = (
    *SCALARS,
    *(pa.list_(kind) for kind in SCALARS),
    *(pa.map_(pa.string(), kind) for kind in SCALARS),
    pa.struct([("a", pa.float64()), ("m", pa.map_(pa.string(), pa.list_(pa.int32())))]),
)
texts = st.sampled_from(["", "x", "1", "1.50", "2013-01-05", "2013-01-05T10:00:00Z", "9999-99"])
numbers = st.sampled_from([0, 1, -1, 300, 2**40, 2**70, 1.0, 1.5, 1e300])
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "m", "k"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.sampled_from(TYPES), st.lists(json_values, min_size=1, max_size=4))
def test_a_document_gives_the_same_alone_and_beside_others(kind, values):
    shape = pa.struct([("v", kind)])
    parse = value_parser("json", shape)
    raw = [json.dumps({"v": value}).encode() for value in values]
    together = parse(pa.array(raw, pa.binary()))
    assert together.type == shape
    alone = [parse(pa.array([item], pa.binary())).to_pylist()[0] for item in raw]
    assert together.to_pylist() == alone
    misfit = parse(pa.array([*raw, b'{"v": {"x": [[]]}}', b"[", None], pa.binary()))
    assert misfit.to_pylist()[: len(raw)] == alone
    assert misfit.to_pylist()[-2:] == [None, None]


def test_what_pyarrow_alone_would_take_or_break_on():
    for kind, value in (
        (pa.float64(), True),
        (pa.list_(pa.int64()), ""),
        (pa.map_(pa.string(), pa.int64()), [None]),
        (pa.map_(pa.string(), pa.int64()), []),
    ):
        parse = value_parser("json", pa.struct([("v", kind)]))
        assert parse(pa.array([json.dumps({"v": value}).encode()])).to_pylist() == [{"v": None}]
