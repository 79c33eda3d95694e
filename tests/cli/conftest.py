"""A live server for the tests of dcpctl, and dcpctl in this process. Each test has its own keys."""

from __future__ import annotations

import io
import json
import sys

import pytest

from clients.cli.dcpctl import run
from support.server import DcpdProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with DcpdProcess(tmp_path_factory.mktemp("dcpctl") / "data") as process:
        yield process


@pytest.fixture
def local_ctl(capfdbinary, monkeypatch, tmp_path):
    """dcpctl with no settings of the machine: returns (exit code, stdout, stderr)."""
    for name in ("SERVER", "USER", "PASSWORD", "PASSWORD_FILE", "CONTEXT"):
        monkeypatch.delenv(f"DCPCTL_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def call(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = run([str(argument) for argument in arguments])
        out, err = capfdbinary.readouterr()
        assert b"Traceback" not in err
        return code, out, err.decode()

    return call


@pytest.fixture
def ctl(server, local_ctl, monkeypatch):
    """dcpctl that talks to the server, which all tests here share."""
    monkeypatch.setenv("DCPCTL_SERVER", server.address)
    return local_ctl


@pytest.fixture
def rows(ctl):
    """dcpctl -o json: returns the objects that it prints; the exit code must be 0."""

    def call(*arguments, stdin=b""):
        code, out, err = ctl(*arguments, "-o", "json", stdin=stdin)
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]

    return call
