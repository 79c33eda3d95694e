"""Leases of archives on stores without locks, and locks of local ones: one writer at a time.

The model runs writers as threads, one operation of the store at a time, in every order that
hypothesis draws; time is a number that stands still, or jumps, between two operations.
"""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.backup.archives import lock as lock_module
from clients.backup.archives.archive import create_archive, open_archive
from clients.backup.archives.archive_errors import ArchiveLockedError
from clients.backup.archives.lock import LEASE_S, ArchiveLock


class Store:
    """Files in memory, and one clock. An operation waits until it is its writer's turn."""

    def __init__(self):
        self.files = {}
        self.now_s = 1_000_000.0
        self.turns = {}
        self.done = threading.Semaphore(0)
        self.round = self.asked = 0

    def leave_dead_flag(self):
        """Somebody was killed while it held the lease."""
        dead = {"purpose": "dead", "state": "held", "renewed_s": self.now_s - 2 * LEASE_S}
        self.files["locks/0-dead"] = json.dumps(dead).encode()

    def wait_for_turn(self):
        turn = self.turns.get(threading.current_thread().name)
        if turn is not None:
            self.done.release()
            turn.acquire()

    def let(self, name):
        """Let a writer go up to its next operation."""
        self.turns[name].release()
        self.done.acquire()

    # What the lock asks of `time`.

    def time(self):
        return self.now_s

    monotonic = time

    def time_ns(self):
        """No two are the same, so that it does not depend on chance who is first."""
        self.asked += 1
        return int(self.now_s * 1e9) + self.asked

    def sleep(self, pause_s):
        self.now_s += pause_s
        self.wait_for_turn()


class StorePlace:
    """The part of a Place that a lease uses; create-if-absent is not there."""

    is_local, url = False, "store://archive"

    def __init__(self, store):
        self.store = store

    def read(self, path):
        self.store.wait_for_turn()
        if path not in self.store.files:
            raise FileNotFoundError(path)
        return self.store.files[path]

    def write(self, path, data):
        self.store.wait_for_turn()
        self.store.files[path] = data

    def delete(self, path):
        self.store.wait_for_turn()
        self.store.files.pop(path, None)

    def files(self, folder):
        self.store.wait_for_turn()
        return {path: len(data) for path, data in self.store.files.items()
                if path.startswith(f"{folder}/")}  # fmt: skip


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(lock_module, "time", store)
    return store


class Writers:
    """Writers that take the lock, write some manifests, each after `renew`, and give it back."""

    def __init__(self, store, count, manifests=3):
        self.store = store
        self.log = []
        """(writer, what happened) in order."""
        self.threads = [
            threading.Thread(
                target=self._write, args=(f"w{number}", manifests), name=f"w{number}", daemon=True
            )
            for number in range(count)
        ]
        for thread in self.threads:
            store.turns[thread.name] = threading.Semaphore(0)

    def _write(self, name, manifests):
        self.store.wait_for_turn()
        try:
            with ArchiveLock(StorePlace(self.store), name) as lock:
                self.log.append((name, "holds"))
                for _ in range(manifests):
                    self.store.wait_for_turn()
                    lock.renew()
                    self.log.append((name, "may write"))
                self.log.append((name, "gives back"))
        except ArchiveLockedError:
            self.log.append((name, "refused"))
        finally:
            del self.store.turns[name]
            self.store.done.release()

    def run(self, choose):
        """Let writers go as `choose` says: it gets their names, and returns one of them."""
        for thread in self.threads:
            thread.start()
            self.store.done.acquire()
        while self.store.turns:
            self.store.let(choose(sorted(self.store.turns)))
        for thread in self.threads:
            thread.join()

    def check(self):
        """Who may write has the lock, from when it got it to when it gave it back."""
        holder = None
        for name, what in self.log:
            if what == "holds":
                holder = name
            elif what == "may write":
                assert holder == name, self.log
            elif holder == name:
                holder = None


STEPS = st.tuples(st.integers(0, 2), st.sampled_from([0] * 10 + [100, LEASE_S + 1]))
"""Which writer goes next, and how many seconds pass before."""


@settings(max_examples=500)
@given(count=st.integers(2, 3), was_killed=st.booleans(), steps=st.lists(STEPS, max_size=120))
def test_of_writers_at_any_time_one_may_write(count, was_killed, steps):
    store = Store()
    original, lock_module.time = lock_module.time, store
    left = iter(steps)

    def choose(names):
        turn, passed_s = next(left, (store.round, 0))
        store.round += 1
        store.now_s += passed_s
        return names[turn % len(names)]

    try:
        if was_killed:
            store.leave_dead_flag()
        writers = Writers(store, count)
        writers.run(choose)
    finally:
        lock_module.time = original
    writers.check()
    assert set(store.files) <= {"locks/0-dead"}, "writers leave no flag"
    if not any(passed_s for _, passed_s in steps):
        assert "holds" in {what for _, what in writers.log}, "one of them gets it"


def test_two_that_take_a_dead_lease_at_the_same_time(store):
    """Step by step in turn: one gets it, the other is refused."""
    store.leave_dead_flag()
    writers = Writers(store, 2)

    def choose(names):
        store.round += 1
        return names[store.round % len(names)]

    writers.run(choose)
    assert sorted(what for _, what in writers.log if what in {"holds", "refused"}) == [
        "holds", "refused",
    ]  # fmt: skip
    writers.check()


def test_who_slept_through_its_lease_stops_at_the_next_manifest(store):
    place = StorePlace(store)
    with ArchiveLock(place, "sleeper") as sleeper:
        sleeper.renew()
        store.now_s += LEASE_S - 1
        sleeper.renew()
        store.now_s += LEASE_S + 1
        with ArchiveLock(place, "second") as second:
            with pytest.raises(ArchiveLockedError, match="in use by second of process"):
                sleeper.renew()
            second.renew()
        store.files.clear()
        with pytest.raises(ArchiveLockedError, match="the lock of the archive was lost"):
            second.renew()


def test_who_slept_does_not_go_on_where_another_was_meanwhile(store):
    """It is gone again, and left no trace in locks/; the archive is another one now."""
    place = StorePlace(store)
    with ArchiveLock(place, "sleeper") as sleeper:
        store.now_s += LEASE_S + 1
        with ArchiveLock(place, "second"):
            pass
        with pytest.raises(ArchiveLockedError, match="the lock of the archive was lost"):
            sleeper.renew()
    with ArchiveLock(place, "sleeper") as sleeper:
        store.now_s += LEASE_S + 1
        with pytest.raises(ArchiveLockedError, match="was not renewed for 300 s"):
            sleeper.renew()
    assert not store.files


def test_a_holder_does_not_give_way_to_a_claim(store):
    place = StorePlace(store)
    with ArchiveLock(place, "first") as first:
        claim = {"purpose": "late", "state": "claim", "renewed_s": store.now_s}
        store.files["locks/0-late"] = json.dumps(claim).encode()
        first.renew()
        with (
            pytest.raises(ArchiveLockedError, match="in use by first of process"),
            ArchiveLock(place, "second"),
        ):
            pass
        del store.files["locks/0-late"]


def test_a_flag_that_is_half_written_counts_as_alive(store):
    """Some stores show a file while it is written: after a pause it can be read."""
    place = StorePlace(store)
    with ArchiveLock(place, "first"):
        (name,) = store.files
        whole, now_s = store.files[name], store.now_s
        store.files[name] = whole[:10]
        second = ArchiveLock(place, "second")
        with pytest.raises(ArchiveLockedError):
            second.__enter__()
        store.now_s += 2 * LEASE_S  # it began long ago, but was renewed: that can be read soon
        renewed = json.dumps(json.loads(whole) | {"renewed_s": store.now_s}).encode()
        sleep = store.sleep

        def sleep_and_show(pause_s):
            sleep(pause_s)
            store.files[name] = renewed

        store.sleep = sleep_and_show
        with pytest.raises(ArchiveLockedError, match="in use by first"):
            second.__enter__()
        assert list(store.files) == [name]
        store.now_s = now_s


class HookPlace(StorePlace):
    """Something happens right before "held" is written."""

    def __init__(self, store, before_held):
        super().__init__(store)
        self.before_held = before_held

    def write(self, path, data):
        if json.loads(data)["state"] == "held":
            self.before_held()
        super().write(path, data)


def test_who_stood_still_while_it_claimed_is_refused(store):
    """Another one took the claim for dead, and has the lease by now."""
    second = ArchiveLock(StorePlace(store), "second")

    def stand_still():
        store.now_s += LEASE_S + 1
        second.__enter__()

    first = ArchiveLock(HookPlace(store, stand_still), "first")
    with pytest.raises(ArchiveLockedError, match="lost"):
        first.__enter__()
    second.renew()
    second.__exit__(None, None, None)
    assert not store.files


def test_a_flag_that_comes_to_life_again_is_not_deleted(store):
    """Its writer's clock differs: it renewed the flag when it was taken for dead already."""
    store.leave_dead_flag()

    def renew():
        alive = {"purpose": "sleeper", "state": "held", "renewed_s": store.now_s}
        store.files["locks/0-dead"] = json.dumps(alive).encode()

    with pytest.raises(ArchiveLockedError, match="in use by sleeper"):
        ArchiveLock(HookPlace(store, renew), "second").__enter__()
    assert list(store.files) == ["locks/0-dead"]


def test_a_lease_of_an_older_program_counts(store):
    place = StorePlace(store)
    old = {"purpose": "backup run", "token": "t", "host": "h", "pid": 1, "renewed_s": store.now_s}
    store.files["lock"] = json.dumps(old).encode()
    with (
        pytest.raises(ArchiveLockedError, match="in use by backup run of process 1 on h"),
        ArchiveLock(place, "new"),
    ):
        pass
    store.now_s += LEASE_S
    with ArchiveLock(place, "new"):
        assert "lock" not in store.files


def test_archives_behind_urls_have_leases():
    create_archive("memory://leases", 1)
    second = open_archive("memory://leases").lock("second")
    with open_archive("memory://leases").lock("first") as first:
        first.renew()
        with pytest.raises(ArchiveLockedError, match="in use by first"):
            second.__enter__()
    with second:
        pass


def test_a_local_lock_whose_file_was_deleted_is_lost(archive):
    """Another one locks a new file: both would hold the lock."""
    made = create_archive(str(archive), 1)
    with made.lock("first") as first:
        first.renew()
        (archive / "lock").unlink()
        with made.lock("second") as second:
            with pytest.raises(ArchiveLockedError, match="the lock of the archive was lost"):
                first.renew()
            second.renew()


def test_a_local_lock_is_not_taken_on_a_file_that_is_gone(archive, monkeypatch):
    """Deleted between opening and locking it."""
    made = create_archive(str(archive), 1)
    opened, open_locked = [], ArchiveLock._open_locked

    def open_and_delete(self):
        file = open_locked(self)
        opened.append(file)
        if len(opened) == 1:
            (archive / "lock").unlink()
        return file

    monkeypatch.setattr(ArchiveLock, "_open_locked", open_and_delete)
    with made.lock("first") as first:
        assert len(opened) == 2
        first.renew()
