"""Both databases keep the same rules."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.kv_env import MemoryEnv
from support.forgetful_disk import small_disk
from vbucket.log.device import UnknownFormatError
from vbucket.store.environment import (
    KvEnv,
    KvReader,
    MapFullError,
    StoreDamagedError,
    StoreFailedError,
    StoreFullError,
    with_room,
)
from vbucket.store.lmdb.environment_lmdb import LmdbEnv

TABLES = ("fruit", "other")


@pytest.fixture(params=["memory", "lmdb"])
def env(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KvEnv]:
    env = MemoryEnv(TABLES) if request.param == "memory" else LmdbEnv(tmp_path / "s", TABLES)
    yield env
    env.close()


def rows(reader: KvReader, start: bytes = b"\x00", stop: bytes | None = None) -> dict[bytes, bytes]:
    return {key: bytes(value) for key, value in reader.range("fruit", start, stop)}


def fill(env: KvEnv, *keys: bytes) -> None:
    with env.write() as write:
        for key in keys:
            write.put("fruit", key, b"=" + key)


def pair(found: tuple[bytes, bytes | memoryview] | None) -> tuple[bytes, bytes] | None:
    return (found[0], bytes(found[1])) if found else None


def test_an_empty_table_has_nothing(env: KvEnv) -> None:
    snapshot = env.snapshot()
    assert snapshot.get("fruit", b"a") is None
    assert snapshot.first_at_or_after("fruit", b"a") is None
    assert snapshot.last_at_or_before("fruit", b"a") is None
    assert rows(snapshot) == {}
    snapshot.close()


def test_tables_are_apart(env: KvEnv) -> None:
    fill(env, b"a")
    snapshot = env.snapshot()
    assert snapshot.get("other", b"a") is None
    assert bytes(snapshot.get("fruit", b"a") or b"") == b"=a"
    snapshot.close()


def test_a_snapshot_sees_one_state_until_it_is_refreshed(env: KvEnv) -> None:
    fill(env, b"a")
    snapshot = env.snapshot()
    assert pair(snapshot.last_at_or_before("fruit", b"z")) == (b"a", b"=a")
    fill(env, b"b")
    assert rows(snapshot) == {b"a": b"=a"}
    assert pair(snapshot.last_at_or_before("fruit", b"z")) == (b"a", b"=a")
    snapshot.refresh()
    assert rows(snapshot) == {b"a": b"=a", b"b": b"=b"}
    assert pair(snapshot.last_at_or_before("fruit", b"z")) == (b"b", b"=b")
    snapshot.close()


def test_transaction_sees_its_own_writes_others_see_them_later(env: KvEnv) -> None:
    fill(env, b"a", b"b")
    snapshot = env.snapshot()
    with env.write() as write:
        assert write.delete("fruit", b"a")
        assert not write.delete("fruit", b"a")
        write.put("fruit", b"b", b"new")
        write.put_sorted("fruit", [(b"c", b"1"), (b"d", b"2")])
        assert rows(write) == {b"b": b"new", b"c": b"1", b"d": b"2"}
        assert pair(write.first_at_or_after("fruit", b"bb")) == (b"c", b"1")
        assert write.get("fruit", b"a") is None
        snapshot.refresh()
        assert rows(snapshot) == {b"a": b"=a", b"b": b"=b"}
    snapshot.refresh()
    assert rows(snapshot) == {b"b": b"new", b"c": b"1", b"d": b"2"}
    snapshot.close()


def test_many_keys_are_looked_up_at_once(env: KvEnv) -> None:
    fill(env, b"a", b"c", b"e")
    with env.write() as write:
        write.put("fruit", b"d", b"new")
        found = write.get_many("fruit", [b"a", b"b", b"d", b"e", b"f"])
        assert dict(found) == {b"a": b"=a", b"d": b"new", b"e": b"=e"}
        assert not dict(write.get_many("other", [b"a"]))
        assert not dict(write.get_many("fruit", []))


def test_what_tables_take_is_told_apart(env: KvEnv) -> None:
    before = env.used_bytes(["fruit"]), env.used_bytes(["other"])
    with env.write() as write:
        for number in range(100):
            write.put("fruit", b"%d" % number, bytes(1_000))
    assert env.used_bytes(["fruit"]) >= before[0] + 100_000
    assert env.used_bytes(["other"]) == before[1]
    assert env.used_bytes() == env.used_bytes(["fruit"]) + env.used_bytes(["other"])


def test_a_transaction_that_raises_leaves_nothing(env: KvEnv) -> None:
    fill(env, b"a")

    def write_and_raise() -> None:
        with env.write() as write:
            write.put("fruit", b"b", b"1")
            write.delete("fruit", b"a")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_raise()
    snapshot = env.snapshot()
    assert rows(snapshot) == {b"a": b"=a"}
    snapshot.close()


KEYS = st.binary(min_size=1, max_size=4)


@given(
    keys=st.sets(KEYS, max_size=12),
    gone=st.sets(KEYS, max_size=4),
    probes=st.lists(KEYS, min_size=1, max_size=8),
)
def test_seeks_and_ranges_are_those_of_a_sorted_list(
    env_once: KvEnv, keys: set[bytes], gone: set[bytes], probes: list[bytes]
) -> None:
    with env_once.write() as write:
        for key in rows(write):
            write.delete("fruit", key)
        write.put_sorted("fruit", [(key, b"=" + key) for key in sorted(keys | gone)])
        for key in gone:
            write.delete("fruit", key)
    there = sorted(keys - gone)
    snapshot = env_once.snapshot()
    for probe in probes:
        above = [(key, b"=" + key) for key in there if key >= probe]
        below = [(key, b"=" + key) for key in there if key <= probe]
        assert pair(snapshot.first_at_or_after("fruit", probe)) == (above[0] if above else None)
        assert pair(snapshot.last_at_or_before("fruit", probe)) == (below[-1] if below else None)
        assert rows(snapshot, probe) == dict(above)
        assert rows(snapshot, probes[0], probe) == {
            key: b"=" + key for key in there if probes[0] <= key < probe
        }
    snapshot.close()


@pytest.fixture(scope="module", params=["memory", "lmdb"])
def env_once(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KvEnv]:
    folder = tmp_path_factory.mktemp("kv")
    env = MemoryEnv(TABLES) if request.param == "memory" else LmdbEnv(folder / "s", TABLES)
    yield env
    env.close()


# -- memory only ---------------------------------------------------------------------------------


batches = st.lists(st.tuples(st.binary(min_size=1, max_size=3), st.binary(max_size=9)), max_size=6)


@given(
    story=st.lists(
        st.tuples(st.just("sorted"), batches.map(sorted))
        | st.tuples(st.just("sorted"), batches)
        | st.tuples(st.sampled_from(["put", "delete"]), batches)
        | st.just(("commit", [])),
        max_size=12,
    )
)
def test_rows_in_order_are_put_wherever_they_belong(
    tmp_path_factory: pytest.TempPathFactory, story: list[tuple[str, list[tuple[bytes, bytes]]]]
) -> None:
    """Above all others, which are appended, between them and over them; in order or not."""
    there: dict[bytes, bytes] = {}
    transactions: list[list[tuple[str, list[tuple[bytes, bytes]]]]] = [[]]
    for step in story:
        if step[0] == "commit":
            transactions.append([])
        else:
            transactions[-1].append(step)
    with closing(LmdbEnv(tmp_path_factory.mktemp("rows") / "s", TABLES)) as env:
        for steps in transactions:
            with env.write() as write:
                for kind, items in steps:
                    if kind == "sorted":
                        write.put_sorted("fruit", items)
                    for key, value in items:
                        if kind == "put":
                            write.put("fruit", key, value)
                        elif kind == "delete":
                            assert write.delete("fruit", key) == (key in there)
                            there.pop(key, None)
                            continue
                        there[key] = value
            snapshot = env.snapshot()
            assert rows(snapshot) == {key: there[key] for key in sorted(there) if key >= b"\0"}
            snapshot.close()


def test_an_armed_commit_fails_once_and_leaves_nothing() -> None:
    env = MemoryEnv(TABLES)
    env.fail_commit(2)
    fill(env, b"a")
    with pytest.raises(StoreFullError):
        fill(env, b"b")
    assert rows(env.snapshot()) == {b"a": b"=a"}
    fill(env, b"c")
    assert rows(env.snapshot()) == {b"a": b"=a", b"c": b"=c"}


# -- LMDB only -----------------------------------------------------------------------------------


def test_what_was_committed_is_there_after_opening_again(tmp_path: Path) -> None:
    env = LmdbEnv(tmp_path / "s", TABLES)
    fill(env, b"a")
    env.close()
    env = LmdbEnv(tmp_path / "s", TABLES)
    assert rows(env.snapshot()) == {b"a": b"=a"}
    env.close()


def test_killed_readers_pages_are_free_once_another_opens(tmp_path: Path) -> None:
    """The server has the store open all the time, so LMDB's table of readers stays."""
    env = LmdbEnv(tmp_path / "s", TABLES)
    fill(env, b"a")
    script = (
        "import os, signal, sys, pathlib\n"
        "from vbucket.store.lmdb.environment_lmdb import LmdbEnv\n"
        "env = LmdbEnv(pathlib.Path(sys.argv[1]), sys.argv[2].split())\n"
        "if sys.argv[3] == 'read':\n"
        "    snapshot = env.snapshot()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path / "s"), " ".join(TABLES)]
    reader = subprocess.Popen([*arguments, "read"])
    assert reader.wait() == -signal.SIGKILL
    assert str(reader.pid) in env._env.readers()
    subprocess.run([*arguments, "open"], check=True)
    assert str(reader.pid) not in env._env.readers()
    env.close()


@pytest.fixture(params=["memory", "lmdb"])
def small_env(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KvEnv]:
    """A database whose map is full soon."""
    env: KvEnv
    if request.param == "memory":
        env = MemoryEnv(TABLES, map_bytes=1 << 20)
    else:
        env = LmdbEnv(tmp_path / "s", TABLES, map_size_bytes=1 << 20)
    yield env
    env.close()


def put_much(env: KvEnv, prefix: bytes, count: int = 100) -> None:
    with env.write() as write:
        for number in range(count):
            write.put("fruit", prefix + b"%03d" % number, bytes(1 << 16))


def test_a_full_map_says_so_and_writes_nothing(small_env: KvEnv) -> None:
    fill(small_env, b"a")
    for _ in range(2):
        with pytest.raises(MapFullError, match="map of 1048576 bytes is full"):
            put_much(small_env, b"x")
    with pytest.raises(MapFullError), small_env.write() as write:
        write.put_sorted("fruit", [(b"%03d" % n, bytes(1 << 16)) for n in range(100)])
    snapshot = small_env.snapshot()
    assert rows(snapshot) == {b"a": b"=a"}
    snapshot.close()
    fill(small_env, b"b")


def test_a_full_map_grows_and_what_was_begun_is_done_again(small_env: KvEnv) -> None:
    attempts: list[bytes] = []

    def work() -> int:
        attempts.append(b"")
        put_much(small_env, b"x")
        return 7

    assert with_room(small_env, work) == 7
    assert len(attempts) > 2
    snapshot = small_env.snapshot()
    assert len(rows(snapshot)) == 100
    snapshot.close()


def test_a_map_that_cannot_grow_any_more_says_so() -> None:
    env = MemoryEnv(TABLES, map_bytes=1 << 20, map_bytes_max=1 << 21)
    with pytest.raises(MapFullError):
        with_room(env, lambda: put_much(env, b"x"))
    assert rows(env.snapshot()) == {}


def test_reader_adopts_map_that_another_process_made_larger(tmp_path: Path) -> None:
    env = LmdbEnv(tmp_path / "s", TABLES, map_size_bytes=1 << 20)
    fill(env, b"a")
    snapshot = env.snapshot()
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from vbucket.store.environment import with_room\n"
        "from vbucket.store.lmdb.environment_lmdb import LmdbEnv\n"
        "env = LmdbEnv(Path(sys.argv[1]), sys.argv[2].split(), map_size_bytes=1 << 20)\n"
        "def work():\n"
        "    with env.write() as write:\n"
        "        for number in range(100):\n"
        "            write.put('fruit', b'x%03d' % number, bytes(1 << 16))\n"
        "with_room(env, work)\n"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path / "s"), " ".join(TABLES)]
    subprocess.run(arguments, check=True)
    assert rows(snapshot) == {b"a": b"=a"}
    snapshot.refresh()
    assert len(rows(snapshot)) == 101
    snapshot.close()
    env.close()


@pytest.mark.parametrize(("error", "wanted"), [
    (lmdb.DiskError("No space left on device"), StoreFullError),
    (lmdb.Error("Input/output error"), StoreFailedError),
    (lmdb.CorruptedError("page"), StoreFailedError),
])  # fmt: skip
def test_errors_of_a_transaction_get_their_meaning(
    tmp_path: Path, error: Exception, wanted: type[Exception]
) -> None:
    env = LmdbEnv(tmp_path / "s", TABLES)
    with pytest.raises(wanted, match=str(error)), env.write():
        raise error
    env.close()


def test_a_disk_that_takes_a_part_of_a_write_is_full(tmp_path: Path) -> None:
    """LMDB calls that an input/output error."""
    full = pytest.raises(StoreFullError, match="the disk is full: a write was cut short")
    with small_disk("1m") as disk, closing(LmdbEnv(disk / "s", TABLES)) as env:
        with full, env.write() as write:
            write.put("fruit", b"a", bytes(2 << 20))
        fill(env, b"b")
        with closing(env.snapshot()) as snapshot:
            assert rows(snapshot) == {b"b": b"=b"}


@pytest.mark.parametrize("content", [b"not LMDB at all" * 2000, b""])
def test_a_file_that_is_not_lmdb_is_refused_or_begun(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "data.mdb").write_bytes(content)
    if content:
        with pytest.raises(UnknownFormatError, match="use the version of dcpd that wrote it"):
            LmdbEnv(folder, TABLES)
    else:
        LmdbEnv(folder, TABLES).close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "s" / "data.mdb").mkdir(parents=True)
    with pytest.raises(StoreFailedError, match="cannot be opened"):
        LmdbEnv(tmp_path / "s", TABLES)


def test_a_broken_tree_is_damage(tmp_path: Path) -> None:
    env = LmdbEnv(tmp_path / "s", TABLES)
    fill(env, *(b"%04d" % number for number in range(2000)))
    env.close()
    file = tmp_path / "s" / "data.mdb"
    content = bytearray(file.read_bytes())
    for at in range(2 * 4096, len(content), 4096):
        content[at + 10 : at + 12] = b"\x99\x99"  # the page's flags
    file.write_bytes(content)
    with pytest.raises((StoreDamagedError, StoreFailedError, UnknownFormatError)):
        list(LmdbEnv(tmp_path / "s", TABLES).snapshot().range("fruit", b"0"))


def test_a_file_that_cannot_be_mapped_is_a_failure_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may not have the address space. The next attempt may find it."""

    def no_memory(*_arguments: object, **_options: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with closing(LmdbEnv(tmp_path / "s", TABLES)) as env:
        with env.write() as write:
            write.put("fruit", b"a", bytes(1 << 20))
        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", no_memory)
            with env.write() as write:  # is committed; the checksums of its pages are missing
                write.put("fruit", b"b", bytes(1 << 20))
            named = pytest.raises(StoreFailedError, match=r"cannot be mapped: .*allocate memory")
            with named, env.write():
                pass
        with env.write() as write:
            assert write.last_at_or_before("fruit", b"c") == (b"b", bytes(1 << 20))
