"""Machines and their disks: what survives which end of a process."""

from __future__ import annotations

import random

import pytest

from sim.facts import Facts
from sim.machine import Machine
from sim.network import Network
from sim.node import SingleNode, single
from sim.plan import drawn
from sim.world import MS, SECOND, World
from support.forgetful_disk import ForgetfulDisk, Power
from vbucket.engine.engine import SET

KEY = b"\0key"


class Bench:
    """One machine, with a node that is told what to do without clients."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed)
        self.facts = Facts()
        self.plan = drawn(random.Random(seed))
        network = Network(self.world, MS, 2 * MS)
        self.machine = Machine(self.world, network, "n1", single(self.plan, self.facts))
        self.machine.start()
        self.run()

    @property
    def node(self) -> SingleNode:
        assert isinstance(self.machine.node, SingleNode)
        return self.machine.node

    def run(self, delay_ns: int = 100 * MS) -> None:
        self.world.run_until(self.world.now_ns + delay_ns)

    def write(self, value: bytes) -> None:
        self.node.engine.store(SET, 0, KEY, KEY + value, 0, 0, 0, 0)
        self.node.kick()

    def value(self) -> bytes | None:
        entry = self.node.engine.document_entry(self.node.engine.partitions[0], KEY)
        return None if entry is None else entry[entry.index(KEY) + len(KEY) :]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_power_cut_keeps_what_was_synced(share: float) -> None:
    bench = Bench()
    bench.write(b"synced")
    bench.run()
    bench.machine.cut_power(share)
    bench.machine.start()
    assert bench.value() == b"synced"


def test_a_power_cut_between_write_and_sync_may_keep_it_or_not() -> None:
    values = set()
    for share in (0.0, 1.0):
        bench = Bench()
        bench.write(b"written")
        bench.world.run_until(bench.world.now_ns + 1)  # it is written, and not synced
        bench.machine.cut_power(share)
        bench.machine.start()
        values.add(bench.value())
    assert values == {None, b"written"}


def test_a_kill_keeps_what_was_written() -> None:
    bench = Bench()
    bench.write(b"written")
    bench.world.run_until(bench.world.now_ns + 1)
    bench.machine.kill()
    bench.machine.start()
    assert bench.value() == b"written"


def test_failed_sync_ends_process_and_supervisor_starts_it_again() -> None:
    bench = Bench()
    first = bench.node
    bench.machine.disk.syncs_to_fail = 1
    bench.write(b"in doubt")
    bench.run(30 * MS)
    assert bench.machine.node is None
    bench.run()
    assert bench.node is not first
    assert bench.value() == b"in doubt", "it reads back until the power goes"


def test_a_full_disk_refuses_writes_until_there_is_room() -> None:
    bench = Bench()
    bench.machine.disk.is_full = True
    bench.write(b"x" * (1 << 20))
    bench.run()
    assert bench.node.engine.write_refusal
    assert not bench.node.is_quiet()
    bench.machine.disk.is_full = False
    bench.run()
    assert (bench.node.engine.write_refusal, bench.node.is_quiet()) == ("", True)


def test_a_machine_that_lost_its_folder_begins_empty() -> None:
    bench = Bench()
    bench.write(b"gone")
    bench.run()
    bench.machine.kill()
    bench.machine.lose_folder()
    bench.machine.start()
    assert bench.value() is None


def test_a_stop_in_order_is_a_clean_end() -> None:
    bench = Bench()
    bench.write(b"kept")
    bench.run()
    bench.node.stop()
    bench.machine.kill()
    bench.machine.cut_power(0.0)
    bench.machine.start()
    bench.run(SECOND)
    assert bench.value() == b"kept"


def test_damage_of_the_log_is_a_refusal_to_start() -> None:
    bench = Bench()
    bench.write(b"kept")
    bench.run()
    bench.machine.kill()
    segments = [name for name in bench.machine.disk.names() if "mark" not in name]
    bench.machine.disk.remove(segments[-1])
    bench.machine.start()
    assert bench.machine.node is None
    assert len(bench.machine.refusals) == 1


class TestFailedSync:
    """The disk: what a failed sync covered is not safe, and nobody is told twice."""

    def test_it_reads_back_and_the_next_sync_does_not_cover_it(self) -> None:
        disk = ForgetfulDisk(Power())
        fd = disk.create("file")
        disk.write(fd, b"old", 0)
        disk.sync(fd)
        disk.sync_folder()
        disk.syncs_to_fail = 1
        disk.write(fd, b"new", 3)
        with pytest.raises(OSError, match="armed"):
            disk.sync_data(fd)
        disk.sync_data(fd)
        assert disk.read("file") == b"oldnew"
        assert disk.after(Power(), random.Random(0), 0).read("file") == b"old"
        assert disk.after(Power(), random.Random(0), 1).read("file") == b"oldnew"

    def test_it_is_safe_once_it_was_written_again(self) -> None:
        disk = ForgetfulDisk(Power())
        fd = disk.create("file")
        disk.sync_folder()
        disk.syncs_to_fail = 1
        disk.write(fd, b"new", 0)
        with pytest.raises(OSError, match="armed"):
            disk.sync(fd)
        disk.write(fd, b"new", 0)
        disk.sync(fd)
        assert disk.after(Power(), random.Random(0), 0).read("file") == b"new"

    def test_a_full_disk_takes_what_makes_no_file_longer(self) -> None:
        disk = ForgetfulDisk(Power())
        fd = disk.create("file")
        disk.write(fd, b"abc", 0)
        disk.is_full = True
        disk.write(fd, b"ABC", 0)
        with pytest.raises(OSError, match="full"):
            disk.write(fd, b"d", 3)
        with pytest.raises(OSError, match="full"):
            disk.create("other")
        assert disk.read("file") == b"ABC"


@pytest.mark.parametrize(("share", "is_kept"), [(None, True), (0.0, False)])
def test_a_process_ends_inside_an_event(share: float | None, *, is_kept: bool) -> None:
    """At the sync of a group: the write before it is kept by the system, but not without power."""
    bench = Bench()
    bench.machine.end_inside(2, share)
    bench.write(b"v")
    bench.run()
    assert bench.machine.node is None
    bench.machine.start()
    assert bench.value() == (b"v" if is_kept else None)


def test_a_sector_that_rots_is_mended() -> None:
    disk = ForgetfulDisk(Power())
    fd = disk.create("f")
    data = bytes(range(256)) * 8
    disk.write(fd, data, 0)
    disk.sync(fd)
    seen = set()
    for seed in range(20):
        mend = disk.rot("f", random.Random(seed))
        seen.add(disk.read("f"))
        assert len(disk.read("f")) == len(data)
        mend()
        assert disk.read("f") == data
    assert len(seen - {data}) > 5
