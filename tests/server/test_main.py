"""The command dcpd: what it refuses, what it prints, and how it stops."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dcp import __version__
from dcp.server.access.users import USERS_FILE, Users
from dcp.server.config.settings import Settings
from dcp.server.config.sources import resolve
from dcp.server.main import (
    ExitCode,
    StartError,
    exposure_refusal,
    listen_error,
    plan_ports,
    ready_text,
)
from vbucket.native.form import version_and_form

DCPD = (sys.executable, "-m", "dcp.server.main")
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("DCPD_")}


def dcpd(*arguments, python=(), **environment):
    """Run a dcpd that is expected to end by itself."""
    return subprocess.run(
        (sys.executable, *python, *DCPD[1:], *map(str, arguments)),
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
        env={**ENVIRONMENT, **environment},
    )


class Running:
    """A dcpd that has said that it is ready."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            (*DCPD, "--port", "0", *map(str, arguments)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        self.lines = []
        while not any("try" in line for line in self.lines[1:]):
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            self.lines.append(line.rstrip("\n"))
        self.port = int(re.search(r"key-value +127\.0\.0\.1:(\d+)", self.text)[1])
        self.admin_port = int(re.search(r"admin +http://127\.0\.0\.1:(\d+)", self.text)[1])

    @property
    def text(self):
        return "\n".join(self.lines)

    def stop(self, number=signal.SIGTERM):
        """Return the exit code and what was said on stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, said = self.process.communicate(timeout=50)
        return self.process.returncode, said


@pytest.fixture
def start(tmp_path):
    started = []

    def start(*arguments):
        started.append(Running("--data", tmp_path / "data", *arguments))
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.communicate(timeout=50)


# -- decisions -------------------------------------------------------------------------------------


def test_protected_mode_says_how_to_go_on():
    users_file = Path("data/users.json")
    assert exposure_refusal(Settings(), [], users_file) is None
    assert exposure_refusal(Settings(host="0.0.0.0"), ["alice"], users_file) is None
    refusal = exposure_refusal(Settings(host="0.0.0.0"), [], users_file)
    assert refusal is not None
    for part in ("protected mode", "0.0.0.0", "data/users.json", "dcpctl user add NAME"):
        assert part in refusal


def test_the_ready_text_ends_with_what_to_type():
    def last_line(settings, kv_port):
        text = ready_text(settings, version="9", data_dir=Path("d"), kv_port=kv_port, admin_port=2)
        return text.splitlines()[-1].split(maxsplit=1)[1]

    assert last_line(Settings(), 11210) == "dcpctl set hello world"
    assert last_line(Settings(), 5) == "dcpctl --server 127.0.0.1:5 set hello world"
    assert last_line(Settings(host="0.0.0.0"), 11210) == "dcpctl set hello world"
    assert last_line(Settings(host="::1"), 11210) == "dcpctl --server [::1]:11210 set hello world"


def taken(*ports, code=errno.EADDRINUSE):
    return lambda _host, port: OSError(code, os.strerror(code)) if port in ports else None


def test_a_default_admin_port_that_is_taken_is_replaced_and_said():
    plan = plan_ports(resolve({}, {}), taken(8091))
    assert plan.settings == Settings(admin_port=0)
    assert "8091 is taken" in plan.notice
    assert plan_ports(resolve({}, {}), taken()) == (Settings(), "")


@pytest.mark.parametrize(
    ("flags", "environ", "listens", "reason"),
    [
        ({}, {}, taken(11210), "127.0.0.1:11210 is in use"),
        ({"port": "5"}, {}, taken(5), "another port with --port (0"),
        ({"admin_port": "6"}, {}, taken(6), "another port with --admin-port (0"),
        ({}, {"DCPD_ADMIN_PORT": "8091"}, taken(8091), "127.0.0.1:8091 is in use"),
        ({}, {}, taken(8091, code=errno.EACCES), "127.0.0.1:8091: Permission denied"),
        ({"host": "192.0.2.1"}, {}, taken(11210, code=errno.EADDRNOTAVAIL), "no such address"),
    ],
)
def test_a_port_that_was_asked_for_is_not_replaced(flags, environ, listens, reason):
    with pytest.raises(StartError, match=re.escape(reason)) as caught:
        plan_ports(resolve(flags, environ), listens)
    assert caught.value.exit_code == ExitCode.PORT


def test_ports_are_tried_as_they_will_be_used():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        error = listen_error("127.0.0.1", port)
        assert error is not None
        assert error.errno == errno.EADDRINUSE
    assert listen_error("127.0.0.1", port) is None
    assert listen_error("127.0.0.1", 0) is None
    assert isinstance(listen_error("no-such-host.invalid", 1), OSError)


# -- the process -----------------------------------------------------------------------------------


def test_usage_errors_suggest_and_end_with_2(tmp_path):
    unknown = dcpd("--durabilty", "none")
    assert unknown.returncode == 2
    assert "--durability" in unknown.stderr
    value = dcpd("--durability", "always")
    assert value.returncode == 2
    assert "--durability: 'always' must be one of commit, interval, none" in value.stderr
    variable = dcpd(DCPD_DURABILTY="none")
    assert variable.returncode == 2
    assert "did you mean DCPD_DURABILITY?" in variable.stderr
    config = tmp_path / "dcpd.toml"
    config.write_text("prot = 1\n")
    for result in (dcpd("--config", config), dcpd(DCPD_CONFIG=str(config))):
        assert result.returncode == 2
        assert "unknown key 'prot'; did you mean port?" in result.stderr
        assert "Traceback" not in result.stderr


def test_help_and_version():
    text = dcpd("--help").stdout
    for flag in ("--host", "--admin-port", "--durability", "--config", "--idle-timeout"):
        assert flag in text
    assert "Exit codes" in text
    assert dcpd("--version").stdout == f"dcpd, version {version_and_form(__version__)}\n"


def test_python_without_asserts_is_refused():
    result = dcpd(python=("-O",))
    assert result.returncode == 2
    assert "Start without -O" in result.stderr


def test_protected_mode(tmp_path):
    arguments = ("--host", "0.0.0.0", "--port", "0", "--admin-port", "0", "--data", tmp_path / "d")
    result = dcpd(*arguments)
    assert result.returncode == 2
    assert "protected mode" in result.stderr
    assert not (tmp_path / "d").exists(), "a refusal leaves nothing behind"


def test_a_users_file_that_is_damaged_stops_the_start(tmp_path):
    (tmp_path / USERS_FILE).write_text("{")
    result = dcpd("--port", "0", "--admin-port", "0", "--data", tmp_path)
    assert result.returncode == ExitCode.FOLDER
    assert "is damaged" in result.stderr


def test_ready_text_and_a_graceful_stop(start, tmp_path):
    running = start("--admin-port", "0")
    assert running.lines == [
        f"dcpd {__version__} is ready",
        f"  data       {tmp_path / 'data'}",
        f"  key-value  127.0.0.1:{running.port}",
        f"  admin      http://127.0.0.1:{running.admin_port}",
        "  durability commit",
        f"  try        dcpctl --server 127.0.0.1:{running.port} set hello world",
    ]
    code, said = running.stop()
    assert code == 0
    assert "a second signal stops at once" in said


def test_ctrl_c_stops_too(start):
    assert start("--admin-port", "0").stop(signal.SIGINT)[0] == 0


def test_ports_in_use_end_with_5(start, tmp_path):
    running = start("--admin-port", "0")
    for flags in (("--port", running.port), ("--port", "0", "--admin-port", running.port)):
        result = dcpd(*flags, "--data", tmp_path / "other")
        assert result.returncode == ExitCode.PORT
        assert f"127.0.0.1:{running.port} is in use" in result.stderr
    assert not (tmp_path / "other").exists()


def test_a_folder_that_is_in_use_or_foreign_ends_with_3(start, tmp_path):
    start("--admin-port", "0")
    ports = ("--port", "0", "--admin-port", "0")
    result = dcpd(*ports, "--data", tmp_path / "data")
    assert result.returncode == ExitCode.FOLDER
    assert str(tmp_path / "data") in result.stderr
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    result = dcpd(*ports, "--data", tmp_path / "photos")
    assert result.returncode == ExitCode.FOLDER
    assert "Traceback" not in result.stderr
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_a_damaged_log_ends_with_4(start, tmp_path):
    start("--admin-port", "0").stop()
    segments = sorted((tmp_path / "data" / "log").glob("*.log"))
    segments[-1].write_bytes(b"\xff" * 4096)
    result = dcpd("--port", "0", "--admin-port", "0", "--data", tmp_path / "data")
    assert result.returncode == ExitCode.DAMAGED
    assert "damaged" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_user_opens_the_door(tmp_path):
    """With a user, an address that is not loopback passes protected mode."""
    Users(tmp_path / "data" / USERS_FILE).add("alice", "wonderland")
    # 192.0.2.1 is reserved for documentation: no machine has it, so it ends at the next check.
    result = dcpd("--host", "192.0.2.1", "--port", "0", "--data", tmp_path / "data")
    assert result.returncode == ExitCode.PORT
    assert "this machine has no such address" in result.stderr


def test_a_flag_that_may_stand_alone_and_others_need_a_value():
    """Each of these ends with a refusal that tells how the arguments were read."""
    for arguments, refusal in (
        (("--test-mode", "--port", "x"), "--port: 'x' must be"),  # not the value of --test-mode
        (("--test-mode", "maybe"), "--test-mode: 'maybe' must be one of on, off"),
        (("--test-mode", "off", "--port", "x"), "--port: 'x' must be"),
        (("--port",), "requires an argument"),
    ):
        refused = dcpd(*arguments)
        assert (refused.returncode, refusal in refused.stderr) == (2, True), refused.stderr
