"""Operations on the text of a document: against a model, and where bytes and limits matter."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp.session.subdoc.json_path import DEPTH_MAX, SubdocError, parse_path
from dcp.session.subdoc.json_scan import IS_DONE, new_scan
from dcp.session.subdoc.json_text import COMPILED_KEYS_MAX, Finder, finder_of
from dcp.wire.status import Status
from tests.soak import subdoc
from tests.soak.subdoc import case_of, changed, check, check_request, looked_up, request_of


@settings(max_examples=1_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_the_model_agrees(draw: random.Random) -> None:
    check(*case_of(draw))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_a_request_is_its_operations_one_after_the_other(draw: random.Random) -> None:
    check_request(*request_of(draw))


def test_the_model_agrees_in_many_cases() -> None:
    assert subdoc.soak(10_000, 1) == 0


def change(
    name: str, document: bytes, path: bytes, value: bytes = b"", makes: bool = False
) -> bytes:
    return changed(name, document, parse_path(path), value, makes)


KEPT = [
    ("replace", b' {"a" : 1.50 ,\n"b":1e5} ', b"b", b"2", b' {"a" : 1.50 ,\n"b":2} '),
    ("dict_upsert", b'{ "a" :0.10 }', b"z", b"[ ]", b'{ "a" :0.10 ,"z":[ ]}'),
    ("dict_upsert", b'{"a":{"b":1},"c":{"b":1}}', b"c.b", b"2", b'{"a":{"b":1},"c":{"b":2}}'),
    ("dict_upsert", b'{"x\\"a":1,"a":1}', b"a", b"2", b'{"x\\"a":1,"a":2}'),
    ("dict_upsert", b'{"a":12,"b":{"a":1}}', b"b.a", b"7", b'{"a":12,"b":{"a":7}}'),
    ("dict_upsert", b'{"\\u0061":1}', b"a", b"2", b'{"\\u0061":2}'),
    ("dict_upsert", b"{ }", b"a.b.c", b"1", b'{ "a":{"b":{"c":1}}}'),
    ("dict_add", b'{"a":{"n":1.000}}', b"a.`x.y`", b"1", b'{"a":{"n":1.000,"x.y":1}}'),
    ("delete", b'{"a" : 1 , "b" : 2.0 }', b"b", b"", b'{"a" : 1  }'),
    ("delete", b'{"a" : 1 , "b" : 2.0 }', b"a", b"", b'{ "b" : 2.0 }'),
    ("delete", b'{"a":1}', b"a", b"", b"{}"),
    ("delete", b"[1, 2, 3]", b"[1]", b"", b"[1,  3]"),
    ("push_last", b"[1.0, 2 ]", b"", b"3,4", b"[1.0, 2 ,3,4]"),
    ("push_first", b"[ 1.0]", b"", b"0", b"[0, 1.0]"),
    ("push_first", b"[ ]", b"", b"0", b"[0 ]"),
    ("insert", b'["a", "b"]', b"[1]", b'"x"', b'["a", "x","b"]'),
    ("add_unique", b'["1", 1.0]', b"", b"1", b'["1", 1.0,1]'),
    ("counter", b'{"n": 41, "f":1.50}', b"n", b"1", b'{"n": 42, "f":1.50}'),
]


@pytest.mark.parametrize(("name", "document", "path", "value", "wanted"), KEPT)
def test_everything_else_keeps_its_bytes(
    name: str, document: bytes, path: bytes, value: bytes, wanted: bytes
) -> None:
    makes = name in {"dict_upsert", "dict_add"}
    for _ in range(4):  # paths are compiled when they are used again
        assert change(name, document, path, value, makes) == wanted


def test_of_a_name_that_stands_twice_the_last_one_counts() -> None:
    document = b'{"a":1,"b":0,"a":1,"a":12}'
    for _ in range(4):
        assert looked_up("get", document, parse_path(b"a")) == b"12"
        assert change("replace", document, b"a", b"3") == b'{"a":1,"b":0,"a":1,"a":3}'
    assert change("delete", document, b"a") == b'{"a":1,"b":0,"a":1}'
    inner = b'{"a":{"x":[1,"}"]},"a":2}'
    assert looked_up("get", inner, parse_path(b"a")) == b"2"
    assert status_of("get", inner, b"a.x") == Status.SUBDOC_PATH_MISMATCH


def status_of(name: str, document: bytes, path: bytes, value: bytes = b"1") -> Status:
    steps = parse_path(path)
    with pytest.raises(SubdocError) as refused:
        subdoc.run(name, document, steps, value)
    return refused.value.status


REFUSED = [
    ("get", b"not json", b"a", Status.SUBDOC_DOC_NOTJSON),
    ("get", b'{"a":1', b"a", Status.SUBDOC_DOC_NOTJSON),
    ("get", b'"text"', b"a", Status.SUBDOC_DOC_NOTJSON),
    ("get", b"", b"a", Status.SUBDOC_DOC_NOTJSON),
    ("count", b"5", b"", Status.SUBDOC_DOC_NOTJSON),
    ("get", b"[1, 2}", b"a", Status.SUBDOC_DOC_NOTJSON),
    ("push_last", b"[1,}", b"", Status.SUBDOC_DOC_NOTJSON),
    ("dict_upsert", b"\x00\x01", b"a", Status.SUBDOC_DOC_NOTJSON),
    ("get", b'{"a":[]}', b"a[-1]", Status.SUBDOC_PATH_ENOENT),
    ("count", b'{"a":5}', b"a", Status.SUBDOC_PATH_MISMATCH),
    ("push_last", b'{"a":{}}', b"a", Status.SUBDOC_PATH_MISMATCH),
    ("insert", b"[1]", b"[-1]", Status.SUBDOC_PATH_EINVAL),
    ("insert", b"[1]", b"[2]", Status.SUBDOC_PATH_ENOENT),
]


@pytest.mark.parametrize(("name", "document", "path", "status"), REFUSED)
def test_what_is_not_possible_has_its_status(
    name: str, document: bytes, path: bytes, status: Status
) -> None:
    for _ in range(4):
        assert status_of(name, document, path) == status


def depth_of(text: bytes) -> int:
    scan = new_scan(text)
    assert scan.step(len(text) + 1) == IS_DONE
    return scan.depth


def test_documents_have_32_levels() -> None:
    deep = b'{"a":' * 31 + b"1" + b"}" * 31
    path = b".".join([b"a"] * 31)
    assert depth_of(deep) == 31
    assert change("replace", deep, path, b"[1]").count(b"[") == 1
    assert status_of("replace", deep, path, b"[[1]]") == Status.SUBDOC_VALUE_ETOODEEP
    assert status_of("push_last", b"[]", b"", b"[" * 32 + b"]" * 32) == Status.SUBDOC_VALUE_ETOODEEP
    deeper = b"[" * 33 + b"]" * 33
    assert status_of("push_last", deeper, b"") == Status.SUBDOC_DOC_E2DEEP
    assert depth_of(deeper) > DEPTH_MAX
    assert depth_of(b'["[[[[[", {"\\"[[": [{}]}]') == 4


@pytest.mark.parametrize("name", ["replace", "push_last", "dict_upsert"])
def test_a_value_of_thousands_of_levels_is_refused(name: str) -> None:
    document = b'{"a":[]}'
    bomb = b"[" * 100_000 + b"]" * 100_000
    assert status_of(name, document, b"a", bomb) == Status.SUBDOC_VALUE_ETOODEEP
    assert status_of("get", b'{"b":' + bomb + b',"a":1}', b"c") == Status.SUBDOC_DOC_E2DEEP


def test_a_path_is_compiled_when_it_is_used_again() -> None:
    keys = parse_path(b"compiled.once")
    finder = finder_of(keys)  # type: ignore[arg-type] # these are keys
    assert isinstance(finder, Finder)
    document = b'{"compiled":{"once":1.0}}'
    assert finder.peek(document) is None
    found = finder.peek(document)
    assert found is not None
    assert bytes(found) == b"1.0"
    assert finder.peek(b'{"compiled":5}') is None
    assert finder.peek(b'{"compiled":{}}') is None
    assert finder.peek(b"{}") is None


def test_a_long_path_is_not_compiled() -> None:
    path = parse_path(b".".join([b"a"] * (COMPILED_KEYS_MAX + 1)))
    document = b'{"a":' * len(path) + b"1.0" + b"}" * len(path)
    assert [looked_up("get", document, path) for _ in range(4)] == [b"1.0"] * 4
    assert finder_of(path).peek(document) is None  # type: ignore[arg-type] # these are keys
    after = change("replace", document, b".".join([b"a"] * len(path)), b"2")
    assert after == document.replace(b"1.0", b"2")


def test_names_that_msgspec_takes_for_no_field_are_found() -> None:
    document = rb'{"q\"":1,"\\":2,"\n":3}'
    for _ in range(4):
        assert looked_up("get", document, parse_path(rb"q\"")) == b"1"
        assert looked_up("get", document, parse_path(rb"\\")) == b"2"
        assert looked_up("get", document, parse_path(rb"\n")) == b"3"
