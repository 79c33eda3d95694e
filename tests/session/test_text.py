"""The memcached text protocol over bytes; each test is a sentence of protocol.txt."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.session.node_facts import Limits
from dcp.session.state import ANSWER_BYTES_MAX, ClientLogin, SessionParts, SessionState
from dcp.session.text import LINE_BYTES_MAX, TextSession, begins_text
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.credentials import OpenDoor
from support.memory_node import START_NS, MemoryNode, node_for
from vbucket.engine.partition import VbState
from vbucket.model.ids import vbucket_of

START_S = START_NS // 1_000_000_000


class TextPeer:
    """A text client: bytes in, bytes out."""

    def __init__(self, node: MemoryNode, *, is_loopback: bool = True, **limits: int) -> None:
        self.node = node
        self.state = SessionState(
            SessionParts.of(node.engine, node.hub, node, Limits(**limits)),
            ClientLogin(OpenDoor(), peer_is_loopback=is_loopback),
        )
        self.session = TextSession(self.state)

    def send(self, data: bytes) -> bytes:
        """Send bytes; return the answers, whether or not they may leave yet."""
        self.session.receive(data, self.node.now_ns)
        answers = self.take()
        while self.state.is_full:
            self.session.resume(self.node.now_ns)
            answers += self.take()
        return answers

    def take(self) -> bytes:
        answers = b"".join(self.state.answers)
        self.state.answers.clear()
        return answers

    @property
    def must_wait(self) -> bool:
        return self.state.wait_group > self.node.engine.commits.committed_group


@pytest.fixture
def node(request: pytest.FixtureRequest) -> MemoryNode:
    return node_for(request)


@pytest.fixture
def peer(node: MemoryNode) -> TextPeer:
    return TextPeer(node)


def exchange(peer: TextPeer, script: str) -> None:
    """Run lines of "request => answer"; a space and | stand for the end of a line within each."""
    for line in script.strip().splitlines():
        request, _, answer = (part.strip() for part in line.partition("=>"))
        sent = request.replace(" | ", "\r\n").encode() + b"\r\n"
        expected = answer.replace(" | ", "\r\n").encode() + b"\r\n" * bool(answer)
        assert peer.send(sent) == expected, line


# -- what each command answers -------------------------------------------------------------------


def test_stores_and_reads(peer: TextPeer) -> None:
    exchange(
        peer,
        """
        get a                        => END
        set a 7 0 5 | hello          => STORED
        get a                        => VALUE a 7 5 | hello | END
        add a 0 0 1 | x              => NOT_STORED
        add b 4294967295 0 1 | x     => STORED
        get a none b                 => VALUE a 7 5 | hello | VALUE b 4294967295 1 | x | END
        replace a 1 0 3 | new        => STORED
        replace none 1 0 3 | new     => NOT_STORED
        append a 9 9 1 | !           => STORED
        prepend a 9 9 2 | >>         => STORED
        append none 0 0 1 | !        => NOT_STORED
        prepend none 0 0 1 | !       => NOT_STORED
        get a                        => VALUE a 1 6 | >>new! | END
        delete a                     => DELETED
        delete a                     => NOT_FOUND
        delete b 0                   => DELETED
        """,
    )
    assert peer.send(b"set e 0 0 0\r\n\r\nget e\r\n") == b"STORED\r\nVALUE e 0 0\r\n\r\nEND\r\n"


def test_cas(peer: TextPeer) -> None:
    peer.send(b"set a 0 0 1\r\n1\r\n")
    line = peer.send(b"gets a\r\n").split(b"\r\n")[0]
    cas = int(line.split()[4])
    assert line == b"VALUE a 0 1 %d" % cas
    assert peer.send(b"cas a 0 0 1 %d\r\n2\r\n" % (cas + 1)) == b"EXISTS\r\n"
    assert peer.send(b"cas a 0 0 1 0\r\n2\r\n") == b"EXISTS\r\n"
    assert peer.send(b"cas a 0 0 1 %d\r\n2\r\n" % cas) == b"STORED\r\n"
    assert peer.send(b"cas a 0 0 1 %d\r\n3\r\n" % cas) == b"EXISTS\r\n"
    assert peer.send(b"cas none 0 0 1 %d\r\n3\r\n" % cas) == b"NOT_FOUND\r\n"
    assert peer.send(b"get a\r\n") == b"VALUE a 0 1\r\n2\r\nEND\r\n"


def test_counters(peer: TextPeer) -> None:
    exchange(
        peer,
        f"""
        incr a 1                     => NOT_FOUND
        set a 5 0 2 | 10             => STORED
        incr a 5                     => 15
        decr a 6                     => 9
        get a                        => VALUE a 5 1 | 9 | END
        decr a 100                   => 0
        set a 0 0 20 | {2**64 - 1}   => STORED
        incr a 2                     => 1
        incr a x                     => CLIENT_ERROR invalid numeric delta argument
        incr a -1                    => CLIENT_ERROR invalid numeric delta argument
        set a 0 0 1 | x              => STORED
        incr a 1                     => CLIENT_ERROR cannot increment or decrement non-numeric value
        incr a                       => ERROR
        """,
    )


@pytest.mark.all_partitions
def test_touch_and_get_and_touch(node: MemoryNode, peer: TextPeer) -> None:
    exchange(
        peer,
        """
        touch a 1                    => NOT_FOUND
        gat 10 a                     => END
        set a 3 0 1 | x              => STORED
        touch a 100                  => TOUCHED
        gat 10 a none                => VALUE a 3 1 | x | END
        touch a nonsense             => CLIENT_ERROR invalid exptime argument
        gat nonsense a               => CLIENT_ERROR invalid exptime argument
        gat 1                        => ERROR
        touch a                      => ERROR
        """,
    )
    cas = node.engine.get(vbucket_of(b"a"), b"\0a")
    assert not isinstance(cas, int)
    assert peer.send(b"gats 10 a\r\n") == b"VALUE a 3 1 %d\r\nx\r\nEND\r\n" % cas.cas
    node.now_ns += 10_000_000_000
    assert peer.send(b"get a\r\n") == b"END\r\n"


@pytest.mark.parametrize(
    ("exptime", "lives_s"),
    [(1, 1), (2_592_000, 2_592_000), (START_S + 100, 100), (-1, 0), (START_S - 5, 0)],
)
def test_exptime_is_relative_absolute_or_past(
    node: MemoryNode, peer: TextPeer, exptime: int, lives_s: int
) -> None:
    assert peer.send(b"set a 0 %d 1\r\nx\r\n" % exptime) == b"STORED\r\n"
    if lives_s:
        node.now_ns += (lives_s - 1) * 1_000_000_000
        assert peer.send(b"get a\r\n").startswith(b"VALUE")
        node.now_ns += 1_000_000_000
    assert peer.send(b"get a\r\n") == b"END\r\n"


def test_the_server_commands(node: MemoryNode, peer: TextPeer) -> None:
    assert peer.send(b"version\r\n").startswith(b"VERSION ")
    assert peer.send(b"verbosity 1\r\n") == b"OK\r\n"
    assert peer.send(b"verbosity\r\nverbosity x\r\nverbosity 1 2\r\n") == b"ERROR\r\n" * 3
    assert peer.send(b"stats\r\n") == b"STAT pid 1\r\nEND\r\n"
    assert peer.send(b"stats nonsense\r\n") == b"CLIENT_ERROR no such statistics\r\n"
    assert peer.send(b"nonsense\r\n\r\nGET a\r\n") == b"ERROR\r\n" * 3
    assert not peer.state.is_closing
    assert peer.send(b"quit\r\nversion\r\n") == b""
    assert peer.state.is_closing


def test_a_name_with_line_breaks_makes_no_lines_of_statistics(
    peer: TextPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [("eq_dcpq:x\r\nEND\r\n\u2028:type", "producer"), ("data", "/my folder")]
    monkeypatch.setattr(peer.node, "stats", lambda _: names, raising=False)
    assert peer.send(b"stats dcp\r\n") == (
        b"STAT eq_dcpq:x END :type producer\r\nSTAT data /my folder\r\nEND\r\n"
    )


def test_flush_all_deletes_and_later_commands_wait_for_it(node: MemoryNode) -> None:
    peer = TextPeer(node)
    for index in range(3_000):
        peer.send(b"set k%d 0 0 1\r\nx\r\n" % index)
    node.merge()
    peer.session.receive(b"flush_all\r\nget k2999\r\n", node.now_ns)
    assert (peer.state.is_full, peer.take()) == (True, b"")
    assert peer.send(b"") == b"OK\r\nEND\r\n"
    assert peer.must_wait
    assert sum(part.item_count for part in node.engine.partitions) == 0
    assert peer.send(b"flush_all 0\r\n") == b"OK\r\n"
    assert peer.send(b"flush_all 5\r\n").startswith(b"CLIENT_ERROR")
    assert peer.send(b"flush_all noreply\r\nversion\r\n").startswith(b"VERSION")


@pytest.mark.parametrize(
    "command",
    [
        b"set a 0 0 1 noreply\r\nx\r\n",
        b"add a 0 0 1 noreply\r\nx\r\n",
        b"replace none 0 0 1 noreply\r\nx\r\n",
        b"append a 0 0 1 noreply\r\nx\r\n",
        b"prepend a 0 0 1 noreply\r\nx\r\n",
        b"cas a 0 0 1 5 noreply\r\nx\r\n",
        b"delete none noreply\r\n",
        b"incr none 1 noreply\r\n",
        b"decr none 1 noreply\r\n",
        b"touch none 1 noreply\r\n",
        b"flush_all noreply\r\n",
        b"verbosity 1 noreply\r\n",
        b"set a x 0 1 noreply\r\nx\r\n",
        b"set a 0 0 1 noreply\r\nxyz\r\n",
    ],
)
def test_noreply_silences_the_answer(peer: TextPeer, command: bytes) -> None:
    peer.send(b"set a 0 0 1\r\n1\r\n")
    assert peer.send(command + b"verbosity 1\r\n") == b"OK\r\n"


def test_a_set_without_reply_is_stored(peer: TextPeer) -> None:
    peer.send(b"set a 0 0 1 noreply\r\nx\r\n")
    assert peer.send(b"get a\r\n") == b"VALUE a 0 1\r\nx\r\nEND\r\n"


# -- what is wrong with a command ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (b"set\r\n", b"ERROR\r\n"),
        (b"set a 0 0\r\n", b"ERROR\r\n"),
        (b"get\r\n", b"ERROR\r\n"),
        (b"delete\r\n", b"ERROR\r\n"),
        (b"set a 0 0 -1\r\n", b"CLIENT_ERROR bad data chunk\r\n"),
        (b"set a 0 0 x\r\n", b"CLIENT_ERROR bad command line format\r\n"),
        (b"set a x 0 1\r\ng\r\n", b"CLIENT_ERROR bad command line format\r\n"),
        (b"set a 4294967296 0 1\r\ng\r\n", b"CLIENT_ERROR bad command line format\r\n"),
        (b"set a 0 x 1\r\ng\r\n", b"CLIENT_ERROR bad command line format\r\n"),
        (b"cas a 0 0 1 x\r\ng\r\n", b"CLIENT_ERROR bad command line format\r\n"),
        (b"set " + b"k" * 251 + b" 0 0 1\r\ng\r\n", b"CLIENT_ERROR bad command line format\r\n"),
        (b"get a " + b"k" * 251 + b"\r\n", b"CLIENT_ERROR bad command line format\r\n"),
        (b"incr " + b"k" * 251 + b" 1\r\n", b"CLIENT_ERROR bad command line format\r\n"),
        (b"touch " + b"k" * 251 + b" 1\r\n", b"CLIENT_ERROR bad command line format\r\n"),
        (b"set a 0 0 3\r\nlonger\r\n", b"CLIENT_ERROR bad data chunk\r\n"),
        (b"set a 0 0 11\r\nget a\r\nget b\r\n", b"CLIENT_ERROR bad data chunk\r\n"),
        (b"set a 0 0 101\r\n%b\r\n" % bytes(101), b"SERVER_ERROR object too large for cache\r\n"),
    ],
)
def test_bad_command_is_answered_once_and_its_data_skipped(
    node: MemoryNode, command: bytes, answer: bytes
) -> None:
    peer = TextPeer(node, value_bytes_max=100)
    assert peer.send(command + b"version\r\n").split(b"VERSION")[0] == answer
    assert not peer.state.is_closing
    assert peer.send(b"get a\r\n") == b"END\r\n"


def test_an_append_over_the_limit_is_too_large(node: MemoryNode) -> None:
    peer = TextPeer(node, value_bytes_max=10)
    peer.send(b"set a 0 0 6\r\n123456\r\n")
    answer = peer.send(b"append a 0 0 5\r\n12345\r\n")
    assert answer == b"SERVER_ERROR object too large for cache\r\n"


def test_the_longest_key_fits(peer: TextPeer) -> None:
    key = b"k" * 250
    assert peer.send(b"set %b 0 0 1\r\nx\r\n" % key) == b"STORED\r\n"
    assert peer.send(b"get %b\r\n" % key) == b"VALUE %b 0 1\r\nx\r\nEND\r\n" % key


def test_a_line_without_end_closes_the_connection(peer: TextPeer) -> None:
    assert peer.send(b"gat 0 " + b"a " * (LINE_BYTES_MAX // 2 - 4)) == b""
    assert not peer.state.is_closing
    assert peer.send(b"abcdef") == b"CLIENT_ERROR line too long\r\n"
    assert peer.state.is_closing
    assert peer.send(b"version\r\n") == b""


@pytest.mark.all_partitions
def test_a_partition_that_is_not_active_is_a_server_error(node: MemoryNode, peer: TextPeer) -> None:
    node.engine.partitions[vbucket_of(b"a")].state = VbState.DEAD
    for command in (b"get a b\r\n", b"set a 0 0 1\r\nx\r\n", b"incr a 1\r\n", b"touch a 1\r\n",
                    b"append a 0 0 1\r\nx\r\n", b"delete a\r\n", b"gat 1 a\r\n"):  # fmt: skip
        assert peer.send(command).startswith(b"SERVER_ERROR this key is on"), command


@pytest.mark.all_partitions
def test_strangers_are_not_served(node: MemoryNode) -> None:
    peer = TextPeer(node, is_loopback=False)
    assert peer.send(b"set a 0 0 1\r\nx\r\n").startswith(b"CLIENT_ERROR log in")
    assert peer.state.is_closing
    assert node.engine.partitions[vbucket_of(b"a")].high_seqno == 0


# -- what it shares with the binary protocol -----------------------------------------------------


def test_both_protocols_see_the_same_documents(node: MemoryNode, peer: TextPeer) -> None:
    peer.send(b"set a 9 0 3\r\nabc\r\n")
    found = node.connect().ask(Opcode.GET, key=b"a")
    assert (found.status, found.value, found.extras) == (Status.OK, b"abc", b"\0\0\0\x09")
    binary = pack_request(Opcode.SET, key=b"b", value=b"\r\nEND\r\n", extras=bytes(8))
    node.connect().send(binary)
    assert peer.send(b"get b\r\n") == b"VALUE b 0 7\r\n\r\nEND\r\n\r\nEND\r\n"


@pytest.mark.parametrize(
    "command",
    [b"set a 0 0 1\r\n2\r\n", b"delete a\r\n", b"incr a 1\r\n", b"append a 0 0 1\r\n2\r\n"],
)
def test_an_answer_waits_for_the_commit_of_what_it_tells(
    node: MemoryNode, peer: TextPeer, command: bytes
) -> None:
    peer.send(b"set a 0 0 1\r\n1\r\n")
    node.commit()
    assert not peer.must_wait
    peer.send(command)
    assert peer.must_wait
    node.commit()
    assert not peer.must_wait


@pytest.mark.parametrize(
    "command",
    [b"get a\r\n", b"gats 0 a\r\n", b"add a 0 0 1\r\n2\r\n", b"cas a 0 0 1 5\r\nx\r\n",
     b"incr a 1\r\n", b"touch a 0\r\n", b"flush_all\r\n"],
)  # fmt: skip
def test_an_answer_waits_for_what_others_have_not_committed(
    node: MemoryNode, command: bytes
) -> None:
    TextPeer(node).send(b"set a 0 0 1\r\nx\r\n")
    reader = TextPeer(node)
    reader.send(command)
    assert reader.must_wait


def test_a_get_of_many_large_values_is_answered_in_parts(node: MemoryNode, peer: TextPeer) -> None:
    value = bytes(1_000_000)
    peer.send(b"set a 0 0 1000000\r\n%b\r\n" % value)
    peer.session.receive(b"get" + b" a" * 20 + b"\r\nversion\r\n", node.now_ns)
    part = peer.take()
    assert peer.state.is_full
    assert ANSWER_BYTES_MAX < len(part) < ANSWER_BYTES_MAX + 1_100_000
    whole = part + peer.send(b"")
    answer = b"VALUE a 0 1000000\r\n%b\r\n" % value
    assert whole.startswith(answer * 20 + b"END\r\nVERSION")


def test_text_begins_with_a_letter_or_an_empty_line() -> None:
    texts = {byte for byte in range(256) if begins_text(byte)}
    lower = b"abcdefghijklmnopqrstuvwxyz"
    assert texts == set(lower + lower.upper() + b"\r\n")


@pytest.mark.parametrize("line", [b"\r\n", b"\n"])
def test_a_connection_that_begins_with_an_empty_line_goes_on(peer: TextPeer, line: bytes) -> None:
    assert peer.send(line) == b"ERROR\r\n"
    assert peer.send(b"set a 0 0 1\r\nx\r\n") == b"STORED\r\n"


def test_connection_that_begins_with_a_capital_ends(peer: TextPeer) -> None:
    """Its next lines could be commands in the body of a request of HTTP."""
    answer = peer.send(b"POST / HTTP/1.1\r\n\r\nset a 0 0 1\r\nx\r\n")
    assert answer == b"ERROR\r\n"
    assert peer.state.is_closing
    assert TextPeer(peer.node).send(b"get a\r\n") == b"END\r\n"


def test_a_capital_later_is_an_unknown_command(peer: TextPeer) -> None:
    assert peer.send(b"version\r\n").startswith(b"VERSION")
    assert peer.send(b"GET a\r\nget a\r\n") == b"ERROR\r\nEND\r\n"


# -- lines that are longer than what is held -----------------------------------------------------

MANY = [b"key-%06d" % number for number in range(120_000)]
"""More than 1 MiB of them in a line."""


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [777, 60_000, 1 << 22])
@pytest.mark.parametrize("name", [b"get", b"gets"])
def test_a_get_of_more_than_a_mebibyte_is_answered_as_it_arrives(
    peer: TextPeer, size: int, name: bytes
) -> None:
    stored = MANY[::1000]
    for key in stored:
        assert peer.send(b"set %b 7 0 1\r\nx\r\n" % key) == b"STORED\r\n"
    line = name + b" " + b" ".join(MANY) + b"\r\n"
    assert len(line) > 1 << 20
    answers, held = b"", 0
    for piece in pieces(line + b"version\r\n", size):
        answers += peer.send(piece)
        held = max(held, peer.state.held_bytes)
    shown = [answer for answer in answers.split(b"\r\n") if answer.startswith(b"VALUE")]
    assert [answer.split(b" ")[1] for answer in shown] == stored
    assert answers.count(b"END\r\n") == 1
    assert answers.partition(b"END\r\n")[2].startswith(b"VERSION")
    assert held < 3 * LINE_BYTES_MAX + size


def test_a_long_get_is_answered_before_it_ends(peer: TextPeer) -> None:
    assert peer.send(b"set a 0 0 1\r\nx\r\n") == b"STORED\r\n"
    answers = peer.send(b"get a " + b"b " * LINE_BYTES_MAX)
    assert answers == b"VALUE a 0 1\r\nx\r\n"
    assert peer.send(b"a\r\n") == b"VALUE a 0 1\r\nx\r\nEND\r\n"


def test_a_key_that_is_too_long_ends_a_long_get(peer: TextPeer) -> None:
    begun = peer.send(b"get " + b"b " * LINE_BYTES_MAX)
    assert begun == b""
    answers = peer.send(b"k" * 251 + b" b\r\nversion\r\n")
    assert answers.startswith(b"CLIENT_ERROR bad command line format\r\nVERSION")


def test_a_key_without_end_in_a_long_get_is_not_held(peer: TextPeer) -> None:
    peer.send(b"get " + b"b " * LINE_BYTES_MAX)
    assert peer.send(b"k" * 1_000_000) == b"CLIENT_ERROR bad command line format\r\n"
    assert peer.state.held_bytes < LINE_BYTES_MAX
    assert peer.send(b"k" * 1_000_000) == b""
    assert peer.send(b"\r\nversion\r\n").startswith(b"VERSION")


# -- any bytes, cut anywhere ---------------------------------------------------------------------

KEYS = st.sampled_from([b"a", b"b", b"key", b"k" * 250])
NUMBERS = st.sampled_from([b"0", b"1", b"7", b"100", b"-1", b"x", b"4294967296", b""])
NAMES = st.sampled_from(
    [b"get", b"gets", b"set", b"add", b"replace", b"append", b"prepend", b"cas", b"delete", b"incr",
     b"decr", b"touch", b"gat", b"gats", b"flush_all", b"stats", b"version", b"verbosity", b"nope"]
)  # fmt: skip
VALUES = st.sampled_from([b"", b"1", b"55", b"a\r\nb", b"get a\r\n", b"\0\xff"])
GOOD_STORES = st.builds(
    lambda name, key, value, tail: (
        b"%b %b 3 0 %d%b\r\n%b\r\n" % (name, key, len(value), tail, value)
    ),
    st.sampled_from([b"set", b"add", b"append"]),
    KEYS,
    VALUES,
    st.sampled_from([b"", b" noreply"]),
)  # fmt: skip
LINES = st.builds(
    lambda name, arguments, end: b" ".join([name, *arguments]) + end,
    NAMES,
    st.lists(st.one_of(KEYS, NUMBERS, st.just(b"noreply")), max_size=6),
    st.sampled_from([b"\r\n", b"\n"]),
)
STREAMS = st.lists(st.one_of(GOOD_STORES, LINES, st.binary(max_size=30)), max_size=12).map(b"".join)


@settings(max_examples=60)
@given(data=STREAMS, cuts=st.lists(st.integers(0, 600), max_size=8))
def test_bytes_cut_anywhere_get_the_same_answers(data: bytes, cuts: list[int]) -> None:
    whole = TextPeer(MemoryNode(partitions=8), value_bytes_max=200)
    expected = whole.send(data)
    parted = TextPeer(MemoryNode(partitions=8), value_bytes_max=200)
    places = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    answers = b"".join(parted.send(data[start:end]) for start, end in pairwise(places))
    assert answers == expected
    assert parted.state.is_closing == whole.state.is_closing
    assert all(line for line in answers.split(b"\r\n")[-2:-1])
    high = [part.high_seqno for part in whole.node.engine.partitions]
    assert [part.high_seqno for part in parted.node.engine.partitions] == high


@settings(max_examples=60)
@given(values=st.lists(st.binary(max_size=40), min_size=1, max_size=8))
def test_values_of_any_bytes_come_back(values: list[bytes]) -> None:
    peer = TextPeer(MemoryNode(partitions=8))
    request = b"".join(
        b"set k%d 0 0 %d\r\n%b\r\n" % (index, len(value), value)
        for index, value in enumerate(values)
    )
    assert peer.send(request) == b"STORED\r\n" * len(values)
    expected = b"".join(
        b"VALUE k%d 0 %d\r\n%b\r\n" % (index, len(value), value)
        for index, value in enumerate(values)
    )
    keys = b" ".join(b"k%d" % index for index in range(len(values)))
    assert peer.send(b"get %b\r\n" % keys) == expected + b"END\r\n"


@pytest.mark.parametrize("is_removed", [False, True])
def test_refused_set_removes_document_where_setting_says_so(is_removed: bool) -> None:
    limits = Limits(value_bytes_max=100, oversized_set_removes=is_removed)
    node = MemoryNode()
    peer = node.connect(limits=limits)
    session = TextSession(peer.state)
    for name in (b"add", b"replace", b"append", b"set"):
        session.receive(b"set k 0 0 1\r\nv\r\n%b k 0 0 101\r\n" % name, node.now_ns)
        session.receive(bytes(101) + b"\r\nget k\r\n", node.now_ns)
        is_gone = is_removed and name == b"set"
        found = b"END\r\n" if is_gone else b"VALUE k 0 1\r\nv\r\nEND\r\n"
        answers = b"".join(peer.state.answers)
        assert answers == b"STORED\r\nSERVER_ERROR object too large for cache\r\n" + found
        peer.state.answers.clear()


# -- keys of other nodes ---------------------------------------------------------------------------


def _key_elsewhere(node: MemoryNode, *, states: tuple[VbState, ...]) -> list[bytes]:
    """Return one key for each state, in a partition that is set to it."""
    keys: dict[int, bytes] = {}
    for number in range(1000):
        key = b"k%d" % number
        keys.setdefault(vbucket_of(key, node.partitions), key)
    chosen = list(keys.items())[: len(states)]
    for (vb_id, _), state in zip(chosen, states, strict=True):
        node.engine.partitions[vb_id].state = state
    return [key for _, key in chosen]


def test_key_of_another_node_is_refused_with_its_address(
    node: MemoryNode,
) -> None:
    text = TextPeer(node)
    key, dead = _key_elsewhere(node, states=(VbState.REPLICA, VbState.DEAD))
    for place in (key, dead):
        address = b"node-of-%d:11210" % vbucket_of(place, node.partitions)
        refusal = b"SERVER_ERROR this key is on another node of the cluster: " + address + b"\r\n"
        for command in (
            b"get %b", b"gets %b", b"gat 0 %b", b"delete %b", b"incr %b 1", b"decr %b 1",
            b"touch %b 0",
        ):  # fmt: skip
            assert text.send(command % place + b"\r\n") == refusal, command
        for command in (b"set %b 0 0 1", b"add %b 0 0 1", b"replace %b 0 0 1", b"append %b 0 0 1",
                        b"cas %b 0 0 1 5"):  # fmt: skip
            assert text.send(command % place + b"\r\nv\r\n") == refusal, command


def test_a_get_of_many_keys_stops_at_the_first_that_is_elsewhere(node: MemoryNode) -> None:
    """An answer without an error would say that the document does not exist."""
    text = TextPeer(node)
    (away,) = _key_elsewhere(node, states=(VbState.REPLICA,))
    here = next(
        b"h%d" % n
        for n in range(1000)
        if vbucket_of(b"h%d" % n, node.partitions) != vbucket_of(away, node.partitions)
    )
    assert text.send(b"set %b 0 0 1\r\nv\r\n" % here) == b"STORED\r\n"
    answer = text.send(b"get %b %b %b\r\nversion\r\n" % (here, away, here))
    values, refusal, version, _ = answer.split(b"\r\n")[-4:]
    assert values == b"v"
    assert refusal.startswith(b"SERVER_ERROR this key is on another node of the cluster: node-of-")
    assert version.startswith(b"VERSION ")


def test_meta_commands_are_unknown_and_change_nothing(node: MemoryNode) -> None:
    text = TextPeer(node)
    for command in (b"mg k v", b"ms k 1", b"md k", b"ma k", b"mn", b"me k"):
        assert text.send(command + b"\r\n") == b"ERROR\r\n"
    assert text.send(b"get k\r\n") == b"END\r\n"
