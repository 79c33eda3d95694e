"""The port of an embedded metadata store: below the ephemeral range, free, and kept."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from clients.testing import DcpServer
from dcp.server.cluster.cluster_file import read_cluster_file
from dcp.server.cluster.joining.becoming_member import init_cluster
from dcp.server.cluster.joining.enrolment import EnrolmentError, NewCluster
from dcp.server.cluster.meta_access import MetaUrlError, place_of
from dcp.server.main import ExitCode
from dcp.server.net import fixed_port
from dcp.server.net.fixed_port import PORT_MAX, PORT_MIN
from support.cluster_here import node_here


class Drawn(random.Random):
    """Draws these ports in turn."""

    def __init__(self, *ports: int) -> None:
        super().__init__(0)
        self.ports = list(ports)

    def randint(self, a: int, b: int) -> int:
        port = self.ports.pop(0)
        assert a <= port <= b
        return port


async def test_init_chooses_a_free_port_below_the_ephemeral_range(tmp_path: Path) -> None:
    with socket.socket() as taken:
        free = fixed_port.free_port("127.0.0.1", random.SystemRandom())
        other = fixed_port.free_port("127.0.0.1", random.SystemRandom())
        assert free is not None
        assert other is not None
        taken.bind(("127.0.0.1", other))
        taken.listen()
        async with node_here(tmp_path, {}) as node:
            draw = Drawn(other, other, free)
            token = await init_cluster(node._newcomer(), NewCluster(1, None), draw=draw)
            content = read_cluster_file(node.about.data_dir)
    assert content is not None
    assert content.meta == token.meta == f"embedded://127.0.0.1:{free}"
    assert PORT_MIN <= place_of(token.meta).port <= PORT_MAX < 32768


async def test_without_a_free_port_init_says_so(tmp_path: Path) -> None:
    with socket.socket() as taken:
        port = fixed_port.free_port("127.0.0.1", random.SystemRandom())
        assert port is not None
        taken.bind(("127.0.0.1", port))
        taken.listen()
        async with node_here(tmp_path, {}) as node:
            draw = Drawn(*[port] * fixed_port.TRIES)
            with pytest.raises(EnrolmentError, match="no free port was found"):
                await init_cluster(node._newcomer(), NewCluster(1, None), draw=draw)
            assert read_cluster_file(node.about.data_dir) is None


def test_a_url_without_a_port_names_no_store() -> None:
    for url in ("embedded", "embedded://127.0.0.1", "embedded://127.0.0.1:0"):
        with pytest.raises(MetaUrlError, match="is not possible"):
            place_of(url)


def test_taken_port_ends_the_start_with_what_to_try(tmp_path: Path) -> None:
    with DcpServer(tmp_path / "a", "--cluster", "init", "--cluster-copies", "1") as server:
        content = read_cluster_file(server.data)
        assert content is not None
        port = place_of(content.meta).port
        server.stop()
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", port))
            other.listen()
            run = subprocess.run(
                [sys.executable, "-m", "dcp.server.main", "--port", "0", "--admin-port", "0",
                 "--data", str(server.data)],
                capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
        assert run.returncode == ExitCode.PORT, run.stderr
        assert f"127.0.0.1:{port}: another process uses it. Stop that one" in run.stderr
        assert "ss -ltnp" in run.stderr
        assert "Traceback" not in run.stderr
        server.start()  # nothing was lost by it
