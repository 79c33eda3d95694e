"""Servers and dcpctl for tests of backups that need real ones."""

from __future__ import annotations

import pytest

from clients.cli.dcpctl import run
from support.server import DcpdProcess


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DcpdProcess(tmp_path_factory.mktemp("backup") / "data") as process:
        yield process


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Where archives are restored to."""
    with DcpdProcess(tmp_path_factory.mktemp("backup") / "other") as process:
        yield process


@pytest.fixture
def ctl(capfdbinary):
    def call(at, *arguments):
        code = run(["--server", at.address, *map(str, arguments)])
        out, err = capfdbinary.readouterr()
        return code, out, err.decode()

    return call


@pytest.fixture
def archive(tmp_path):
    return tmp_path / "archive"
