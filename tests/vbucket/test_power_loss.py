"""The power may go at any point: what was answered is there afterwards, and nothing is half there.

The life of a node, told in `support.power_node`: every write, cut, sync, creation, renaming and
removal of the log, and every commit of the store, is a point at which a cut is tried.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.forgetful_disk import ForgetfulDisk, Power
from support.power_node import FILE_SYNCS, SHARES, PowerCutError, Story, live
from vbucket.log.device import SyncFailedError, mark_slots
from vbucket.log.device_files import FileLogDevice
from vbucket.log.end_mark import read_marks
from vbucket.log.recovery import recover
from vbucket.log.segment_files import MARK_NAME
from vbucket.log.writer import LogWriter

FIXED_LIFE = (
    "commit", "commit", "branch", "commit", "reserve", "prepare", "commit", "begin_merge", "commit",
    "branch", "commit", "end_merge", "commit", "kill", "commit", "begin_merge", "end_merge", "stop",
    "commit", "sync", "commit", "kill", "begin_merge", "kill", "begin_merge", "end_merge", "branch",
    "commit", "stop", "sync",
)  # fmt: skip
DURABILITIES = ("commit", "interval", "none")
POINTS = {
    "create", "write", "direct write", "cut", "sync", "sync_data", "rename", "remove",
    "sync_folder", "store commit",
}  # fmt: skip


def live_fixed(story: Story) -> None:
    story.begin()
    for name in FIXED_LIFE:
        story.change(2)
        getattr(story, name)()


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_cut_at_every_point_of_a_fixed_life(durability: str) -> None:
    story = Story(1, durability)
    story.shares = SHARES
    live_fixed(story)
    assert story.points_by_name.keys() == POINTS
    assert story.checked == story.power.points * len(SHARES)
    assert story.power.points > 150


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("share", SHARES)
def test_a_cut_at_every_point_of_the_first_start(durability: str, share: float) -> None:
    whole = Story(0, durability)
    whole.begin()
    for point in range(1, whole.power.points + 1):
        story = Story(0, durability)
        story.cut_at = point
        with pytest.raises(PowerCutError):
            story.begin()
        story.cut_at = 0
        story.lose_power(share)
        story.change(3)
        story.commit()
        story.kill()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), durability=st.sampled_from(DURABILITIES))
def test_cuts_at_random_points_of_random_lives(seed: int, durability: str) -> None:
    live(Story(seed, durability), 40)


# -- failed syncs ------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", DURABILITIES)
def test_every_sync_of_fixed_life_fails_once_and_power_is_cut(durability: str) -> None:
    """What the start after the failure serves is there after a cut at any later point."""
    story = Story(1, durability)
    live_fixed(story)
    syncs = sum(story.points_by_name[name] for name in FILE_SYNCS)
    first_point = 1
    for _ in range(syncs):
        story = Story(1, durability)
        story.fail_at = first_point
        tells: list[int] = []
        survive_fixed(story, tells)
        assert story.failed_syncs == 1
        first_point = tells[0] + 1
    assert syncs > 40


def survive_fixed(story: Story, failed_points: list[int]) -> None:
    """Live until a sync fails, then for one more group, with a cut at every point."""
    for name in ("begin", *FIXED_LIFE):
        if name != "begin":
            story.change(2)
        on_point = story.power.on_point

        def note(point: str, on_point: Callable[[str], None] = on_point) -> None:
            on_point(point)
            if story.failed_syncs and not failed_points:
                failed_points.append(story.power.points)
                story.shares = (0,)

        story.power.on_point = note
        has_failed = story.survive_failed_sync(getattr(story, name))
        story.power.on_point = on_point
        if has_failed:
            break
    story.change(1)
    story.commit()
    for share in SHARES:
        story.try_cut(share)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), durability=st.sampled_from(DURABILITIES))
def test_failed_syncs_and_cuts_at_random_points_of_random_lives(seed: int, durability: str) -> None:
    live(Story(seed, durability), 40, fail_share=0.15)


def test_end_mark_of_a_failed_sync_is_made_safe_by_next_start() -> None:
    """A new mark is written while another one is synced. A cut may tear both, so the third one,
    which the start found, must be on disk.
    """
    power, draw = Power(), random.Random(1)
    disk = ForgetfulDisk(power)
    writer = LogWriter(FileLogDevice(Path("simulated"), draw, disk))
    writer.rotate()
    add_group(writer)
    writer.sync_mark()
    add_group(writer)
    disk.syncs_to_fail = 1
    with pytest.raises(SyncFailedError):
        writer.sync_mark()

    device = FileLogDevice(Path("simulated"), draw, disk)
    recovery = recover(device, 0)
    assert len(list(recovery.groups())) == 2
    recovery.finish()
    writer = LogWriter(device, recovery.end)
    writer.rotate()
    found = []

    def mark_meanwhile(_: str) -> None:
        power.on_point = lambda _: None
        add_group(writer)
        left = disk.after(Power(), Tears(), 0.5)
        found.append(read_marks(mark_slots(left.read(MARK_NAME))))

    power.on_point = mark_meanwhile
    writer.sync_mark()
    assert [mark.end for mark in found] == [recovery.end]


class Tears(random.Random):
    """Draws that tear every unsynced write, behind an end mark's sequence number."""

    def random(self) -> float:
        self.is_first = not getattr(self, "is_first", False)
        return 0.9 if self.is_first else 0.0

    def randrange(self, *_: object) -> int:  # type: ignore[override]
        return 20


def add_group(writer: LogWriter) -> None:
    writer.append(writer.end.group + 1, b"payload")
    writer.sync()


# -- the simulation notices --------------------------------------------------------------------


class NoSync(ForgetfulDisk):
    """Confirms syncs of data and does nothing."""

    def sync_data(self, fd: int) -> None:
        self._power.point("sync_data")


class NoFolderSync(ForgetfulDisk):
    def sync_folder(self) -> None:
        self._power.point("sync_folder")


class NoFileSync(ForgetfulDisk):
    """Syncs data, and never that a file was cut."""

    def sync(self, fd: int) -> None:
        self._power.point("sync")


@pytest.mark.parametrize("disk_type", [NoSync, NoFolderSync, NoFileSync])
def test_a_disk_that_lies_is_noticed(disk_type: type[ForgetfulDisk]) -> None:
    story = Story(1, disk_type=disk_type)
    story.shares = SHARES
    with pytest.raises(Exception) as caught:  # a refused start, or lost changes
        live_fixed(story)
    assert not isinstance(caught.value, PowerCutError)


def test_a_synced_cut_and_an_unsynced_one() -> None:
    power = Power()
    disk = ForgetfulDisk(power)
    fd = disk.create("a")
    disk.write(fd, b"x" * 1000, 0)
    disk.sync(fd)
    disk.sync_folder()
    disk.cut(fd, 10)
    disk.sync_data(fd)
    draw = random.Random(0)
    assert len(disk.after(power, draw, 0).read("a")) == 1000
    assert len(disk.after(power, draw, 1).read("a")) == 10
    disk.sync(fd)
    assert len(disk.after(power, draw, 0).read("a")) == 10
