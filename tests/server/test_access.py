"""Roles on open connections, limits that say which setting they are, audit: a live server."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.cli.dcpctl import run
from dcp.server.access.users import USERS_FILE, Users
from dcp.session.access.rights import Role
from dcp.wire.frame import HEADER
from dcp.wire.message import OPEN_EXTRAS, OpenFlag, StreamRequest, pack_stream_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.credentials import new_password, with_password
from support.raw_client import RawClient, context_of
from support.server import DcpdProcess
from support.waiting import until

WAIT_S = 20.0
PASSWORD = "secret1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DcpdProcess]:
    with DcpdProcess(tmp_path_factory.mktemp("access") / "data") as process:
        yield process


@pytest.fixture
def user(server: DcpdProcess) -> Callable[..., int]:
    """dcpctl user ..., as guest."""
    return lambda *arguments: run(["--server", server.address, "user", *arguments])


def audit(server: DcpdProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (server.data / "audit.log").read_text().splitlines()]


def audited(server: DcpdProcess, **wanted: object) -> bool:
    return any(wanted.items() <= record.items() for record in audit(server))


# -- roles while connections are open --------------------------------------------------------------


def test_grants_and_revocations_count_at_once(server, user, capfd):
    assert user("add", "ada", "--role", "read", *new_password(PASSWORD)) == 0
    with RawClient(server.port, "ada", PASSWORD) as ada:
        assert "it takes the role write" in context_of(ada.set(b"x:1"))
        assert user("grant", "ada", "write", "--prefix", "x:") == 0
        assert ada.set(b"x:1").status == Status.OK
        assert "keys beginning with 'x:' only" in context_of(ada.set(b"y:1"))
        assert user("revoke", "ada", "write", "--prefix", "x:") == 0
        assert "it takes the role write" in context_of(ada.set(b"x:1"))
    capfd.readouterr()
    assert user("show", "ada", "-o", "plain", "--no-headers") == 0
    assert capfd.readouterr().out == "read\t\t\n"
    assert user("show", "nobody") == 3


def test_the_role_of_nodes_is_granted_by_name_only(server, user, capfd):
    assert user("add", "n1", "--role", "all", *new_password(PASSWORD)) == 0
    capfd.readouterr()
    assert user("show", "n1", "-o", "plain", "--no-headers") == 0
    assert capfd.readouterr().out.split() == ["read", "write", "stream", "admin"]
    assert user("grant", "n1", "replicate") == 0
    assert user("grant", "n1", "replicate", "--prefix", "x:") != 0
    assert user("add", "n2", "--role", "replicate", *new_password(PASSWORD)) == 0
    capfd.readouterr()
    assert user("show", "n2", "-o", "plain", "--no-headers") == 0
    assert capfd.readouterr().out.split() == ["replicate"]
    with RawClient(server.port, "n2", PASSWORD) as node:
        open_stream(node)
        alone = node.ask(Opcode.DCP_CONTROL, key=b"x_replicate", value=b"{}")
        assert (alone.status, "alone" in context_of(alone)) == (Status.NOT_SUPPORTED, True)
        assert user("revoke", "n2", "replicate") == 0
        assert node.is_closed(), "a connection that is open for DCP"


def test_a_removed_user_is_told_to_log_in_again(server, user):
    assert user("add", "gone", "--role", "write", *new_password(PASSWORD)) == 0
    with RawClient(server.port, "gone", PASSWORD) as gone:
        assert gone.set(b"k").status == Status.OK
        assert user("remove", "gone") == 0
        stale = gone.set(b"k")
        assert stale.status == Status.AUTH_STALE
        assert "user 'gone' was removed" in context_of(stale)
        assert gone.log_in("gone", PASSWORD).status == Status.AUTH_ERROR
        assert gone.log_in("guest", "guest").status == Status.OK
        assert gone.set(b"k").status == Status.OK


def test_a_file_changed_by_another_process_counts_soon(server, user):
    assert user("add", "edited", "--role", "all", *new_password(PASSWORD)) == 0
    with RawClient(server.port, "edited", PASSWORD) as edited:
        Users(server.data / USERS_FILE).revoke("edited", Role.WRITE)
        until(lambda: edited.set(b"k").status == Status.EACCESS)


def open_stream(client: RawClient) -> None:
    opened = client.ask(
        Opcode.DCP_OPEN, key=b"access", extras=OPEN_EXTRAS.pack(0, OpenFlag.PRODUCER)
    )
    assert opened.status == Status.OK, opened


@pytest.mark.parametrize("change", [("revoke", "s1", "stream"), ("remove", "s2")])
def test_a_stream_ends_with_the_role(server, user, change):
    name = change[1]
    assert user("add", name, "--role", "all", *new_password(PASSWORD)) == 0
    with RawClient(server.port, name, PASSWORD) as streamer:
        open_stream(streamer)
        assert user(*change) == 0
        assert streamer.is_closed()


def test_a_stream_ends_when_reading_becomes_restricted(server, user):
    arguments = ("--role", "stream", *new_password(PASSWORD))
    assert user("add", "s3", *arguments) == 0
    with RawClient(server.port, "s3", PASSWORD) as streamer:
        open_stream(streamer)
        assert user("grant", "s3", "write", "--prefix", "x:") == 0
        assert streamer.set(b"x:1").status == Status.OK, "which is no reason to close"
        assert user("grant", "s3", "read", "--prefix", "x:") == 0
        assert streamer.is_closed()


def test_a_restricted_user_has_no_streams(server, user):
    arguments = ("--role", "read", "--prefix", "x:", *new_password(PASSWORD))
    assert user("add", "narrow", *arguments) == 0
    assert user("grant", "narrow", "stream") == 0
    with RawClient(server.port, "narrow", PASSWORD) as narrow:
        refused = narrow.ask(
            Opcode.DCP_OPEN, key=b"n", extras=OPEN_EXTRAS.pack(0, OpenFlag.PRODUCER)
        )
        assert "a stream carries every key" in context_of(refused)
    assert user("grant", "narrow", "stream", "--prefix", "x:") == 2


def test_the_admin_interface_takes_the_role_admin(server, user, capfd):
    arguments = (
        "--role",
        "read",
        "--role",
        "write",
        *new_password(PASSWORD),
    )
    assert user("add", "plain", *arguments) == 0
    login = [
        "--server",
        server.address,
        "--user",
        "plain",
        *with_password(PASSWORD),
    ]
    capfd.readouterr()
    for command in (
        ["user", "list"],
        ["user", "remove", "ada"],
        ["vb", "branch", "1", "--at", "0"],
    ):
        assert run([*login, *command]) == 7, command
        said = capfd.readouterr().err
        assert "it needs the role admin" in said
        assert "dcpctl user grant plain admin" in said
    until(lambda: audited(server, event="denied", user="plain", role="admin"))


def test_guest_and_anonymous_access_can_be_switched_off(tmp_path):
    data = tmp_path / "data"
    with DcpdProcess(data) as server:
        add = [
            "--server",
            server.address,
            "user",
            "add",
            "root",
            "--role",
            "all",
            *new_password(PASSWORD),
        ]
        assert run(add) == 0
        assert server.stop() == 0
    with DcpdProcess(data, "--guest", "off", "--anonymous", "off") as server:
        with RawClient(server.port) as stranger:
            assert "log in first" in context_of(stranger.set(b"k"))
            assert stranger.log_in("guest", "guest").status == Status.AUTH_ERROR
            assert stranger.log_in("root", PASSWORD).status == Status.OK
            assert stranger.set(b"k").status == Status.OK
        with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as text:
            text.sendall(b"get k\r\n")
            assert b"log in with SASL" in text.recv(1000)
        root = [
            "--server",
            server.address,
            "--user",
            "root",
            *with_password(PASSWORD),
        ]
        assert run(["--server", server.address, "user", "list"]) == 7
        assert run([*root, "user", "list"]) == 0
        assert run([*root, "user", "revoke", "root", "admin"]) == 2, "nobody could give it back"


# -- limits: each says which setting changes it ----------------------------------------------------


def test_connections_max(tmp_path):
    with (
        DcpdProcess(tmp_path / "data", "--connections-max", "2") as server,
        RawClient(server.port),
        RawClient(server.port),
    ):
        with pytest.raises((AssertionError, OSError)):
            RawClient(server.port)
        log = server.log_path.read_text
        until(lambda: "2 connections are open, the limit (setting connections_max)" in log())


def test_connections_per_user_max(tmp_path):
    with (
        DcpdProcess(tmp_path / "data", "--connections-per-user-max", "2") as server,
        RawClient(server.port, "guest", "guest") as first,
        RawClient(server.port) as third,
    ):
        with RawClient(server.port, "guest", "guest"):
            crowded = third.log_in("guest", "guest")
            assert crowded.status == Status.EBUSY
            said = context_of(crowded)
            assert "2 connections, the limit (setting connections_per_user_max)" in said
            assert first.log_in("guest", "guest").status == Status.OK, "it counts once"
        until(lambda: third.log_in("guest", "guest").status == Status.OK)


def test_streams_max(tmp_path):
    with (
        DcpdProcess(tmp_path / "data", "--streams-max", "3") as server,
        RawClient(server.port, "guest", "guest") as client,
    ):
        open_stream(client)
        asked = StreamRequest(0, 0, 2**64 - 1, 0, 0, 0)
        answers = []
        for vb_id in range(4):
            client.send(pack_stream_request(vb_id, asked, vb_id, b""))
            answers.append(client.receive())
        assert [frame.status for frame in answers] == [0, 0, 0, Status.ENOMEM]
        assert context_of(answers[3]) == "3 streams are open, the limit (setting streams_max)"


def test_value_bytes_max(tmp_path):
    with (
        DcpdProcess(tmp_path / "data", "--value-bytes-max", "2KiB") as server,
        RawClient(server.port, "guest", "guest") as client,
    ):
        assert client.set(b"k", bytes(2048)).status == Status.OK
        refused = client.set(b"k", bytes(2049))
        assert refused.status == Status.E2BIG
        assert context_of(refused) == "a value has at most 2048 bytes (setting value_bytes_max)"
        assert client.set(b"k", bytes(1 << 20)).status == Status.E2BIG
        assert client.set(b"k", b"v").status == Status.OK
        client.send(HEADER.pack(0x80, Opcode.SET, 1, 8, 0, 0, (1 << 30) + 1, 0, 0))
        assert client.is_closed()
        log = server.log_path.read_text
        until(lambda: "at most 1073741824 are taken" in log())


def test_limits_of_who_has_not_logged_in(tmp_path):
    arguments = ("--anonymous", "off", "--login-body-bytes-max", "1KiB", "--log-level", "debug")
    with DcpdProcess(tmp_path / "data", *arguments, "--handshake-timeout", "300ms") as server:
        log = server.log_path.read_text
        with RawClient(server.port) as slow:
            assert slow.is_closed()
        until(lambda: "no login within 0.3 s (setting handshake_timeout)" in log())
        with RawClient(server.port) as large:
            large.send(HEADER.pack(0x80, Opcode.SASL_AUTH, 5, 0, 0, 0, 1025, 0, 0))
            assert large.is_closed()
        until(lambda: "at most 1024 are taken (setting login_body_bytes_max)" in log())


def test_idle_timeout(tmp_path):
    with DcpdProcess(tmp_path / "data", "--idle-timeout", "1s") as server:
        with RawClient(server.port, "guest", "guest") as idle:
            assert idle.is_closed()
        until(lambda: "(setting idle_timeout)" in server.log_path.read_text())


def test_a_stale_connection_may_log_in_as_long_as_a_new_one(tmp_path):
    data = tmp_path / "data"
    with DcpdProcess(data, "--handshake-timeout", "500ms") as server:
        assert (
            run(
                [
                    "--server",
                    server.address,
                    "user",
                    "add",
                    "ada",
                    *new_password(PASSWORD),
                ]
            )
            == 0
        )
        with RawClient(server.port, "ada", PASSWORD) as ada:
            assert run(["--server", server.address, "user", "remove", "ada"]) == 0
            assert ada.set(b"k").status == Status.AUTH_STALE
            assert ada.is_closed()


def test_wrong_logins_close_the_connection_and_then_the_door(tmp_path):
    arguments = ("--login-failures-max", "3", "--login-failures-per-minute", "4")
    with DcpdProcess(tmp_path / "data", *arguments, "--log-level", "debug") as server:
        with RawClient(server.port) as guesser:
            for _ in range(3):
                assert guesser.log_in("guest", "wrong").status == Status.AUTH_ERROR
            assert guesser.is_closed()
        log = server.log_path.read_text
        until(lambda: "3 logins failed, the limit (setting login_failures_max)" in log())
        with RawClient(server.port) as guesser:
            assert "user or password is wrong" in context_of(guesser.log_in("guest", "wrong"))
            blocked = context_of(guesser.log_in("guest", "guest"))
            assert "too many wrong logins from 127.0.0.1; try again in" in blocked
            assert "(setting login_failures_per_minute)" in blocked
        assert run(["--server", server.address, "user", "list"]) == 7
        until(lambda: audited(server, event="login", user="guest", result="refused"))


# -- the audit log ---------------------------------------------------------------------------------


def test_the_audit_log_tells_who_did_what_and_no_secret(tmp_path):
    with DcpdProcess(tmp_path / "data") as server:
        guest = ["--server", server.address]
        assert (
            run(
                [
                    *guest,
                    "user",
                    "add",
                    "ada",
                    "--role",
                    "read",
                    *new_password(PASSWORD),
                ]
            )
            == 0
        )
        assert run([*guest, "user", "grant", "ada", "write", "--prefix", "x:"]) == 0
        with RawClient(server.port, "ada", PASSWORD) as ada:
            ada.set(b"key-not-told", b"value-not-told")
            ada.set(b"x:key-not-told", b"value-not-told")
            ada.log_in("ada", "wrong-not-told")
        run([*guest, "vb", "branch", "1", "--at", "99"])
        run([*guest, *with_password("guess-not-told"), "user", "list"])
        assert server.stop() == 0
        path = server.data / "audit.log"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        text = path.read_text()
        assert "not-told" not in text
        assert PASSWORD not in text
        told = [
            (r["event"], r["user"], r["over"] if "over" in r else r["action"], r.get("result"))
            for r in audit(server)
        ]
        assert told == [
            ("login", "guest", "kv", "ok"),
            ("admin", "guest", "admin", 201),
            ("login", "guest", "kv", "ok"),
            ("admin", "guest", "admin", 200),
            ("login", "ada", "kv", "ok"),
            ("denied", "ada", "SET", None),
            ("login", "ada", "kv", "refused"),
            ("login", "guest", "kv", "ok"),
            ("admin", "guest", "admin", 409),
            ("login", "guest", "kv", "refused"),
        ]
        added = next(r for r in audit(server) if r["event"] == "admin")
        assert added["action"] == "POST /api/v1/users"
        assert added["told"] == {"name": "ada", "roles": {"read": [{}]}}
        assert all(r["peer"].startswith("127.0.0.1:") for r in audit(server))


def test_the_audit_log_can_be_elsewhere_or_off(tmp_path):
    for value, path in (("off", None), (str(tmp_path / "else.log"), tmp_path / "else.log")):
        data = tmp_path / value.replace("/", "_")
        with DcpdProcess(data, "--audit", value) as server:
            with RawClient(server.port, "guest", "guest"):
                pass
            assert server.stop() == 0
        assert not (data / "audit.log").exists()
        assert path is None or '"event": "login"' in Path(path).read_text()


def test_an_audit_log_that_cannot_be_written_stops_nothing(tmp_path):
    with DcpdProcess(tmp_path / "data", "--audit", str(tmp_path / "no" / "folder")) as server:
        with RawClient(server.port, "guest", "guest") as client:
            assert client.set(b"k").status == Status.OK
        until(lambda: "audit log cannot be written" in server.log_path.read_text())
        (tmp_path / "no").mkdir()
        with RawClient(server.port, "guest", "guest") as client:
            assert client.set(b"k").status == Status.OK
        until((tmp_path / "no" / "folder").exists)
        assert server.stop() == 0
        first = json.loads((tmp_path / "no" / "folder").read_text().splitlines()[0])
        assert (first["event"], first["lines"]) == ("lost", 1)
