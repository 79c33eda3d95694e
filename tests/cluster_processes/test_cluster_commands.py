"""dcpctl cluster: a cluster of two processes made by commands, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clients.address import parse_address
from clients.errors import AuthenticationError
from clients.kv.sync_client import SyncKv
from clients.testing import DcpServer
from dcp.server.cluster.cluster_file import ClusterToken
from support.cluster_here import PARTITIONS
from support.etcd_members import IS_MISSING, EtcdMembers, skip_without_etcd
from support.server import STATUS, ctl, done, refused
from support.waiting import until


@contextmanager
def etcd_url(folder: Path) -> Iterator[str]:
    """Run one member; without etcd, name the embedded store."""
    if IS_MISSING:
        yield "embedded"
        return
    folder.mkdir()
    etcd = EtcdMembers(folder, 1)
    try:
        yield f"etcd://{etcd.endpoints[0]}"
    finally:
        etcd.close()


def test_commands_make_a_cluster_that_survives_a_dead_node(
    tmp_path: Path,
) -> None:
    with (
        etcd_url(tmp_path / "etcd") as url,
        DcpServer(tmp_path / "a") as a,
        DcpServer(tmp_path / "b") as b,
    ):
        assert "this node is alone" in done(a, "status")
        assert "in no cluster" in refused(a, "token")
        assert "9 copies are not possible" in refused(a, "init", "--copies", "9")
        assert "min in-sync 3" in refused(a, "init", "--copies", "2", "--min-in-sync", "3")
        assert "ftp://x' is not possible" in refused(a, "init", "--meta", "ftp://x")
        with a.connect() as kv:
            kv.set(b"k", b"v")
        pid = a.pid
        words = (
            "--copies", "2", "--min-in-sync", "1", "--name", "first", "--rack", "r1", "--meta", url
        )  # fmt: skip
        token = done(a, "init", *words).strip()
        assert a.pid == pid, "the process goes on"
        with a.connect() as kv:
            assert kv.get(b"k").value == b"v"
        assert done(a, "token").strip() == token
        assert "member already" in refused(a, "init")
        until(lambda: a.ask("GET", STATUS)["served_here"] == PARTITIONS)
        user = {"name": "ada", "password": "lovelace"}
        a.ask("POST", "/api/v1/users", user)  # changes are refused until the restart only

        assert "no token of a cluster" in refused(b, "join", "--token", "dcpd-cluster-xyz")
        short = msgspec.structs.replace(ClusterToken.from_text(token), secret="short")
        assert "the whole token" in refused(b, "join", "--token", short.to_text())
        wrong = msgspec.structs.replace(ClusterToken.from_text(token), secret="w" * 43)
        error = refused(b, "join", "--token", wrong.to_text())
        assert IS_MISSING or "the secret in the token is not that of this cluster" in error
        assert IS_MISSING or "try: Get a new token with `dcpctl cluster token`" in error
        with b.connect() as kv:
            kv.set(b"mine", b"v")
        assert "holds 1 document" in refused(b, "join", "--token", token)
        with b.connect() as kv:
            kv.delete(b"mine")
        words = ("--token", token, "--rack", "r2", "--name")
        assert "another member has the name first" in refused(b, "join", *words, "first")
        assert "this node is alone" in done(b, "status"), "a refusal changes nothing"
        done(b, "join", *words, "second")
        nodes = a.ask("GET", STATUS)["nodes"]
        assert {node["name"]: node["rack"] for node in nodes} == {"first": "r1", "second": "r2"}

        def is_complete() -> bool:
            status = json.loads(done(a, "status", "-o", "json"))
            return status["in_sync_sizes"] == {"2": PARTITIONS}

        until(is_complete)
        rows = [json.loads(line) for line in done(b, "map", "-o", "json").splitlines()]
        assert [row["vb"] for row in rows] == list(range(PARTITIONS))
        assert all(sorted(row["in_sync"]) == ["first", "second"] for row in rows)
        until(lambda: len(a.ask("GET", "/pools/default")["nodes"]) == 2)
        with a.connect() as kv:
            for number in range(100):
                kv.set(b"k%d" % number, b"v")
        skip_without_etcd()
        a.kill()
        until(lambda: b.ask("GET", STATUS)["served_here"] == PARTITIONS)
        assert "node first" in done(b, "status")
        with b.connect() as kv:
            for number in range(100):
                assert kv.get(b"k%d" % number).value == b"v"
            kv.set(b"k", b"w")


async def test_init_and_join_say_what_they_would_do_and_ask(tmp_path: Path) -> None:
    with DcpServer(tmp_path / "a") as a, DcpServer(tmp_path / "b") as b:
        init = ("cluster", "init", "--name", "first", "--copies", "2")
        ran = await ctl(a.port, *init, "--dry-run")
        assert ran.code == 0, ran.err
        assert ran.out.startswith("first becomes the first node of a new cluster\n")
        assert "! copies of each partition: 2; in sync for a write: a majority\n" in ran.out
        assert "! its data stays: 0 documents" in ran.out
        assert "! the node restarts: its connections end" in ran.out
        ran = await ctl(a.port, *init, "--dry-run", "-o", "json")
        assert ran.document["is_written"] is False
        assert ran.document["token"] == ""
        for words, why in (
            (("--copies", "9"), "9 copies are not possible"),
            (("--meta", "ftp://x"), "ftp://x' is not possible"),
        ):
            ran = await ctl(a.port, *init, *words, "--dry-run")
            assert (ran.code, ran.out) == (4, "")
            assert why in ran.err
        for words in ((), ("-o", "json")):
            ran = await ctl(a.port, *init, *words, typed="n\n")
            assert (ran.code, ran.out) == (1, "")
            assert ran.err.index("its connections end") < ran.err.index("Do it? [y/N]")
            assert "nothing changed" in ran.err
        assert "this node is alone" in done(a, "status")
        ran = await ctl(a.port, *init, typed="y\n")
        assert ran.code == 0, ran.err
        (token,) = ran.out.splitlines()

        join = ("cluster", "join", "--token", token, "--name", "second")
        ran = await ctl(b.port, *join, "--dry-run")
        assert ran.code == 0, ran.err
        assert ran.out.startswith("second becomes a node of cluster ")
        ran = await ctl(b.port, *join, "--name", "first", "--dry-run")
        assert ran.code == 4
        assert "another member has the name first" in ran.err
        ran = await ctl(b.port, *join, typed="n\n")
        assert (ran.code, ran.out) == (1, "")
        assert "Do it? [y/N]" in ran.err
        assert "this node is alone" in done(b, "status")
        assert len(a.ask("GET", STATUS)["nodes"]) == 1
        ran = await ctl(b.port, *join, "--yes", typed="")
        assert ran.code == 0, ran.err
        assert "Do it?" not in ran.err


def test_a_token_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    words = [sys.executable, "-m", "clients.cli", "cluster", "join", "--token-file"]
    for name, text in (
        ("-", "standard input is closed"),
        (str(tmp_path / "empty"), "is empty"),
        (str(tmp_path / "missing"), "cannot be read: No such file"),
    ):
        run = subprocess.run(
            ["sh", "-c", 'exec "$@" <&-', "sh", *words, name],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 2, run.stderr
        assert text in run.stderr
        assert "Traceback" not in run.stderr


def test_demo_goes_on_with_nodes_of_its_folder_with_drained_one(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "demo"
    with demo(folder) as addresses:
        run = dcpctl_at(addresses["n1"], "cluster", "drain", "n2", "--yes", "--wait")
        assert run.returncode == 0, run.stderr
    words = ("cluster", "demo", "--data", str(folder), "--nodes", "1", "-o", "json")
    with subprocess.Popen(
        [sys.executable, "-m", "clients.cli", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            started = next_line(process)
            assert (started["v"], started["result"]) == (1, "started")
            assert started["metadata_store"] == "embedded"
            nodes = {node["name"]: node["address"] for node in started["nodes"]}
            assert alive_of(nodes["n1"]) == {"n1": True, "n2": True}
            for action, result in (("pause", "paused"), ("resume", "resumed"), ("kill", "killed")):
                ran = in_demo(folder, action, "n2", "-o", "json")
                assert json.loads(ran.stdout) == {"v": 1, "result": result, "name": "n2"}
            ended = next_line(process)
            assert (ended["result"], ended["name"]) == ("ended", "n2")
            assert ended["starts_again"] is True
            assert next_line(process) == {"v": 1, "result": "back", "name": "n2"}
        finally:
            process.terminate()
            _, error = process.communicate(timeout=60)
    assert "has n1, n2, and all of them start" in error


def next_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next JSON line of a process."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "it has ended"
    found: dict[str, Any] = json.loads(line)
    return found


@contextmanager
def demo(folder: Path, *arguments: str) -> Iterator[dict[str, str]]:
    """Run a demo of two nodes; yield name -> HOST:PORT, as it prints them."""
    with subprocess.Popen(
        [sys.executable, "-m", "clients.cli", "cluster", "demo", "--nodes", "2", "--copies", "2",
         "--data", str(folder), *arguments],
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while lines[-1] and not lines[-1].startswith("try"):
            lines.append(process.stdout.readline())
        try:
            assert lines[-1], lines
            yield dict(line.split()[:2] for line in lines[:2])
        finally:
            process.terminate()
            process.wait(60)


def in_demo(
    folder: Path, action: str, name: str, *options: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clients.cli", "cluster", action, name, "--data", str(folder),
         *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def dcpctl_at(address: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clients.cli", "--server", address, "--timeout", "30", *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def alive_of(address: str) -> dict[str, bool]:
    """Return node -> whether it is up, as a node says."""
    run = dcpctl_at(address, "cluster", "status", "-o", "json")
    assert "Traceback" not in run.stderr
    found = json.loads(run.stdout) if run.returncode == 0 else {"nodes": []}
    return {node["name"]: node["is_alive"] for node in found["nodes"]}


def check_commands(folder: Path, first: str, pids: dict[str, int]) -> None:
    """Pause, resume and kill nodes of a demo, and nothing else."""
    until(lambda: alive_of(first) == {"n1": True, "n2": True})
    for action, state in (("pause", "T"), ("resume", "RSD")):
        assert in_demo(folder, action, "n2").returncode == 0
        until(lambda state=state: state_of(pids["n2"]) in state)
    assert in_demo(folder, "kill", "n2").returncode == 0
    until(lambda: alive_of(first).get("n2") is False)
    error = in_demo(folder, "kill", "n2").stderr
    assert "n2 does not run" in error
    error = in_demo(folder, "kill", "n9").stderr
    assert "the demo has no node 'n9'" in error
    assert "It has n1, n2" in error

    # A number that is another process's by now is left alone.
    with subprocess.Popen(["sleep", "60"]) as other:
        (folder / "demo.json").write_text(json.dumps({"n1": other.pid}))
        assert "n1 does not run" in in_demo(folder, "kill", "n1").stderr
        assert other.poll() is None
        other.kill()
    (folder / "demo.json").write_text(json.dumps(pids))


@pytest.mark.parametrize("meta", ["embedded", "etcd"])
def test_demo_takes_its_nodes_with_it_and_only_those_are_killed(tmp_path: Path, meta: str) -> None:
    if meta == "etcd":
        skip_without_etcd()
    folder = tmp_path / "demo"
    with demo(folder, "--meta", meta) as addresses:
        assert list(addresses) == ["n1", "n2"]
        pids = json.loads((folder / "demo.json").read_text())
        assert sorted(pids) == ["n1", "n2"]
        assert (folder / "etcd.ports").exists() == (meta == "etcd")
        if meta == "embedded":
            check_commands(folder, addresses["n1"], pids)
    for pid in pids.values():
        assert not Path(f"/proc/{pid}").exists()
    assert "no demo runs" in in_demo(folder, "kill", "n1").stderr
    other_store = "embedded" if meta == "etcd" else "etcd"
    run = subprocess.run(
        [sys.executable, "-m", "clients.cli", "cluster", "demo", "--data", str(folder),
         "--meta", other_store],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert "has the other metadata store" in run.stderr


def state_of(pid: int) -> str:
    """Return the letter of a process's state: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_containers_become_members_with_a_password_file(
    tmp_path: Path,
) -> None:
    """The first user of the first node is the cluster's. Another one gets it from there."""
    token = tmp_path / "token"
    for name in ("first", "second"):
        (tmp_path / name).write_text(f"password of {name}")

    def node(name: str, way: str) -> DcpServer:
        return DcpServer(
            tmp_path / f"data-{name}", "--cluster", way, "--cluster-token-file", str(token),
            "--node-name", name, "--rack", f"rack-{name}",
            "--admin-password-file", str(tmp_path / name),
        )  # fmt: skip

    def lets_in(server: DcpServer, password: str) -> bool:
        address = parse_address(f"dcpd://admin:{password.replace(' ', '%20')}@{server.address}")
        try:
            with SyncKv(address) as kv:
                kv.set(b"k", b"v")
        except AuthenticationError:
            return False
        return True

    with node("first", "init") as first, node("second", "join") as second:
        until(lambda: lets_in(first, "password of first"))
        until(lambda: lets_in(second, "password of first"))
        assert not lets_in(second, "password of second")
        nodes = second.ask("GET", STATUS)["nodes"]
        assert {node["name"]: node["rack"] for node in nodes} == {
            name: f"rack-{name}" for name in ("first", "second")
        }


def test_the_process_of_a_removed_node_ends_with_0_and_says_why(tmp_path: Path) -> None:
    with DcpServer(tmp_path / "a") as a, DcpServer(tmp_path / "b") as b:
        token = done(a, "init", "--copies", "1", "--name", "first").strip()
        until(lambda: a.ask("GET", STATUS)["served_here"] == PARTITIONS)
        done(b, "join", "--token", token, "--name", "second")
        until(lambda: all(node["is_alive"] for node in a.ask("GET", STATUS)["nodes"]))
        process = b._process
        assert process is not None
        done(a, "remove", "second", "--yes", "--wait")
        assert process.wait(30) == 0
        log = b.log_path.read_text()
        assert "node second was removed from its cluster" in log
        assert "start it with an empty --data folder" in log
        assert "Traceback" not in log
