"""Logins: who failed too often, how many are in, and what the audit log is told."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.server import logins as logins_module
from dcp.server import users as users_module
from dcp.server.audit import AuditLog
from dcp.server.logging_setup import EventLog
from dcp.server.logins import (
    ALL_NAMES_FACTOR,
    PAIRS_MAX,
    WINDOW_S,
    FailedLogins,
    LoginLimits,
    Logins,
    Peer,
)
from dcp.server.users import USERS_FILE, Users
from dcp.session.rights import Rights, Role
from dcp.wire.status import Status

HERE = Peer("127.0.0.1", "127.0.0.1:5", "admin")


@pytest.fixture
def logins(tmp_path, monkeypatch):
    monkeypatch.setattr(users_module, "ITERATIONS", 4096)
    users = Users(tmp_path / USERS_FILE)
    users.add("ada", "secret1")
    audit = AuditLog(tmp_path / "audit.log", EventLog(logging.getLogger("dcpd")), bytes_max=1 << 20)
    yield Logins(users, audit, LoginLimits(3, 2))
    audit.close()


@pytest.fixture
def audited(logins):
    """Close the audit log and return its lines."""

    def read():
        logins.audit.close()
        return [json.loads(line) for line in logins.audit.path.read_text().splitlines()]

    return read


def plain(peer_logins, user, password):
    return peer_logins.start("PLAIN", f"\0{user}\0{password}".encode(), True)


# -- too many failures -----------------------------------------------------------------------------


def test_failures_block_one_user_of_one_address_until_the_minute_is_over():
    failed = FailedLogins(3)
    for when in (0.0, 10.0, 20.0):
        assert failed.blocked_s("a", "ada", when) == 0
        failed.failed("a", "ada", when)
    assert failed.blocked_s("a", "ada", 20.0) == 40.0
    assert failed.blocked_s("a", "bob", 20.0) == 0
    assert failed.blocked_s("b", "ada", 20.0) == 0
    assert failed.blocked_s("a", "ada", WINDOW_S) == 0
    failed.failed("a", "ada", WINDOW_S)
    assert failed.blocked_s("a", "ada", WINDOW_S) == 0, "a new minute counts from one"


def test_guessing_names_counts_against_the_address():
    failed = FailedLogins(1)
    for number in range(ALL_NAMES_FACTOR):
        assert failed.blocked_s("a", "new", 0.0) == 0
        failed.failed("a", f"user{number}", 0.0)
    assert failed.blocked_s("a", "new", 0.0) == WINDOW_S
    assert failed.blocked_s("b", "new", 0.0) == 0


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(logins_module, "PAIRS_MAX", 10)
    failed = FailedLogins(1)
    for number in range(100):
        failed.failed(f"host{number}", "ada", 0.0)
    assert len(failed._failures) <= 10 < PAIRS_MAX
    assert failed.blocked_s("host99", "ada", 0.0) == WINDOW_S


@given(st.lists(st.floats(0, 600), max_size=60), st.integers(1, 5))
def test_no_minute_takes_more_than_twice_the_limit(times, limit):
    """A window begins with its first failure, so two of them may lie in one minute."""
    failed = FailedLogins(limit)
    taken = []
    for when in sorted(times):
        if not failed.blocked_s("a", "ada", when):
            failed.failed("a", "ada", when)
            taken.append(when)
    for first in taken:
        assert sum(first <= when < first + WINDOW_S for when in taken) <= 2 * limit


# -- one connection --------------------------------------------------------------------------------


def test_the_right_password_is_refused_too_while_a_user_is_blocked(logins, audited):
    peer = logins.peer("10.0.0.1", "10.0.0.1:7", "kv")
    for _ in range(3):
        assert plain(peer, "ada", "wrong").status == Status.AUTH_ERROR
    blocked = plain(peer, "ada", "secret1")
    assert blocked.status == Status.AUTH_ERROR
    assert "too many wrong logins from 10.0.0.1" in blocked.why
    assert plain(logins.peer("10.0.0.2", "10.0.0.2:7", "kv"), "ada", "secret1").user == "ada"
    records = audited()
    assert [r["result"] for r in records] == ["refused"] * 4 + ["ok"]
    assert all(r["user"] == "ada" for r in records)
    assert "secret1" not in json.dumps(records)


def test_connections_of_a_user_are_counted_until_they_leave(logins):
    first, second, third = (logins.peer("h", f"h:{n}", "kv") for n in range(3))
    for peer in (first, second):
        assert plain(peer, "ada", "secret1").status == Status.OK
    assert plain(second, "ada", "secret1").status == Status.OK, "again on the same connection"
    crowded = plain(third, "ada", "secret1")
    assert (crowded.status, crowded.user) == (Status.EBUSY, None)
    first.leave()
    first.leave()
    assert plain(third, "ada", "secret1").status == Status.OK
    assert plain(logins.peer("h", "h:9", "kv"), "ada", "secret1").status == Status.EBUSY


def test_scram_is_audited_once_with_its_user(logins, audited):
    peer = logins.peer("h", "h:1", "kv-tls")
    begun = peer.start("SCRAM-SHA512", b"n,,n=ada,r=x", False)
    assert begun.status == Status.AUTH_CONTINUE
    nonce = begun.data.split(b",")[0]
    assert peer.step(begun.exchange, b"c=biws," + nonce + b",p=eA==").status == Status.AUTH_ERROR
    (record,) = audited()
    assert (record["user"], record["over"], record["result"]) == ("ada", "kv-tls", "refused")


def test_passwords_of_the_admin_interface(logins, audited):
    rights = logins.rights_of_password(HERE, "ada", "secret1")
    assert isinstance(rights, Rights)
    assert rights.has(Role.ADMIN)
    for _ in range(3):
        assert "is wrong" in logins.rights_of_password(HERE, "ada", "wrong")
    assert "too many wrong logins" in logins.rights_of_password(HERE, "ada", "secret1")
    assert [r["result"] for r in audited()] == ["refused"] * 4, "each login there would be noise"
