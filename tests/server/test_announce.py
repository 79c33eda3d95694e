"""dcpd --ready-fd and --print json: programs learn the ports without reading words."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from clients.address import parse_address
from clients.kv.sync_client import SyncKv

DCPD = (sys.executable, "-m", "dcp.server.main", "--port", "0", "--admin-port", "0")


@pytest.fixture
def dcpd(tmp_path):
    """Start dcpd with these options; it is killed at the end."""
    started = []

    def start(*arguments, **options):
        process = subprocess.Popen(
            [*DCPD, "--data", str(tmp_path / "data"), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **options,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def check(line, process, tmp_path):
    ready = json.loads(line)
    assert (ready["v"], ready["event"], ready["pid"]) == (1, "ready", process.pid)
    assert ready["data"] == str(tmp_path / "data")
    assert (ready["durability"], ready["host"]) == ("commit", "127.0.0.1")
    assert (ready["kv_tls_port"], ready["admin_tls_port"]) == (0, 0)
    with SyncKv(parse_address(f"127.0.0.1:{ready['kv_port']}")) as kv:
        assert kv.topology().nodes[0].mgmt_port == ready["admin_port"]


def test_a_descriptor_gets_one_line_and_is_closed(dcpd, tmp_path):
    reading, writing = os.pipe()
    process = dcpd("--ready-fd", str(writing), pass_fds=(writing,))
    os.close(writing)
    with os.fdopen(reading) as pipe:
        check(pipe.read(), process, tmp_path)  # read() ends: the server has closed it
    assert process.stdout.readline().startswith("dcpd ")


def test_stdout_gets_the_line_instead_of_words(dcpd, tmp_path):
    process = dcpd("--print", "json")
    check(process.stdout.readline(), process, tmp_path)
    process.terminate()
    assert process.stdout.read() == ""


def test_a_server_that_does_not_start_closes_the_descriptor(dcpd, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cat.jpg").write_bytes(b"cat")
    reading, writing = os.pipe()
    process = dcpd("--ready-fd", str(writing), pass_fds=(writing,))
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == ""
    assert process.wait(20) == 3


def test_a_descriptor_that_is_not_open_is_a_usage_error(tmp_path):
    done = subprocess.run(
        [*DCPD, "--data", str(tmp_path / "data"), "--ready-fd", "77"],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--ready-fd 77: Bad file descriptor" in done.stderr
    assert not (tmp_path / "data").exists()
