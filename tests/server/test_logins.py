"""Logins: who failed too often, how many are in, and what the audit log is told."""

from __future__ import annotations

import asyncio
import json
import logging
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scramp import ScramClient

from dcp.server.access import password_checks
from dcp.server.access import users as users_module
from dcp.server.access.audit import AuditLog
from dcp.server.access.logins import (
    ALL_NAMES_FACTOR,
    PAIRS_MAX,
    WINDOW_S,
    FailedLogins,
    LoginLimits,
    Logins,
    Peer,
)
from dcp.server.access.users import CLUSTER_USER, USERS_FILE, Users, node_user
from dcp.server.observe.event_log import EventLog
from dcp.session.access.rights import FULL_RIGHTS, Rights, Role
from dcp.wire.status import Status

HERE = Peer("127.0.0.1", "127.0.0.1:5", "admin")


@pytest.fixture
async def logins(tmp_path):
    users = Users(tmp_path / USERS_FILE, iterations=4096)
    users.add("ada", "secret1", FULL_RIGHTS)
    audit = AuditLog(tmp_path / "audit.log", EventLog(logging.getLogger("dcpd")), bytes_max=1 << 20)
    logins = Logins(users, audit, LoginLimits(3, 2))
    yield logins
    await logins.close()
    audit.close()


@pytest.fixture
def derived(monkeypatch):
    """The stored keys that a password was derived for, and in which thread."""
    derivations = []
    original = users_module.password_matches

    def counted(mechanism, password, keys):
        derivations.append(threading.current_thread())
        return original(mechanism, password, keys)

    monkeypatch.setattr(users_module, "password_matches", counted)
    return derivations


@pytest.fixture
def audited(logins):
    """Close the audit log and return its lines."""

    def read():
        logins.audit.close()
        return [json.loads(line) for line in logins.audit.path.read_text().splitlines()]

    return read


def begin_plain(peer_logins, user, password):
    """Begin a login and return a future of its outcome."""
    outcome = asyncio.get_running_loop().create_future()
    peer_logins.on_outcome = outcome.set_result
    step = peer_logins.start("PLAIN", f"\0{user}\0{password}".encode(), True)
    if step is not None:
        outcome.set_result(step)
    return outcome


async def plain(peer_logins, user, password):
    return await begin_plain(peer_logins, user, password)


# -- too many failures -----------------------------------------------------------------------------


def test_failures_block_one_user_of_one_address_for_a_minute():
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


def test_memory_is_bounded():
    failed = FailedLogins(1, pairs_max=10)
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


async def test_right_password_is_refused_too_while_user_is_blocked(logins, audited):
    peer = logins.peer("10.0.0.1", "10.0.0.1:7", "kv")
    for _ in range(3):
        assert (await plain(peer, "ada", "wrong")).status == Status.AUTH_ERROR
    blocked = await plain(peer, "ada", "secret1")
    assert blocked.status == Status.AUTH_ERROR
    assert "too many wrong logins from 10.0.0.1" in blocked.why
    other = logins.peer("10.0.0.2", "10.0.0.2:7", "kv")
    assert (await plain(other, "ada", "secret1")).user == "ada"
    records = audited()
    assert [r["result"] for r in records] == ["refused"] * 4 + ["ok"]
    assert all(r["user"] == "ada" for r in records)
    assert "secret1" not in json.dumps(records)


async def test_a_blocked_login_derives_nothing(logins, derived, audited):
    peer = logins.peer("h", "h:1", "kv")
    for _ in range(3):
        await plain(peer, "ada", "wrong")
    assert len(derived) == 3
    assert threading.main_thread() not in derived
    for number in range(50):
        step = peer.start("PLAIN", b"\0ada\0guess%d" % number, True)
        assert step is not None, "refused at once"
        assert "too many wrong logins" in step.why
    assert len(derived) == 3
    assert [r["result"] for r in audited()] == ["refused"] * 53


async def test_guesses_that_come_together_do_not_get_around_the_limit(logins, derived, audited):
    """All of them come before the first is found wrong."""
    guesses = [
        begin_plain(logins.peer("h", f"h:{number}", "kv"), "ada", f"guess{number}")
        for number in range(20)
    ]
    steps = await asyncio.gather(*guesses)
    assert {step.status for step in steps} == {Status.AUTH_ERROR}
    assert 3 <= len(derived) < 3 + password_checks.THREADS
    assert sum("too many wrong logins" in step.why for step in steps) >= 20 - len(derived)
    assert [r["result"] for r in audited()] == ["refused"] * 20


async def test_clients_with_one_password_cost_one_derivation(logins, derived):
    peers = [logins.peer("h", f"h:{number}", "kv") for number in range(2)]
    steps = await asyncio.gather(*(begin_plain(peer, "ada", "secret1") for peer in peers))
    assert [step.status for step in steps] == [Status.OK] * 2
    assert len(derived) == 1


async def test_what_does_not_fit_is_refused_at_once_and_no_wrong_login(logins, audited):
    logins._checks = password_checks.PasswordChecks(logins._is_blocked, waiting_per_host_max=1)
    places = password_checks.THREADS + 1
    peers = [logins.peer("h", f"h:{number}", "kv") for number in range(places + 10)]
    outcomes = [begin_plain(peer, f"user{at}", "secret1") for at, peer in enumerate(peers)]
    refused = [outcome.result() for outcome in outcomes if outcome.done()]
    assert len(refused) == 10
    assert {step.status for step in refused} == {Status.ETMPFAIL}
    assert all("too many passwords wait to be checked" in step.why for step in refused)
    other = begin_plain(logins.peer("other", "other:1", "kv"), "ada", "secret1")
    assert (await other).status == Status.OK, "another address has places of its own"
    await asyncio.gather(*outcomes)
    assert sum(logins._failed._failures[pair][1] for pair in [("h", "")]) == places
    assert len(audited()) == len(peers) + 1


async def test_connection_gone_while_it_waits_is_not_logged_in(logins, audited):
    gone, stays = (logins.peer("h", f"h:{number}", "kv") for number in range(2))
    outcome = begin_plain(gone, "ada", "secret1")
    gone.leave()
    assert (await plain(stays, "ada", "secret1")).status == Status.OK
    assert not outcome.done()
    assert logins._connections == {"ada": 1}
    assert len(audited()) == 1


async def test_connections_of_a_user_are_counted_until_they_leave(logins):
    first, second, third = (logins.peer("h", f"h:{n}", "kv") for n in range(3))
    for peer in (first, second):
        assert (await plain(peer, "ada", "secret1")).status == Status.OK
    again = await plain(second, "ada", "secret1")
    assert again.status == Status.OK, "again on the same connection"
    crowded = await plain(third, "ada", "secret1")
    assert (crowded.status, crowded.user) == (Status.EBUSY, None)
    first.leave()
    first.leave()
    assert (await plain(third, "ada", "secret1")).status == Status.OK
    late = logins.peer("h", "h:9", "kv")
    assert (await plain(late, "ada", "secret1")).status == Status.EBUSY


async def test_scram_is_audited_once_with_its_user(logins, audited):
    peer = logins.peer("h", "h:1", "kv-tls")
    begun = peer.start("SCRAM-SHA512", b"n,,n=ada,r=x", False)
    assert begun.status == Status.AUTH_CONTINUE
    nonce = begun.data.split(b",")[0]
    assert peer.step(begun.exchange, b"c=biws," + nonce + b",p=eA==").status == Status.AUTH_ERROR
    (record,) = audited()
    assert (record["user"], record["over"], record["result"]) == ("ada", "kv-tls", "refused")


async def test_passwords_of_the_admin_interface(logins, audited, derived):
    rights = await logins.rights_of_password(HERE, "ada", "secret1")
    assert isinstance(rights, Rights)
    assert rights.has(Role.ADMIN)
    for _ in range(3):
        assert "is wrong" in await logins.rights_of_password(HERE, "ada", "wrong")
    for _ in range(5):
        assert "too many wrong logins" in await logins.rights_of_password(HERE, "ada", "secret1")
    assert len(derived) == 4
    assert threading.main_thread() not in derived
    assert [r["result"] for r in audited()] == ["refused"] * 8, "each login there would be noise"


async def test_an_admin_request_that_is_given_up_leaves_nothing_behind(logins):
    asked = asyncio.ensure_future(logins.rights_of_password(HERE, "ada", "secret1"))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert (await plain(logins.peer("h", "h:1", "kv"), "ada", "secret1")).status == Status.OK


async def test_wrong_logins_of_a_node_count_for_it_at_that_address(logins, audited):
    """Nodes have one address, where all of them run on one machine or behind one router."""
    logins.users.let_cluster_in(["s" * 43])
    for _ in range(3):
        assert scram(logins, "w" * 43, "b").status == Status.AUTH_ERROR
    step = scram(logins, "s" * 43, "b")
    assert step.status == Status.AUTH_ERROR, "it backs off, whatever its secret is now"
    assert "too many wrong logins of node 'b' from 127.0.0.1; try again in" in step.why
    # Neither its neighbours nor users nor a node of this name elsewhere notice.
    assert scram(logins, "s" * 43, "c").status == Status.OK
    assert scram(logins, "s" * 43, "b", host="elsewhere").status == Status.OK
    assert (await plain(logins.peer(*HERE[:3]), "ada", "secret1")).status == Status.OK
    refused = [line for line in audited() if line["result"] == "refused"]
    assert [line["user"] for line in refused] == ["@cluster/b"] * 4
    assert [line["why"] for line in refused[:3]] == ["the secret is not that of this cluster"] * 3


async def test_names_of_nodes_that_are_made_up_take_bounded_memory(logins, monkeypatch):
    """And what is known of wrong logins of users is not forgotten for them."""
    logins.users.let_cluster_in(["s" * 43])
    for _ in range(3):
        await plain(logins.peer(*HERE[:3]), "ada", "wrong")
    monkeypatch.setattr(logins._failed_nodes, "_pairs_max", 20)
    for number in range(50):
        assert scram(logins, "w" * 43, f"x{number}").status == Status.AUTH_ERROR
    assert len(logins._failed_nodes._failures) == 20
    assert "too many wrong logins" in logins.refusal(HERE, "ada")
    for name in ("", "a" * 65, "a/b", "\N{SNOWMAN}"):  # no names of nodes: unknown users
        assert scram(logins, "s" * 43, name).status == Status.AUTH_ERROR
    assert len(logins._failed_nodes._failures) == 20


async def test_a_password_for_the_nodes_user_counts_as_any_other(logins):
    logins.users.let_cluster_in(["s" * 43])
    for _ in range(3):
        step = await plain(logins.peer(*HERE[:3]), CLUSTER_USER, "guess-guess")
        assert step.status == Status.AUTH_ERROR
    assert "too many wrong logins" in logins.refusal(HERE, CLUSTER_USER)


def scram(logins, secret, node, host="127.0.0.1"):
    """Log in as a node; return the last step."""
    client = ScramClient(["SCRAM-SHA-512"], node_user(node), secret)
    peer_logins = logins.peer(host, f"{host}:1", "kv")
    step = peer_logins.start("SCRAM-SHA512", client.get_client_first().encode(), True)
    if step.status != Status.AUTH_CONTINUE:
        return step
    client.set_server_first(step.data.decode())
    step = peer_logins.step(step.exchange, client.get_client_final().encode())
    peer_logins.leave()
    return step
