"""Commands of the text protocol that come together: the loops in C answer and store what Python
does for each of them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.session.node_facts import Limits
from dcp.session.text import TextSession
from support.memory_node import MemoryNode
from vbucket.engine.engine import Engine
from vbucket.engine.partition import VbState
from vbucket.model.datatype import SNAPPY, compressed
from vbucket.model.ids import vbucket_of
from vbucket.native import text_loops

LOOPS = text_loops()
pytestmark = pytest.mark.skipif(
    LOOPS is None, reason="the loops in C are not built (scripts/compile)"
)

PARTITIONS = 4
VALUE_BYTES_MAX = 60
KEYS = [b"key %d".replace(b" ", b":") % number for number in range(20)] + [b"k" * 250, b"k" * 251]
LINES = (
    *["set %b 0 0 %d\r\n"] * 6, *["get %b\r\n"] * 6,
    "set %b 4294967295 9 %d\r\n", "set %b 4294967296 0 %d\r\n", "set %b 0 4294967296 %d\r\n",
    "set %b 7 2592001 %d noreply\r\n", "set %b 0 -1 %d\r\n", "set %b 0 0 %d \r\n",
    "set  %b 0 0 %d\r\n", "set %b 0 0 %d\n", "set %b 0 0 -%d\r\n", "set %b 0 0 %d noreplY\r\n",
    "add %b 0 0 %d\r\n", "get %b\n", "get %b \r\n", "gets %b\r\n", "get %b k key:1 key:2 gone\r\n",
    "gets key:3 %b key:3\r\n", "get key:3 gone\r\n", "get gone %b\r\n", "get key:1  %b\r\n",
    "get key:1 %b \r\n", "get" + " key:5 gone %b" * 90 + " key:1\r\n",
    "delete %b\r\n", "incr %b 1\r\n", "set\r\n",
    "get\r\n", "verbosity 1\r\n", "set a b c %d\r\n", "cas %b 0 0 %d 1\r\n", "gat 9 %b\r\n",
    *["add %b 3 0 %d\r\n", "replace %b 0 9 %d\r\n", "delete %b\r\n", "incr %b 7\r\n"] * 2,
    "decr %b 18446744073709551615\r\n", "decr %b 18446744073709551616\r\n", "touch %b 9\r\n",
    "touch %b 0\r\n", "touch %b 9 noreply\r\n", "touch %b -1\r\n", "incr %b 1 noreply\r\n",
    "incr %b\r\n", "delete %b noreply\r\n", "delete noreply\r\n", "delete %b 0\r\n",
    "delete %b 1\r\n", "cas %b 0 0 %d 0\r\n", "cas %b 0 0 %d 18446744073709551615 noreply\r\n",
    "cas %b 0 0 %d\r\n", "add %b 0 0 %d noreply\r\n", "append %b 0 0 %d\r\n",
    "append %b 1 2 %d noreply\r\n", "prepend %b 0 0 %d\r\n", "replace %b 0 0 %d noreply\r\n",
    "cas %b 0 0 %d <cas>\r\n",
)  # fmt: skip
COMMANDS = st.lists(
    st.tuples(st.sampled_from(LINES), st.sampled_from(KEYS), st.integers(0, VALUE_BYTES_MAX + 1)),
    min_size=1,
    max_size=40,
)


HEADS = (b"set k 0 0 ", b"get ", b"set ", b"cas k 0 0 1 ", b"incr k ", b"delete ", b"touch k ")


def a_command(node: MemoryNode, line: str, key: bytes, value_bytes: int) -> bytes:
    text = line.encode()
    if b"<cas>" in text:
        meta = node.engine.newest_meta(vbucket_of(key, PARTITIONS), b"\0" + key)
        text = text.replace(b"<cas>", b"%d" % (9 if meta is None else meta.cas))
    is_store = b"%d" in text
    text = text.replace(b"%b", key).replace(b"%d", b"%d" % value_bytes)
    return text + b"v" * value_bytes + b"\r\n" if is_store else text


def a_session(*, has_loops: bool, has_marks: bool = False) -> tuple[MemoryNode, TextSession]:
    node = MemoryNode(partitions=PARTITIONS, item_cache_bytes=1 << 20)
    state = node.connect(limits=Limits(value_bytes_max=VALUE_BYTES_MAX)).state
    if has_marks:
        state.marks = []
    session = TextSession(state)
    for at, key in enumerate(KEYS[:12]):
        part = node.engine.partitions[vbucket_of(key, PARTITIONS)]
        value, datatype = (compressed(b"p" * 99), SNAPPY) if at % 5 == 4 else (b"%d" % at, 0)
        node.engine.put(part, b"\0" + key, b"\0" + key + value, at, 0, datatype)
        if at == 7:
            node.merge()
    node.commit()
    if not has_loops:
        node.engine.get_run = node.engine.set_run = None
    return node, session


def facts(node: MemoryNode) -> list[Any]:
    engine = node.engine
    found: list[Any] = [
        (part.high_seqno, part.max_cas, part.item_count, list(part.newest.items()))
        for part in engine.partitions
    ]
    found += [(layer._buckets, layer._seconds) for layer in engine.due.layers()]
    return [*found, engine.gets, engine.item_cache.hits, engine.keyspace.pending]


def heard(session: TextSession) -> list[Any]:
    state = session.state
    answers = b"".join(state.answers)
    state.answers.clear()
    return [answers, state.wait_group, state.close_reason, state.taken_bytes]


@settings(max_examples=150)
@given(commands=COMMANDS, cuts=st.lists(st.integers(0, 900), max_size=3), has_marks=st.booleans())
def test_together_as_one_by_one(
    commands: list[tuple[str, bytes, int]], cuts: list[int], has_marks: bool
) -> None:
    pairs = [a_session(has_loops=each, has_marks=has_marks) for each in (True, False)]
    data = b"".join(a_command(pairs[0][0], *command) for command in commands)
    borders = [0, *sorted(cuts), len(data)]
    for begin, end in pairwise(borders):
        for node, session in pairs:
            session.receive(data[begin:end], node.now_ns)
        assert heard(pairs[0][1]) == heard(pairs[1][1])
        assert facts(pairs[0][0]) == facts(pairs[1][0])


@settings(max_examples=150)
@given(data=st.binary(max_size=60), head=st.sampled_from(HEADS))
def test_crafted_bytes(data: bytes, head: bytes) -> None:
    pairs = [a_session(has_loops=each) for each in (True, False)]
    for node, session in pairs:
        session.receive(head + data + b"\r\nset a 0 0 1\r\nx\r\nget a\r\n", node.now_ns)
    assert heard(pairs[0][1]) == heard(pairs[1][1])
    assert facts(pairs[0][0]) == facts(pairs[1][0])


def test_plain_commands_are_taken_together() -> None:
    """Python sees none of them."""
    node, session = a_session(has_loops=True)
    handled = list[bytes]()

    def counted(*arguments: Any) -> Any:
        handled.append(arguments[2])
        return Engine.store(node.engine, *arguments)

    node.engine.store = counted  # type: ignore[method-assign]
    session.receive(b"add  none 0 0 1\r\nx\r\ndelete none 0\r\n", node.now_ns)
    session.state.answers.clear()
    handled.clear()
    session._take_line = handled.append  # type: ignore[method-assign]
    keys = [b"new:%d" % number for number in range(300)]
    session.receive(b"".join(b"set %b 5 0 1\r\nx\r\n" % key for key in keys), node.now_ns)
    assert b"".join(session.state.answers) == b"STORED\r\n" * 300
    session.state.answers.clear()
    node.commit()
    session.receive(b"".join(b"get %b\r\n" % key for key in [*keys, b"none"]), node.now_ns)
    expected = b"".join(b"VALUE %b 5 1\r\nx\r\nEND\r\n" % key for key in keys)
    assert b"".join(session.state.answers) == expected + b"END\r\n"
    session.state.answers.clear()
    for line, answer in (
        (b"add %b 0 0 1\r\n1\r\n", b"NOT_STORED"), (b"replace %b 0 0 1\r\n8\r\n", b"STORED"),
        (b"incr %b 2\r\n", b"10"), (b"decr %b 1\r\n", b"9"),
        (b"append %b 0 0 1\r\n0\r\n", b"STORED"), (b"prepend %b 0 0 1\r\n1\r\n", b"STORED"),
        (b"cas %b 0 0 1 5\r\nx\r\n", b"EXISTS"),
        (b"touch %b 100\r\n", b"TOUCHED"), (b"delete %b noreply\r\n", None),
        (b"delete %b\r\n", b"NOT_FOUND"), (b"incr %b 1\r\n", b"NOT_FOUND"),
        (b"cas %b 0 0 1 0\r\nx\r\n", b"NOT_FOUND"), (b"add %b 0 0 1\r\nx\r\n", b"STORED"),
    ):  # fmt: skip
        session.receive(b"".join(line % key for key in keys), node.now_ns)
        found = b"".join(session.state.answers)
        assert found == (b"" if answer is None else answer + b"\r\n") * len(keys), line
        session.state.answers.clear()
    assert handled == []


@pytest.mark.parametrize(
    "answer", [b"", bytes(24), b"\x81\x05" + bytes(22), b"\x81\xff" + bytes(22)]
)
def test_answers_of_no_changes_are_refused(answer: bytes) -> None:
    assert LOOPS is not None
    with pytest.raises(ValueError, match="no answers of changes"):
        LOOPS.outcomes([answer])


@pytest.mark.parametrize("data", [b"x", bytes(24), b"\x81\x0c" + b"\xff" * 22, bytes(28)])
def test_answers_that_are_none_are_refused(data: bytes) -> None:
    assert LOOPS is not None
    with pytest.raises(ValueError, match="no answers"):
        LOOPS.values(data, False, False)


def test_commands_that_are_for_python_have_few_prepared_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert LOOPS is not None
    prepared = list[int]()

    def counted(*arguments: Any) -> Any:
        result = LOOPS.gets(*arguments)
        prepared.append(len(result[1]))
        return result

    monkeypatch.setattr("dcp.session.text._LOOPS", LOOPS._replace(gets=counted))
    node, session = a_session(has_loops=True)
    for part in node.engine.partitions:
        part.state = VbState.DEAD
    lines = b"".join(b"get key:%d\r\n" % number for number in range(200))
    session.receive(lines, node.now_ns)
    assert b"".join(session.state.answers).count(b"SERVER_ERROR") == 200
    assert sum(prepared) <= 4 * 200
