"""Contexts and passwords: which source counts, and that no password is where others can read it."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from clients import ServerAddress
from clients.cli import contexts
from clients.cli.dcpctl import run
from clients.cli.login import Given, address_of
from support.credentials import new_password, with_password

PASSWORD = "correct-horse"


@pytest.fixture(autouse=True, scope="module")
def ada(server):
    add = ["--server", server.address, "user", "add", "ada-of-login", "--role", "all"]
    assert run([*add, *new_password(PASSWORD)]) == 0


@pytest.fixture
def saved(local_ctl, server):
    """Two contexts: `here`, the server of the tests, and `far`, which nobody serves."""
    add = ("context", "add")
    user = ("--user", "ada-of-login", *with_password(PASSWORD))
    assert local_ctl(*add, "here", "--server", server.address, *user)[0] == 0
    assert (
        local_ctl(*add, "far", "--server", "far.example:1", "--user", "bob", "--no-password")[0]
        == 0
    )
    return local_ctl


def test_a_context_has_server_and_login(saved, server):
    assert saved("--context", "here", "user", "list")[0] == 0
    assert saved("status", "--context", "here", "-o", "json")[0] == 0
    assert saved("context", "use", "here")[0] == 0
    (status,) = (json.loads(line) for line in saved("status", "-o", "json")[1].splitlines())
    assert status["server"] == server.address
    assert saved("context", "use", "--none")[0] == 0


def test_the_file_is_for_its_owner_only(saved):
    path = contexts.contexts_path()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [item.name for item in path.parent.iterdir()] == ["contexts.json"]
    assert saved("context", "list")[2] == ""
    path.chmod(0o644)
    assert f"chmod 600 {path}" in saved("context", "list")[2]
    assert saved("context", "use", "here")[0] == 0
    assert path.stat().st_mode & 0o777 == 0o600


def test_list_show_and_rm(saved):
    saved("context", "use", "far")
    listed = [json.loads(line) for line in saved("context", "list", "-o", "json")[1].splitlines()]
    assert [(row["name"], row["password"], row["current"]) for row in listed] == [
        ("far", "asked for", True),
        ("here", "saved", False),
    ]
    code, out, _ = saved("context", "show", "here")
    assert code == 0
    assert PASSWORD.encode() not in out
    assert b"ada-of-login" in out
    assert b"far.example" in saved("context", "show")[1]
    assert saved("context", "rm", "far")[0] == 0
    assert contexts.load_contexts().current is None
    assert saved("context", "show")[0] == 1
    assert saved("context", "rm", "far")[0] == 3
    assert saved("context", "use", "far")[0] == 3
    assert saved("--context", "far", "status")[0] == 3


def test_add_does_not_replace_by_itself(saved, server):
    add = ("context", "add", "far", "--server", server.address)
    code, _, err = saved(*add)
    assert code == 4
    assert "--replace" in err
    assert saved(*add, "--replace", "--use")[0] == 0
    assert saved("ping")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["context", "add", "x"], "needs --server"),
        (["context", "add", "x", "--server", "h:x"], "not a port"),
        (["context", "add", "x", "--server", "dcpd://ada:secret@h:1"], "with a password"),
        (["context", "add", "x", "--server", "h:1", "--user", "u"], "the password of u is missing"),
        (["context", "use"], "--none"),
        (["--server", "h:1", "--context", "x", "status"], "use one of them"),
        (["--password", "secret", "status"], "would show the password to other users"),
        (["status", "--password", "secret"], "would show the password to other users"),
        (["--server", "dcpd://ada:secret@h:1", "status"], "--server with a password"),
        (["user", "add", "u", "--new-password", "secret"], "would show the password"),
        (["user", "passwd", "u", "--new-password", "secret"], "would show the password"),
        (["--password-file", "/nothing", "--user", "u", "status"], "cannot be read: No such file"),
        (["--password-file", "-", "--user", "u", "status"], "no password in its first line"),
    ],
)
def test_usage(local_ctl, arguments, why):
    code, out, err = local_ctl(*arguments)
    assert (code, out) == (2, b"")
    assert why in " ".join(err.split())
    assert "secret" not in err.replace("would show the password", "")


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"v": 2}', '{"v": 1, "current": "x", "contexts": {}}',
        '{"v": 1, "current": null, "contexts": {"x": {"server": 5}}}',
        '{"v": 1, "current": null, "contexts": {"x": {"host": "h"}}}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_an_error_and_is_kept(local_ctl, text):
    path = contexts.contexts_path()
    path.parent.mkdir(parents=True)
    path.write_text(text)
    for command in (["status"], ["context", "list"], ["context", "add", "x", "--server", "h:1"]):
        code, _, err = local_ctl(*command)
        assert code == 1
        assert "not a file of contexts" in err
    assert path.read_text() == text
    assert local_ctl("--server", "127.0.0.1:1", "ping")[0] == 6, "an option needs no context"


# -- which source counts ---------------------------------------------------------------------------


@pytest.fixture
def sources(local_ctl, monkeypatch):
    """Return the address for options and an environment, with the contexts `one` and `two`."""
    for name, user in (("one", "ada"), ("two", "bob")):
        add = ("context", "add", name, "--server", f"{name}.example:1", "--user", user)
        assert local_ctl(*add, *with_password(f"pw-of-{user}"))[0] == 0
    local_ctl("context", "use", "one")

    def address(given=None, **environment):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(f"DCPCTL_{name}", value)
            found = address_of(given or Given())
        return found.node, found.user, found.password

    return address


ONE, TWO = ("one.example:1", "ada", "pw-of-ada"), ("two.example:1", "bob", "pw-of-bob")


def test_the_order_of_the_sources(sources):
    assert sources() == ONE
    assert sources(CONTEXT="two") == TWO
    assert sources(Given(context="two")) == TWO
    assert sources(Given(context="two"), CONTEXT="one", SERVER="env:1", USER="eve") == TWO
    assert sources(SERVER="env:1") == ("env:1", "guest", "guest")
    assert sources(SERVER="env:1", CONTEXT="two") == ("env:1", "guest", "guest")
    assert sources(SERVER="dcpd://eve:apple@env:1") == ("env:1", "eve", "apple")


def test_a_password_never_goes_to_another_server_or_user(sources):
    assert sources(Given("other:1")) == ("other:1", "guest", "guest")
    assert sources(Given("other:1", user="ada")) == ("other:1", "ada", "")
    assert sources(Given(user="eve")) == ("one.example:1", "eve", "")
    assert sources(Given(user="eve"), USER="root", PASSWORD="of-root")[1:] == ("eve", "")
    assert sources(Given(user="eve"), PASSWORD="of-eve")[1:] == ("eve", "of-eve")
    found = sources(Given(user="eve"), SERVER="dcpd://ada:pw@env:1")
    assert found == ("env:1", "eve", ""), "the password in the address is that of ada"


def test_passwords_of_files_and_variables(sources, tmp_path):
    (tmp_path / "pw").write_text("from-file\nmore\n")
    path = str(tmp_path / "pw")
    assert sources(Given("h:1", "u", path)) == ("h:1", "u", "from-file")
    assert sources(Given("h:1", "u", path), PASSWORD="env")[2] == "from-file"
    assert sources(Given("h:1", "u"), PASSWORD_FILE=path)[2] == "from-file"
    assert sources(Given("h:1", "u"), PASSWORD="env", PASSWORD_FILE=path)[2] == "env"


def test_xdg_says_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert contexts.contexts_path() == tmp_path / "dcpctl" / "contexts.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    for home in ("", "relative"):
        monkeypatch.setenv("XDG_CONFIG_HOME", home)
        assert contexts.contexts_path() == tmp_path / ".config" / "dcpctl" / "contexts.json"


def test_tls_files_of_a_context_are_found_from_anywhere(local_ctl, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    local_ctl("context", "add", "tls", "--server", "h", "--tls-ca", "ca.pem")
    address = address_of(Given(context="tls"))
    assert address == ServerAddress("h", 11207, is_tls=True, tls_ca=str(tmp_path / "ca.pem"))


# -- standard input --------------------------------------------------------------------------------

LOGIN = ("--user", "ada-of-login", "--password-file", "-")


def test_the_password_leaves_the_rest_of_standard_input(ctl):
    first = f"{PASSWORD}\n".encode()
    value = b"\x00\xff\r\nsecond line\n" * 1000
    assert ctl(*LOGIN, "set", "after:pw", "-", stdin=first + value)[0] == 0
    assert ctl("get", "after:pw", "-o", "raw")[1] == value
    assert ctl(*LOGIN, "set", "after:pw", stdin=f"{PASSWORD}\r\nno VALUE".encode())[0] == 0
    assert ctl("get", "after:pw", "-o", "raw")[1] == b"no VALUE"
    table = first + b"id,name\n1,Ada\n2,Grace\n"
    code, out, err = ctl(*LOGIN, "import", "-", "--key", "id", "--prefix", "pw:", stdin=table)
    assert (code, out) == (0, b"stored 2 rows of standard input\n"), err
    assert json.loads(ctl("get", "pw:1")[1]) == {"id": "1", "name": "Ada"}
    assert ctl(*LOGIN, "user", "add", "second", stdin=first + b"of-second\n")[0] == 0
    assert ctl("--user", "second", *with_password("of-second"), "get", "pw:1")[0] == 0
    assert ctl("user", "remove", "second")[0] == 0


def test_a_first_line_that_is_no_password(ctl):
    for line, why in (
        (b"x" * 5000 + b"\nvalue", "is too long"),
        (b"\xff\nvalue", "cannot be read"),
    ):
        code, _, err = ctl(*LOGIN, "set", "after:none", "-", stdin=line)
        assert code == 2
        assert why in " ".join(err.split())
    assert ctl("get", "after:none")[0] == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["import", "-", "--key", "id"], ["set", "k", "-"], ["set", "k"], ["user", "add", "u"],
        ["--user", "u", "--password-file", "-", "status"],
    ],
)  # fmt: skip
def test_a_closed_standard_input_is_named(server, tmp_path, arguments):
    """A shell closes it with <&-, and Python then has no sys.stdin."""
    script = 'exec "$0" -m clients.cli "$@" <&-'
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "DCPCTL_SERVER": server.address}
    done = subprocess.run(
        ["sh", "-c", script, sys.executable, *arguments],
        env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    *_, last = done.stderr.splitlines()
    assert last == "Error: standard input is closed: name a file, or pipe the input in"
    assert "Traceback" not in done.stderr


# -- the terminal ----------------------------------------------------------------------------------


def on_terminal(arguments, answers, environment):
    """Run dcpctl on a terminal and answer its questions; return what the terminal showed, and the
    command line of the process.
    """
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "clients.cli", *arguments],
        stdin=child, stdout=child, stderr=child, env=os.environ | environment,
        start_new_session=True,
    )  # fmt: skip
    os.close(child)
    shown, command_line = b"", b""
    left = list(answers)
    while select.select([parent], [], [], 60)[0]:
        try:
            data = os.read(parent, 4096)
        except OSError:
            break
        shown += data
        if left and shown.count(b": ") > len(answers) - len(left) and shown.endswith(b": "):
            command_line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            os.write(parent, left.pop(0).encode() + b"\n")
    os.close(parent)
    assert process.wait(30) == 0, shown
    return shown.decode(), command_line.decode()


def test_a_terminal_is_asked_and_shows_nothing(server, tmp_path):
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "DCPCTL_PASSWORD": ""}
    login_of = ["--server", server.address, "--user", "ada-of-login"]
    shown, command_line = on_terminal([*login_of, "user", "list"], [PASSWORD], environment)
    assert shown.startswith("Password of ada-of-login: ")
    assert "ada-of-login" in shown.split("\n", 1)[1]
    assert PASSWORD not in shown + command_line
    add = ["context", "add", "mine", *login_of, "--use"]
    shown, command_line = on_terminal(add, [PASSWORD], environment)
    assert PASSWORD not in shown + command_line
    shown, _ = on_terminal(["user", "list"], [], environment)
    assert "ada-of-login" in shown
    new = ["user", "add", "typed", "--context", "mine"]
    shown, command_line = on_terminal(new, ["typed-secret", "typed-secret"], environment)
    assert "added user typed" in shown
    assert "typed-secret" not in shown + command_line


# -- users -----------------------------------------------------------------------------------------


def roles_of(ctl, name):
    return ctl("user", "show", name, "--no-headers")[1].decode().split()


def test_a_new_user_gets_the_least(ctl):
    assert ctl("user", "add", "least", stdin=b"pw-of-least\n")[0] == 0
    assert roles_of(ctl, "least") == ["read"]
    assert ctl("user", "add", "most", "--role", "all", stdin=b"pw-of-most\n")[0] == 0
    assert roles_of(ctl, "most") == ["read", "write", "stream", "admin"]
    more = ("--role", "all", "--role", "replicate")
    assert ctl("user", "add", "node", *more, *new_password("pw-of-node"))[0] == 0
    assert roles_of(ctl, "node") == ["read", "write", "stream", "admin", "replicate"]


@pytest.mark.parametrize("command", ["add", "passwd"])
@pytest.mark.parametrize("password", ["short", "x" * 129, "snow\u2603man"])
def test_passwords_are_checked(ctl, command, password):
    code, _, err = ctl("user", command, "ada-of-login", stdin=f"{password}\n".encode())
    assert code == 2
    assert "6 to 128 are allowed" in err or "printable ASCII" in err
    assert password not in err
    assert ctl("--user", "ada-of-login", *with_password(PASSWORD), "user", "list")[0] == 0


def test_the_last_admin_is_not_removed_by_mistake(ctl):
    for name in ("most", "node"):
        ctl("user", "remove", name)
    code, _, err = ctl("user", "remove", "ada-of-login")
    assert code == 4
    assert "use --force" in err
    code, _, err = ctl("user", "revoke", "ada-of-login", "admin")
    assert code == 2
    assert "use --force" in err
    assert ctl("user", "revoke", "ada-of-login", "admin", "--force")[0] == 0
    assert ctl("user", "grant", "ada-of-login", "admin")[0] == 0
    assert ctl("user", "remove", "ada-of-login", "--force")[0] == 0
