"""A start at the level of the engine: full disks, new versions, damage that is not in the way."""

from __future__ import annotations

import random

import pytest

from memory.kv_env import MemoryEnv
from memory.log_device import MemoryLogDevice
from support.memory_node import START_NS
from vbucket.engine.engine import SET, StoredDocument
from vbucket.engine.recovery.startup import KeepCopies, Startup, recover_node
from vbucket.log.device import LogFullError, SyncFailedError
from vbucket.model.ids import NUM_VBUCKETS
from vbucket.model.manifest import SYSTEM_COLLECTION
from vbucket.store.environment import StoreFullError
from vbucket.store.records import BY_KEY_TABLE, TABLES
from vbucket.upkeep.merge import merge

VB = 7
KEY = b"\0k"


class Disk:
    """What outlives a process."""

    def __init__(self) -> None:
        self.device = MemoryLogDevice()
        self.env = MemoryEnv(TABLES)
        self._draw = random.Random(1)

    def recover(self, durability: str = "commit") -> Startup:
        """Begin anew on what a crash leaves; `begin` is left to the caller."""
        self.device = self.device.crash(keep_unsynced_bytes=1 << 30)
        return self.opened(durability)

    def opened(self, durability: str = "commit", keep_copies: KeepCopies | None = None) -> Startup:
        startup = recover_node(
            self.env,
            self.device,
            num_vbuckets=NUM_VBUCKETS,
            durability=durability,
            draws=self._draw,
            draw_node_id=lambda: "00",
            memtable_bytes_max=1 << 20,
            keep_copies=keep_copies,
        )
        startup.engine.begin_batch(START_NS)
        return startup


def put(startup: Startup, value: bytes, *, is_synced: bool = True) -> None:
    engine = startup.engine
    assert engine.store(SET, VB, KEY, KEY + value, 0, 0, 0, 0)[0] == 0
    group = engine.keyspace.take_group()
    assert group is not None
    startup.writer.append(group.number, group.payload)
    if is_synced:
        startup.writer.sync()
    engine.keyspace.group_synced(group, is_on_disk=is_synced)


def value_of(startup: Startup) -> bytes:
    document = startup.engine.get(VB, KEY)
    assert isinstance(document, StoredDocument)
    return document.value


def merge_all(disk: Disk, startup: Startup) -> None:
    startup.engine.keyspace.freeze()
    startup.writer.rotate()
    segments = disk.device.segments()[:-1]
    startup.engine.keyspace.merged(merge(disk.env, [(n, disk.device.read(n)) for n in segments]))
    startup.engine.keyspace.drop_frozen(0, NUM_VBUCKETS)
    for segment in segments:
        disk.device.delete(segment)


def test_the_log_goes_on_with_its_numbers_and_its_chain() -> None:
    disk = Disk()
    for number in range(4):
        startup = disk.recover()
        startup.begin()
        assert startup.engine.keyspace.group == number + 1
        assert number == 0 or value_of(startup) == b"%d" % (number - 1)
        put(startup, b"%d" % number)
        if number == 2:
            merge_all(disk, startup)  # the log is empty then, and the store knows the last group


@pytest.mark.parametrize("durability", ["commit", "interval"])
@pytest.mark.parametrize("full", ["log", "store"])
def test_first_writes_that_find_no_room_may_be_made_again(durability: str, full: str) -> None:
    disk = Disk()
    startup = disk.recover(durability)
    startup.begin()
    put(startup, b"v")
    startup = disk.recover(durability)
    versions = len(startup.engine.partitions[VB].failover.entries)
    rotate = disk.device.rotate
    for _ in range(3):
        if full == "store":
            disk.env.fail_commit(1)
        else:
            disk.device.rotate = _no_room  # type: ignore[method-assign]
        with pytest.raises((LogFullError, StoreFullError)):
            startup.begin()
        assert value_of(startup) == b"v", "reads may be served"
        assert startup.engine.partitions[VB].last_group <= startup.engine.commits.committed_group
    disk.device.rotate = rotate  # type: ignore[method-assign]
    startup.begin()
    put(startup, b"w")
    again = disk.recover(durability)
    assert value_of(again) == b"w"
    now = len(again.engine.partitions[VB].failover.entries)
    assert now == versions + (durability == "interval"), "one for each unclean stop"


def _no_room(at_least: int = 1) -> int:
    raise LogFullError(f"no room for segment {at_least} or a later one")


def test_damaged_system_event_is_not_in_way_of_new_versions() -> None:
    disk = Disk()
    startup = disk.recover("interval")
    startup.begin()
    manifest = startup.engine.keyspace.manifest.create_scope("inventory")
    startup.engine.keyspace.set_manifest(manifest)
    put(startup, b"v")
    merge_all(disk, startup)
    events = [key for key in disk.env.tables[BY_KEY_TABLE] if key[2] == SYSTEM_COLLECTION]
    assert events
    disk.env.flip(BY_KEY_TABLE, events[0], -1)
    again = disk.recover("interval")
    again.begin()
    assert len(again.new_versions) == 1024
    assert value_of(again) == b"v"


def fail_sync(disk: Disk, startup: Startup) -> None:
    """Let a sync fail, and find the log as the next process does."""
    disk.device.fail_sync(1)
    with pytest.raises(SyncFailedError):
        startup.writer.sync()
    disk.device = disk.device.kill()


def test_failed_syncs_bytes_outlive_a_power_cut_after_the_start() -> None:
    disk = Disk()
    startup = disk.recover()
    startup.begin()
    put(startup, b"v")
    put(startup, b"w", is_synced=False)
    fail_sync(disk, startup)
    again = disk.opened()
    assert (value_of(again), again.torn) == (b"w", None)
    again.begin()
    disk.device = disk.device.crash()
    assert value_of(disk.opened()) == b"w"


def test_what_failed_sync_covered_before_damage_given_up_is_safe() -> None:
    disk = Disk()
    startup = disk.recover()
    startup.begin()
    for value in (b"kept", b"damaged", b"behind"):
        put(startup, value, is_synced=False)
    fail_sync(disk, startup)
    segment = disk.device.segments()[-1]
    disk.device.flip(segment, disk.device.read(segment).index(b"damaged"))
    copied: list[int] = []
    again = disk.opened(keep_copies=copied.extend)
    assert (value_of(again), copied) == (b"kept", [segment])
    assert again.loss is not None
    assert again.rewritten_bytes > 0
    again.begin()
    content = again.writer.kept.content_of(segment)
    assert content is not None, "it can be written again if it is damaged once more"
    assert content.to_bytes() == disk.device.read(segment)
    disk.device = disk.device.crash()
    assert value_of(disk.opened()) == b"kept"
