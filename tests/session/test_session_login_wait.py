"""A login whose outcome comes later: nothing is taken before it, and the order of answers holds."""

from __future__ import annotations

import pytest

from dcp.session.access.auth import AuthStep
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer

IN = AuthStep(Status.OK, user="alice", claimed="alice")
WRONG = AuthStep(Status.AUTH_ERROR, claimed="alice")


class LaterDoor:
    """PLAIN is answered later; SCRAM at once."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def mechanisms(self, peer_is_loopback: bool) -> list[str]:
        return ["SCRAM-SHA512", "PLAIN"]

    def start(self, mechanism: str, initial: bytes, peer_is_loopback: bool) -> AuthStep | None:
        if mechanism != "PLAIN":
            return AuthStep(Status.AUTH_CONTINUE, b"server first", "exchange")
        self.asked.append(initial)
        return None

    def step(self, exchange: object, message: bytes) -> AuthStep:
        return IN


class Waiting:
    """A stranger's connection, driven as the shell does."""

    def __init__(self) -> None:
        self.node = MemoryNode()
        self.peer: Peer = self.node.connect(is_loopback=False)
        self.state = self.peer.state
        self.door = LaterDoor()
        self.state.login.authenticator = self.door

    def receive(self, *frames: bytes) -> list[Frame]:
        self.peer.session.receive(b"".join(frames), self.node.now_ns)
        self.peer.session.ask_logins(self.node.now_ns)
        return self.peer._answers()

    def conclude(self, step: AuthStep) -> list[Frame]:
        self.peer.session.login_checked(step)
        answers = self.peer._answers()
        self.peer.session.resume(self.node.now_ns)
        self.peer.session.ask_logins(self.node.now_ns)
        return answers + self.peer._answers()


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


def plain(opaque: int = 0) -> bytes:
    return pack_request(Opcode.SASL_AUTH, key=b"PLAIN", value=b"\0alice\0secret", opaque=opaque)


GET = pack_request(Opcode.GET, key=b"k", opaque=9)
HELLO = pack_request(Opcode.HELLO, value=Feature.XERROR.to_bytes(2, "big"), opaque=1)
LIST = pack_request(Opcode.SASL_LIST_MECHS, opaque=2)


def test_what_comes_after_it_waits_and_is_answered_in_order(waiting: Waiting) -> None:
    before = waiting.receive(HELLO, LIST, plain(3), GET, pack_request(Opcode.NOOP, opaque=10))
    assert [frame.opaque for frame in before] == [1, 2]
    assert waiting.state.is_full
    assert waiting.state.held_bytes == len(GET) + 24
    after = waiting.conclude(IN)
    assert [frame.opaque for frame in after] == [3, 9, 10]
    assert [frame.status for frame in after] == [Status.OK, Status.KEY_ENOENT, Status.OK]
    assert not waiting.state.is_full
    assert waiting.state.held_bytes == 0


def test_nothing_is_taken_before_the_outcome(waiting: Waiting) -> None:
    waiting.receive(plain())
    for _ in range(3):
        waiting.peer.session.resume(waiting.node.now_ns)
        assert waiting.receive(GET) == []
        assert waiting.state.is_full
    assert waiting.state.held_bytes == 3 * len(GET)
    assert len(waiting.conclude(IN)) == 4
    assert waiting.door.asked == [b"\0alice\0secret"]


def test_the_password_is_not_kept(waiting: Waiting) -> None:
    waiting.receive(plain())
    assert waiting.state.login.request is not None
    assert b"secret" not in b"".join(waiting.state.login.request[6:])


def test_a_refusal_is_answered_and_what_follows_is_refused_too(waiting: Waiting) -> None:
    waiting.receive(plain(3), GET)
    answers = waiting.conclude(WRONG)
    assert [(frame.opaque, frame.status) for frame in answers] == [
        (3, Status.AUTH_ERROR),
        (9, Status.EACCESS),
    ]
    assert not waiting.peer.session.is_logged_in


@pytest.mark.parametrize("status", [Status.EBUSY, Status.ETMPFAIL])
def test_a_login_that_was_put_off_is_no_wrong_one(waiting: Waiting, status: Status) -> None:
    for _ in range(waiting.state.shared.limits.login_failures_max + 1):
        waiting.receive(plain())
        (answer,) = waiting.conclude(AuthStep(status, claimed="alice", why="later"))
        assert answer.status == status
    assert not waiting.state.is_closing
    for _ in range(waiting.state.shared.limits.login_failures_max):
        assert not waiting.state.is_closing
        waiting.receive(plain())
        waiting.conclude(WRONG)
    assert waiting.state.is_closing


def test_one_login_after_another_on_the_same_connection(waiting: Waiting) -> None:
    waiting.receive(plain(3), plain(4), GET)
    assert [frame.opaque for frame in waiting.conclude(WRONG)] == [3]
    assert [frame.opaque for frame in waiting.conclude(IN)] == [4, 9]
    assert waiting.state.login.user == "alice"


def test_scram_is_answered_at_once(waiting: Waiting) -> None:
    begun, ended, got = waiting.receive(
        pack_request(Opcode.SASL_AUTH, key=b"SCRAM-SHA512", value=b"first"),
        pack_request(Opcode.SASL_STEP, key=b"SCRAM-SHA512", value=b"final"),
        GET,
    )
    assert (begun.status, ended.status) == (Status.AUTH_CONTINUE, Status.OK)
    assert got.status == Status.KEY_ENOENT


def test_authenticator_is_not_asked_while_packet_is_handled(waiting: Waiting) -> None:
    waiting.peer.session.receive(plain(3) + GET, waiting.node.now_ns)
    assert waiting.door.asked == []
    question = waiting.state.login.question
    assert question is not None
    assert (question.mechanism, question.message) == ("PLAIN", b"\0alice\0secret")
    waiting.peer.session.ask_logins(waiting.node.now_ns)
    assert waiting.door.asked == [b"\0alice\0secret"]
    assert waiting.state.login.question is None, "it is asked once"


def test_a_connection_that_goes_away_keeps_no_password(waiting: Waiting) -> None:
    waiting.peer.session.receive(plain(3), waiting.node.now_ns)
    waiting.peer.session.drop_received()
    assert waiting.state.login.question is None


def test_what_a_handler_calls_cannot_enter_the_session(waiting: Waiting) -> None:
    session, now_ns = waiting.peer.session, waiting.node.now_ns

    class CallsBack(LaterDoor):
        def mechanisms(self, peer_is_loopback: bool) -> list[str]:
            session.receive(GET, now_ns)
            return []

    waiting.state.login.authenticator = CallsBack()
    with pytest.raises(AssertionError, match="may call the session"):
        session.receive(LIST, now_ns)
