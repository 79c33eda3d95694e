"""Logins of browsers: what ends a session, and that a token alone is nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp.server.access import browser_sessions
from dcp.server.access.browser_sessions import SESSION_S, BrowserSessions
from dcp.server.access.users import Users
from dcp.session.access.rights import FULL_RIGHTS, Role

PASSWORD = "a-long-password"


@pytest.fixture
def users(tmp_path: Path) -> Users:
    users = Users(tmp_path / "users.json", iterations=1)
    users.add("ada", PASSWORD)
    return users


@pytest.fixture
def sessions(users: Users) -> BrowserSessions:
    return BrowserSessions(users)


def is_open(sessions: BrowserSessions, token: str, now_s: float = 1.0, *, local: bool = True):
    return sessions.login_of(token, now_s, peer_is_loopback=local) is not None


def test_it_stands_for_the_user_with_the_rights_of_now(sessions, users: Users) -> None:
    token = sessions.open("ada", 0.0)
    found = sessions.login_of(token, 1.0, peer_is_loopback=False)
    assert found is not None
    assert found[0] == "ada"
    assert not found[1].has(Role.ADMIN)
    users.grant("ada", Role.ADMIN)
    found = sessions.login_of(token, 1.0, peer_is_loopback=False)
    assert found is not None
    assert found[1].has(Role.ADMIN)
    assert sessions.open("ada", 0.0) != token


@pytest.mark.parametrize(
    "end",
    [
        lambda sessions, users, token: sessions.close(token),
        lambda sessions, users, token: users.set_password("ada", "another-password"),
        lambda sessions, users, token: users.remove("ada"),
    ],
    ids=["log out", "new password", "removed"],
)
def test_it_ends(end, sessions, users: Users) -> None:
    token, other = sessions.open("ada", 0.0), sessions.open("guest", 0.0)
    assert is_open(sessions, token)
    end(sessions, users, token)
    assert not is_open(sessions, token)
    assert is_open(sessions, other)


def test_it_ends_after_its_time(sessions) -> None:
    token = sessions.open("ada", 10.0)
    assert is_open(sessions, token, SESSION_S + 9)
    assert not is_open(sessions, token, SESSION_S + 11)


def test_the_guest_has_one_from_this_machine_only(sessions) -> None:
    token = sessions.open("guest", 0.0)
    assert sessions.login_of(token, 1.0, peer_is_loopback=True) == ("guest", FULL_RIGHTS)
    assert not is_open(sessions, token, local=False)


def test_the_oldest_makes_room(sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser_sessions, "SESSIONS_MAX", 2)
    tokens = [sessions.open("ada", 0.0) for _ in range(3)]
    assert [is_open(sessions, token) for token in tokens] == [False, True, True]
    assert not is_open(sessions, "")
