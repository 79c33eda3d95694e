"""dcpctl against a live server: output, exit codes, resuming. In this process, but for signals."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_peer import ScriptedPeer

from clients.cli.dcpctl import COMMANDS, run, time_of
from dcp.wire.opcode import Opcode
from support.credentials import new_password, with_password
from support.server import DcpdProcess
from vbucket.model.ids import vbucket_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DcpdProcess(tmp_path_factory.mktemp("command") / "data") as process:
        yield process


@pytest.fixture
def ctl(server, capfdbinary, monkeypatch):
    monkeypatch.setenv("DCPCTL_SERVER", server.address)

    def call(*arguments, stdin=None):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = run(list(arguments))
        out, err = capfdbinary.readouterr()
        return code, out, err.decode()

    return call


def lines(out):
    return [json.loads(line) for line in out.splitlines()]


def test_set_get_del(ctl):
    code, out, _ = ctl("set", "user:1", "Ada")
    assert code == 0
    assert out.startswith(b"stored user:1 (partition 933, seqno ")
    assert ctl("get", "user:1") == (0, b"Ada", "")
    assert ctl("get", "user:1", "-o", "plain")[1] == b"Ada\n"
    assert ctl("del", "user:1")[0] == 0
    code, out, err = ctl("get", "user:1")
    assert (code, out) == (3, b"")
    assert "not found" in err
    assert "partition 933" in err
    assert ctl("del", "user:1")[0] == 3


def test_value_from_standard_input_is_kept_byte_by_byte(ctl):
    raw = bytes(range(256))
    assert ctl("set", "bin", "-", stdin=raw)[0] == 0
    assert ctl("get", "bin")[1] == raw
    (document,) = lines(ctl("get", "bin", "-o", "json")[1])
    assert document["v"] == 1
    assert document["value_encoding"] == "base64"
    assert "key_encoding" not in document
    assert isinstance(document["cas"], str)


def test_conditions(ctl):
    assert ctl("set", "c", "1", "--add")[0] == 0
    code, _, err = ctl("set", "c", "2", "--add")
    assert code == 4
    assert "already exists" in err
    (stored,) = lines(ctl("set", "c", "3", "-o", "json")[1])
    assert ctl("set", "c", "4", "--cas", stored["cas"])[0] == 0
    code, _, err = ctl("set", "c", "5", "--cas", stored["cas"])
    assert code == 4
    assert "CAS mismatch" in err
    assert ctl("set", "nope", "1", "--replace")[0] == 3
    assert ctl("del", "c", "--cas", "1")[0] == 4


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["gte", "k"], 2, "Did you mean 'get'"),
        (["zzz"], 2, "there is no command"),
        (["get"], 2, "KEY"),
        (["get", "k" * 251], 2, "1 to 250 bytes"),
        (["--server", "h:x", "get", "k"], 2, "not a port"),
        (["--server", "127.0.0.1:1", "get", "k"], 6, "cannot connect"),
        (["--user", "eve", "get", "k"], 7, "'eve' was refused"),
        (["get", "k", "--user", "eve"], 7, "'eve' was refused"),
        (["failover-log", "1024"], 2, "1024"),
        (["del", "a", "b", "--cas", "3"], 2, "one KEY"),
        (["set", "a", "b", "--add", "--cas", "3"], 2, "--cas"),
        (["watch", "--server", "127.0.0.1:1"], 6, "cannot connect"),
        (["user", "remove", "nobody"], 3, "no user"),
        (["vb", "branch", "1", "--at", "999999"], 4, "cannot branch"),
        ([*with_password("x"), "user", "list"], 7, "refused"),
    ],
)
def test_exit_codes(ctl, arguments, code, text):
    found, out, err = ctl(*arguments)
    assert (found, out) == (code, b"")
    assert text in err
    assert "Traceback" not in err


def test_every_command_has_examples_in_its_help(ctl):
    for command in COMMANDS:
        code, out, _ = ctl(command, "--help")
        assert code == 0
        assert f"dcpctl {command}" in out.decode()
    assert b"Exit codes" in ctl("--help")[1]


def test_partitions(ctl):
    ctl("set", "p", "1")
    vb_id = vbucket_of(b"p")
    (row,) = lines(ctl("seqnos", "--vb", str(vb_id), "-o", "json")[1])
    assert row["vb"] == vb_id
    assert row["high_seqno"] > 0
    assert len(ctl("seqnos", "--no-headers")[1].splitlines()) == 1024
    assert ctl("seqnos")[1].splitlines()[0] == b"vb\thigh_seqno"
    assert b"high seqno" in ctl("seqnos", "--used", "-o", "table")[1]
    (version,) = lines(ctl("failover-log", str(vb_id), "-o", "json")[1])
    assert version["seqno"] == 0
    (status,) = lines(ctl("status", "-o", "json")[1])
    assert status["partitions"] == {"active": 1024}
    assert status["items"] >= 1
    assert b"documents" in ctl("status", "-o", "table")[1]


def test_branch_is_seen_by_watch_as_a_rollback(ctl, tmp_path):
    key, vb = "branched", str(vbucket_of(b"branched"))
    for value in "123":
        ctl("set", key, value)
    state = str(tmp_path / "state")
    watch = ("watch", "--vb", vb, "--until-now", "--state", state, "-o", "json")
    changes = lines(ctl(*watch)[1])
    assert changes[-1]["value"] == "3"
    last = changes[-1]["seqno"]
    code, out, _ = ctl("vb", "branch", vb, "--at", str(last - 1))
    assert code == 0
    assert b"1 change undone" in out
    assert len(lines(ctl("failover-log", vb, "-o", "json")[1])) == 2
    assert ctl("get", key)[1] == b"2"
    _, out, err = ctl(*watch)
    rollback, *after = lines(out)
    assert err == "", "it is said once"
    assert rollback["event"] == "rollback"
    assert rollback["server_seqno"] == last - 1
    assert rollback["from"] == last
    assert [change["value"] for change in after if change["key"] == key] == ["2"]
    assert ctl(*watch)[1] == b""


def test_watch_resumes_after_count(ctl, tmp_path):
    vb = vbucket_of(b"w")
    for n in range(4):
        ctl("set", "w", str(n))
        ctl("set", "w2", str(n))
    state = str(tmp_path / "state")
    seen = []
    while True:
        out = ctl("watch", "--count", "1", "--until-now", "--state", state, "-o", "json")[1]
        if not out:
            break
        seen += [(line["vb"], line["seqno"]) for line in lines(out)]
    assert len(seen) == len(set(seen))
    assert vb in {vb_id for vb_id, _ in seen}


def test_watch_formats(ctl):
    vb = str(vbucket_of(b"f"))
    ctl("set", "f", "line\nbreak")
    ctl("set", "g\x01", "x")
    plain = ctl("watch", "--until-now", "--vb", vb, "--prefix", "f")[1].decode()
    assert plain.endswith("set f = line\\nbreak\n")
    assert ctl("watch", "--until-now", "--vb", vb, "-o", "raw")[1].endswith(b"line\nbreak\n")
    assert ctl("watch", "--until-now", "--vb", vb, "--prefix", "zz")[1] == b""
    events = lines(ctl("watch", "--until-now", "--vb", vb, "--all", "-o", "json")[1])
    kinds = [event["event"] for event in events]
    assert kinds[:2] == ["stream_opened", "snapshot_start"]
    assert kinds[-2:] == ["snapshot_end", "stream_ended"]
    ctl("del", "f")
    assert b"del       f" in ctl("watch", "--until-now", "--vb", vb, "--all", "-o", "table")[1]


def test_watch_refuses_a_damaged_state(ctl, tmp_path):
    (tmp_path / "state").write_bytes(b"hello")
    code, _, err = ctl("watch", "--until-now", "--state", str(tmp_path / "state"))
    assert code == 1
    assert "not a checkpoint" in err or "damaged" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_watch_saves_its_state_on_signals(ctl, server, tmp_path, number, code):
    ctl("set", "signal", "1")
    state = tmp_path / "state"
    command = [
        sys.executable, "-m", "clients.cli", "--server", server.address,
        "watch", "--state", str(state), "-o", "json",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["v"] == 1
        os.kill(process.pid, number)
        process.stdout.read()
        assert process.wait(timeout=20) == code
    assert ctl("watch", "--state", str(state), "--until-now")[0] == 0


def test_watch_refuses_the_state_of_another_prefix(ctl, tmp_path):
    ctl("set", "one:1", "a")
    ctl("set", "two:1", "b")
    state = tmp_path / "state"
    watch = ("watch", "--state", str(state), "--until-now", "-o", "json")
    assert [line["key"] for line in lines(ctl(*watch, "--prefix", "one:")[1])] == ["one:1"]
    code, out, err = ctl(*watch, "--prefix", "two:")
    assert (code, out) == (1, b"")
    assert "it is for the default collection, keys that begin with 'one:'" in err
    assert "this consumer follows the default collection, keys that begin with 'two:'" in err
    assert "another file or name" in err
    ctl("set", "one:2", "c")
    assert [line["key"] for line in lines(ctl(*watch, "--prefix", "one:")[1])] == ["one:2"]


def test_import(ctl, tmp_path):
    rows = "id,name\n1,Ada\n2,Grace\n1,Ada L.\n"
    (tmp_path / "u.csv").write_text(rows)
    code, out, _ = ctl("import", str(tmp_path / "u.csv"), "--key", "id", "--prefix", "u:")
    assert (code, out) == (0, b"stored 3 rows of u.csv\n")
    assert json.loads(ctl("get", "u:1")[1]) == {"id": "1", "name": "Ada L."}
    (tmp_path / "u.jsonl").write_text('{"id":7,"x":[1]}\n\n{"id":"","x":2}\n')
    arguments = ("import", str(tmp_path / "u.jsonl"), "--key", "id", "--prefix", "j:")
    code, out, _ = ctl(*arguments, "--skip-empty", "-o", "json")
    assert lines(out)[0]["stored"] == 1
    assert json.loads(ctl("get", "j:7")[1]) == {"id": 7, "x": [1]}


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.csv", "id,name\n1,Ada\n", "no column 'key'"),
        ("a.csv", "key,name\n1,Ada,3\n", "line 2: the number of fields"),
        ("a.csv", "key\n" + "k" * 251 + "\n", "line 2: a key has 1 to 250"),
        ("a.jsonl", '{"key": 1}\n{"key"\n', "line 2"),
        ("a.jsonl", "[1]\n", "line 1"),
        ("a.jsonl", '{"other": 1}\n', "Its columns are: other"),
        ("a.txt", "x", "does not end in one of .csv"),
    ],
)
def test_import_says_which_line(ctl, tmp_path, name, text, why):
    (tmp_path / name).write_text(text)
    code, out, err = ctl("import", str(tmp_path / name), "--key", "key")
    assert code in {1, 2}
    assert out == b""
    assert why in err


def test_import_that_stops_in_the_middle_is_partial(ctl, tmp_path):
    text = "".join(f'{{"key": "part{n}"}}\n' for n in range(5000)) + "{\n"
    (tmp_path / "a.jsonl").write_text(text)
    code, _, err = ctl("import", str(tmp_path / "a.jsonl"), "--key", "key")
    assert code == 8
    assert "4096 rows are stored" in err


def test_users(ctl):
    assert ctl("user", "add", "ada", *new_password("s3cret"))[0] == 0
    assert b"ada" in ctl("user", "list")[1]
    assert ctl("--user", "ada", *with_password("s3cret"), "status")[0] == 0
    assert ctl("user", "add", "bob", stdin=b"pw of bob\n")[0] == 0
    assert ctl("--user", "bob", *with_password("pw of bob"), "status")[0] == 0
    assert ctl("user", "remove", "ada")[1] == b"removed user ada\n"
    assert ctl("--user", "ada", *with_password("s3cret"), "status")[0] == 7


def test_collections(ctl):
    assert ctl("collection", "create", "shop.orders")[1] == b"added shop.orders\n"
    assert ctl("collection", "create", "shop.carts", "--max-ttl", "60")[0] == 0
    listed = {row["collection"] for row in lines(ctl("collection", "list", "-o", "json")[1])}
    assert {"_default._default", "shop.orders", "shop.carts"} <= listed
    code, _, err = ctl("collection", "create", "shop.orders")
    assert code != 0
    assert "orders" in err
    assert ctl("collection", "drop", "shop.orders")[1] == b"removed shop.orders\n"
    assert b"shop.orders" not in ctl("collection", "list")[1]
    assert ctl("collection", "drop", "shop")[0] == 0
    assert b"shop" not in ctl("collection", "list")[1]


def test_hot_commands_import_nothing_slow(tmp_path):
    script = (
        "import sys; from clients.cli import dcpctl;"
        "from clients.cli.documents import document_commands;"
        "dcpctl.Target().address;"  # without contexts the file of contexts is not read
        "print([m for m in ('asyncio','rich','scramp','msgspec','json','cbor2','pathlib','urllib')"
        " if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, cwd=ROOT,
        env=os.environ | {"XDG_CONFIG_HOME": str(tmp_path)},
    )  # fmt: skip
    assert result.stdout == b"[]\n"


# -- durability, timeouts, replicas, several hosts -------------------------------------------------


def test_durable_writes_with_a_time(ctl):
    level = ("--durability", "persist_to_majority")
    assert ctl("set", "durable", "1", *level, "--timeout", "2s")[0] == 0
    assert ctl("get", "durable", "--from-replica")[1] == b"1", "alone, the master answers"
    assert ctl("del", "durable", *level, "--timeout", "1500ms")[0] == 0
    code, _, err = ctl("set", "durable", "1", "--durability", "most")
    assert code == 2
    assert "majority_and_persist_to_active" in err
    code, _, err = ctl("get", "durable", "--xattrs", "--from-replica")
    assert code == 2
    assert "leave out --from-replica" in err


@pytest.mark.parametrize("text", ["0", "-1", "2h", "ms", "1d", "", "nan", "inf", "1e9", "2 weeks"])
def test_times_that_are_none_are_usage_errors(ctl, text):
    code, _, err = ctl("--timeout", text, "get", "k")
    assert code == 2
    assert "10ms to 1440m" in err


@pytest.mark.parametrize(
    ("text", "time_s"), [("2", 2.0), ("2.5", 2.5), ("2s", 2.0), ("500ms", 0.5), ("3m", 180.0)]
)
def test_times(text, time_s):
    assert time_of(text) == time_s


def test_several_hosts_and_one_that_is_wrong(ctl, server, unused_tcp_port):
    address = f"127.0.0.1:{unused_tcp_port},{server.address}"
    assert ctl("--server", address, "set", "several", "v")[0] == 0
    assert ctl("--server", address, "--wait", "get", "several")[1] == b"v"
    assert server.address.encode() in ctl("--server", address, "ping")[1]
    code, _, err = ctl("--server", f"{server.address},", "get", "several")
    assert code == 2
    assert "a host is missing beside a comma" in err


async def test_a_write_without_an_answer_has_an_exit_code_of_its_own():
    async with ScriptedPeer() as peer:
        peer.handlers[Opcode.SET] = lambda _: b""
        command = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "clients.cli", "--server", peer.address, "--timeout", "500ms",
            "set", "k", "v", stderr=subprocess.PIPE,
        )  # fmt: skip
        _, err = await command.communicate()
    assert command.returncode == 9
    assert b"the change may have been applied" in err
    assert b"try: Read the document" in err
