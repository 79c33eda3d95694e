"""The examples, as their users run them, against a server whose history branches."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clients.testing import DcpServer
from vbucket.model.ids import vbucket_of

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'clients' / 'front'}"}


@pytest.fixture
def server(tmp_path):
    with DcpServer(tmp_path / "data") as process:
        yield process


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def branch_away(server, key, values):
    """Write values, the first of which stays; return when the others never were."""
    with server.connect() as kv:
        seqnos = [kv.set(key, value).seqno for value in values]
    return lambda: server.branch(vbucket_of(key), seqnos[0])


def test_sqlite_mirror_holds_exactly_what_the_server_has(server, tmp_path):
    path = tmp_path / "mirror.db"
    with server.connect() as kv:
        for n in range(50):
            kv.set(b"k%d" % n, b"1")
        kv.delete(b"k3")
    branch = branch_away(server, b"k7", [b"stays", b"goes"])
    run("sqlite_mirror", server.address, path, "--until-now")
    rows = documents_in(path)
    assert rows[b"k7"] == b"goes"
    assert b"k3" not in rows
    assert len(rows) == 49
    branch()
    run("sqlite_mirror", server.address, path, "--until-now")
    assert documents_in(path) == rows | {b"k7": b"stays"}


def documents_in(path):
    with sqlite3.connect(path, timeout=20) as db:
        rows = dict(db.execute("SELECT key, value FROM documents"))
    db.close()
    return rows


@pytest.mark.crash
def test_sqlite_mirror_is_exact_although_it_is_killed(server, tmp_path):
    path = tmp_path / "mirror.db"
    command = [sys.executable, str(EXAMPLES / "sqlite_mirror.py"), server.address, str(path)]
    with server.connect() as kv:
        for number in range(3):
            process = subprocess.Popen(command, env=ENVIRONMENT)
            for n in range(300):
                kv.set(b"k%d" % n, b"%d" % number)
                if n == 200 and number == 1:
                    server.branch(vbucket_of(b"k200"), 1)
            while not path.exists():
                time.sleep(0.01)
            process.kill()
            process.wait()
        run("sqlite_mirror", server.address, path, "--until-now")
        rows = documents_in(path)
        assert {key: kv.get(key).value for key in rows} == rows
        assert len(rows) == 300


def test_search_index_finds_what_is_there_and_nothing_else(server, tmp_path):
    path = tmp_path / "index.db"
    with server.connect() as kv:
        kv.set(b"page:1", b"the quick brown fox")
        kv.set(b"page:2", b"the lazy dog")
        kv.set(b"page:3", b"a fox and a dog")
        kv.delete(b"page:3")
        for key in (b"\xfe", b"\xff"):  # which read alike
            kv.set(key, b"an owl")
    branch = branch_away(server, b"page:4", [b"a red fox", b"a blue whale"])
    found = run("search_index", server.address, path, "--search", "fox")
    assert found == "page:1: the quick brown [fox]\n"
    assert "whale" in run("search_index", server.address, path, "--search", "whale")
    branch()
    assert run("search_index", server.address, path, "--search", "whale") == ""
    assert "red [fox]" in run("search_index", server.address, path, "--search", "fox")
    assert run("search_index", server.address, path, "--search", "owl").count("an [owl]") == 2


def test_example_refused_partition_does_not_pretend_to_follow_it(server, tmp_path):
    server.fault(opcode="DCP_STREAM_REQ", vb=7, status="EACCESS", count=2)
    for name in ("sqlite_mirror", "search_index"):
        done = subprocess.run(
            [sys.executable, EXAMPLES / f"{name}.py", server.address, tmp_path / name],
            env=ENVIRONMENT, capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert "RuntimeError: stream request from seqno 0" in done.stderr


PROGRAMS = [
    path
    for path in sorted(EXAMPLES.rglob("*.py"))
    if 'if __name__ == "__main__":' in path.read_text()
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_every_program_says_what_it_takes_and_stands_in_the_list(program):
    listed = (EXAMPLES / "README.md").read_text()
    assert f"`{program.relative_to(EXAMPLES)}`" in listed
    done = subprocess.run(
        [sys.executable, program, "--help"],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def test_what_is_no_program_stands_with_the_demos():
    others = set(EXAMPLES.rglob("*.py")) - set(PROGRAMS)
    assert {path.parent.name for path in others} == {"demos"}
    assert len(PROGRAMS) > 5


def test_a_program_says_what_it_does(server, tmp_path):
    with server.connect() as kv:
        kv.set(b"key", b"value")
    for name, more in (("sqlite_mirror", ("--until-now",)), ("search_index", ("--search", "x"))):
        done = subprocess.run(
            [sys.executable, EXAMPLES / f"{name}.py", server.address, tmp_path / name, *more],
            env=ENVIRONMENT, capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        said = done.stderr.splitlines()
        assert said[0] == f"{tmp_path / name} follows {server.address} until it has caught up"
        assert said[-1].split() == ["mutations:", "1", "deletions:", "0", "rollbacks:", "0"]


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_index_with_text_keys_is_rebuilt_and_any_other_kept():
    example = load("search_index")
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        old = example.SCHEMA.replace("key BLOB", "key TEXT")
        db.executescript(old)
        for key in ("page:1", b"page:2"):
            db.execute("DELETE FROM keys")
            db.execute("INSERT INTO keys VALUES (?, 1, 5)", (key,))
            db.execute("INSERT INTO texts VALUES ('a fox')")
            db.execute("INSERT OR REPLACE INTO positions VALUES (5, x'80')")
            example.prepare(db)
            counts = [
                db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
                for table in ("keys", "texts", "positions")
            ]
            assert counts == ([0, 0, 0] if key == "page:1" else [1, 1, 1])


async def test_cache_invalidation_forgets_changes_and_never_weres(server):
    import asyncio

    example = load("cache_invalidation")
    key = b"cached"
    branch = branch_away(server, key, [b"1", b"2"])
    async with example.Cache(server.address) as cache:

        async def becomes(value):
            for _ in range(1000):
                if await cache.get(key) == value:
                    return
                await asyncio.sleep(0.01)
            raise AssertionError(f"it never became {value}")

        assert await cache.get(key) == b"2"
        await asyncio.to_thread(branch)
        await becomes(b"1")
        hits = cache.hits
        assert await cache.get(key) == b"1"
        assert cache.hits == hits + 1

        def change():
            with server.connect() as kv:
                kv.set(key, b"3")

        await asyncio.to_thread(change)
        await becomes(b"3")
