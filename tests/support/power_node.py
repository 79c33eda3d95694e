"""A node on a disk that forgets: it works, is killed, loses power at any point, and is checked.

The device, the store, the start, the merge and the order of the log's jobs are those of the server.

`Story` keeps the state of the node after every group. After a cut at any point, the next start must
find exactly the state after one group: the last answered one, or a later one that was being
written. With durability `interval` and `none` it may also be an earlier one, but not before the
last sync, and every partition gets a new version.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dcp.core.groups import GroupCycle, Job, LogTask, WriteGroup
from dcp.core.store_schedule import MergeCycle
from dcp.stream.hub import StreamHub
from dcp.wire.frame import FrameDecoder
from failover.rules.history import Version
from support.forgetful_disk import ForgetfulDisk, ForgetfulEnv, Power
from vbucket.engine.engine import SET, StoredDocument
from vbucket.engine.leadership import set_leader_epoch
from vbucket.engine.recovery.startup import recover_node
from vbucket.log.device import LogWriteError, SyncFailedError
from vbucket.log.device_files import FileLogDevice
from vbucket.store.records import TABLES, CleanEnd, put_failover
from vbucket.upkeep.merge import merge

VBUCKETS = (0, 2, 3)
PARTITIONS = 4
"""Few, because a start goes over all of them, and a start follows every cut."""
KEYS = [b"\0a", b"\0b", b"\0longer-key"]
START_NS = 1_800_000_000_000_000_000
DIRECT_BYTES_MIN = 200
"""Some groups are larger, so both ways to write are cut."""
MEMTABLE_BYTES = 1 << 20


class PowerCutError(Exception):
    """The power was cut."""


class Picture(NamedTuple):
    """All visible state of the partitions that are written."""

    frames: bytes
    documents: list[StoredDocument | int]
    high_seqnos: list[int]
    item_counts: list[int]
    failovers: list[list[Version]]
    epochs: list[int]


class PowerNode:
    """See the module. It begins with the contents of the disk."""

    def __init__(
        self,
        disk: ForgetfulDisk,
        env: ForgetfulEnv,
        durability: str,
        draw: random.Random,
        *,
        partitions: int = PARTITIONS,
    ) -> None:
        self.env = env
        self.durability = durability
        self._draw = draw
        self.device = FileLogDevice(
            Path("simulated"), draw, disk, direct_bytes_min=DIRECT_BYTES_MIN
        )
        startup = recover_node(
            env,
            self.device,
            num_vbuckets=partitions,
            durability=durability,
            draws=draw,
            draw_node_id=lambda: "00",
            memtable_bytes_max=MEMTABLE_BYTES,
        )
        startup.begin()
        self.store, self.engine, self.writer = startup.store, startup.engine, startup.writer
        self.new_versions = startup.new_versions
        self.groups = GroupCycle(self.engine, StreamHub(), syncs_groups=durability == "commit")
        self.merges = MergeCycle(self.engine)
        self.engine.begin_batch(START_NS)

    def do(self, job: Job) -> tuple[int, ...]:
        """Do a job of the log, as the committer does; return the partitions with a new version."""
        if isinstance(job, WriteGroup):
            self.writer.append(job.group.number, job.group.payload, sync_follows=job.is_synced)
        if job is LogTask.ROTATE:
            self.writer.rotate()
        elif job is LogTask.SYNC or job.is_synced:
            self.writer.sync()
        return self.groups.done(job).branched

    def picture(self) -> Picture:
        """Return what is applied; equal to what is committed if nothing is pending."""
        engine = self.engine
        parts = [engine.partitions[vb_id] for vb_id in VBUCKETS]
        frames = b""
        for part in parts:
            committed, part.committed_seqno = part.committed_seqno, part.high_seqno
            seqno = 1
            while seqno <= part.high_seqno:
                batch = engine.versions.frames(
                    part.vb_id, seqno, part.high_seqno, bytes(4), (), 1 << 30
                )
                frames += b"".join(batch.frames)
                seqno = batch.next_seqno
            part.committed_seqno = committed
        return Picture(
            frames,
            [engine.get(vb_id, key) for vb_id in VBUCKETS for key in KEYS],
            [part.high_seqno for part in parts],
            [part.item_count for part in parts],
            [list(part.failover.entries) for part in parts],
            [part.leader_epoch for part in parts],
        )


class Story:
    """A node's life with its history, and the checks of what a cut leaves at each point."""

    def __init__(
        self,
        seed: int,
        durability: str = "commit",
        disk_type: type[ForgetfulDisk] = ForgetfulDisk,
        *,
        partitions: int = PARTITIONS,
    ) -> None:
        self.partitions = partitions
        self.draw = random.Random(seed)
        self.durability = durability
        self.power = Power()
        self.power.on_point = self._at_point
        self.checked = 0
        self.points_by_name: dict[str, int] = {}
        self.point_name = ""
        self.shares: tuple[float, ...] = ()
        """The shares of unsynced work that survive, for the cuts tried at each point."""
        self.cut_at = 0
        """The point at which the power is really cut; 0: none."""
        self.fail_at = 0
        """From this point on, the next sync of a file fails; 0: none does."""
        self.failed_syncs = 0
        self.pictures: list[Picture] = []
        self.certain = 0
        """Index of the oldest picture to which a cut may go back."""
        self.disk = disk_type(self.power)
        self.env = ForgetfulEnv(self.power, TABLES)
        self.node: PowerNode

    def begin(self) -> None:
        """Start for the first time. After a cut during it, `lose_power` starts again."""
        self.node = self._start(self.disk, self.env, self.draw)
        self.pictures = [self.node.picture()]

    def _start(self, disk: ForgetfulDisk, env: ForgetfulEnv, draw: random.Random) -> PowerNode:
        return PowerNode(disk, env, self.durability, draw, partitions=self.partitions)

    # -- what happens ----------------------------------------------------------------------------

    def change(self, count: int) -> None:
        """Set and delete several documents in one group, and now and then hand over."""
        engine, draw = self.node.engine, self.draw
        for _ in range(count):
            vb_id, key = draw.choice(VBUCKETS), draw.choice(KEYS)
            if draw.random() < 0.1:
                set_leader_epoch(engine, vb_id, engine.partitions[vb_id].leader_epoch + 1)
            if draw.random() < 0.2:
                engine.delete(vb_id, key, 0)
            else:
                value = draw.randbytes(draw.choice((0, 3, 40, 700, 3000)))
                engine.store(SET, vb_id, key, key + value, 0, 0, 0, 0)

    def branch(self) -> None:
        vb_id = self.draw.choice(VBUCKETS)
        part = self.node.engine.partitions[vb_id]
        epoch = part.leader_epoch + self.draw.randint(0, 1)
        self.node.engine.keyspace.branch(vb_id, self.draw.randint(0, part.high_seqno), epoch)

    def commit(self) -> None:
        """Let the log do what it has to, and write into the store what a branch writes there."""
        node = self.node
        job = node.groups.next_job()
        while job is not None:
            if isinstance(job, WriteGroup):
                self.pictures.append(node.picture())
            branched = node.do(job)
            if node.groups.is_synced:
                self.certain = len(self.pictures) - 1
            for vb_id in branched:
                document = node.engine.partitions[vb_id].failover.to_document()
                with node.env.write() as write:
                    put_failover(write, vb_id, document)
            job = node.groups.next_job()

    def sync(self) -> None:
        """Sync, as durability `interval` does from time to time."""
        self.node.groups.sync_soon()
        self.commit()

    def reserve(self) -> None:
        self.node.device.reserve()

    def prepare(self) -> None:
        self.node.device.prepare()

    def sync_mark(self) -> None:
        """Sync the end mark, as the server does from time to time; then a cut cannot lose it."""
        self.node.writer.sync_mark()

    def begin_merge(self) -> None:
        self.commit()
        if not self.node.engine.keyspace.memtables.is_merging:
            self.node.groups.begin_merge()
            self.commit()
            self.certain = len(self.pictures) - 1  # what a new segment follows is synced

    def end_merge(self) -> None:
        node = self.node
        if not node.engine.keyspace.memtables.is_merging:
            return
        device = node.device
        segments = node.merges.begin(device.segments())
        sealed = [(segment, device.read(segment)) for segment in segments]
        report = merge(node.env, sealed, slice_pages=1)  # each partition has a commit of its own
        deletable = node.merges.merged(report).deletable
        while not node.merges.drop_slice():
            pass
        for segment in deletable:
            device.delete(segment)

    def stop(self) -> None:
        """End cleanly, and start again."""
        self.commit()
        node = self.node
        node.writer.sync()
        self.certain = len(self.pictures) - 1
        parts = node.engine.partitions
        clean_end = CleanEnd(
            node.writer.end, {part.vb_id: (part.high_seqno, part.vb_uuid) for part in parts}
        )
        node.store.end(clean_end)
        node.device.close()
        self._restart()

    def kill(self) -> None:
        """Kill the process: everything that was written stays, synced or not."""
        self._restart()

    def survive_failed_sync(self, step: Callable[[], None]) -> bool:
        """Do a step. If a sync fails during it, the process has ended: start again. A start during
        which a sync fails is repeated. Return whether a sync failed.
        """
        failed_before = self.failed_syncs
        while True:
            try:
                step()
            except (SyncFailedError, LogWriteError):
                assert self.failed_syncs > failed_before
                step = self.kill if self.pictures else self.begin
            else:
                return self.failed_syncs > failed_before

    def lose_power(self, share: float) -> None:
        """Cut the power now, and start again on what is left."""
        env = self.env.after(self.power, self.draw, share)
        self.disk = self.disk.after(self.power, self.draw, share)
        self.env = env
        self._restart()

    def _restart(self) -> None:
        node = self._start(self.disk, self.env, self.draw)
        if self.pictures:
            self._check(node, self.pictures[self.certain :])
        self.node = node
        self.pictures = [node.picture()]
        self.certain = 0

    # -- what a cut leaves -------------------------------------------------------------------------

    def _at_point(self, name: str) -> None:
        self.point_name = name
        self.points_by_name[name] = self.points_by_name.get(name, 0) + 1
        if self.cut_at and self.power.points >= self.cut_at:
            raise PowerCutError(name)
        if self.fail_at and self.power.points >= self.fail_at and name in FILE_SYNCS:
            self.fail_at = 0
            self.failed_syncs += 1
            self.disk.syncs_to_fail = 1
        for share in self.shares:
            self.try_cut(share)

    def try_cut(self, share: float) -> None:
        """Start a second node on what a cut would leave now, check it, and let it work."""
        quiet = Power()
        draw = random.Random(self.draw.getrandbits(32))
        disk = self.disk.after(quiet, draw, share)
        env = self.env.after(quiet, draw, share)
        node = self._start(disk, env, draw)
        if self.pictures:
            self._check(node, self.pictures[self.certain :])
        self.checked += 1
        vb_id = draw.choice(VBUCKETS)
        part = node.engine.partitions[vb_id]
        high_seqno = part.high_seqno
        status, _, seqno = node.engine.store(SET, vb_id, KEYS[0], KEYS[0] + b"on", 0, 0, 0, 0)
        assert (status, seqno) == (0, high_seqno + 1)
        job = node.groups.next_job()
        assert job is not None
        node.do(job)
        node.writer.sync()
        expected = node.picture()
        disk, env = disk.after(quiet, draw, 0), env.after(quiet, draw, 0)
        again = PowerNode(disk, env, "commit", draw, partitions=self.partitions)
        if self.durability == "commit":
            assert again.picture() == expected
        else:
            assert again.picture()[:4] == expected[:4]

    def _check(self, node: PowerNode, possible: list[Picture]) -> None:
        found = node.picture()
        if not node.new_versions:
            assert found in possible, self._difference(found, possible)
            return
        assert self.durability != "commit", "a cut takes nothing that anybody saw"
        assert len(node.new_versions) == node.engine.num_vbuckets
        # One version more than one of the pictures; a start that died may have added more.
        for picture in possible:
            if found[:4] == picture[:4] and all(
                new[-len(old) :] == old and len(new) > len(old)
                for new, old in zip(found.failovers, picture.failovers, strict=True)
            ):
                return
        raise AssertionError(self._difference(found, possible))

    def _difference(self, found: Picture, possible: list[Picture]) -> str:
        lines = [f"after a cut at point {self.power.points} ({self.point_name}):"]
        for index, picture in enumerate(possible):
            fields = [
                name for name, a, b in zip(Picture._fields, found, picture, strict=True) if a != b
            ]
            lines.append(f"picture {index} differs in {fields}")
        lines.append(f"frames {summary(found.frames)}\n{summary(picture.frames)}")
        lines += [str(picture.failovers) for picture in possible]
        lines.append(f"found {found.high_seqnos} {found.item_counts} {found.failovers}")
        lines.append(f"last  {picture.high_seqnos} {picture.item_counts} {picture.failovers}")
        return "\n".join(lines)


def summary(frames: bytes) -> list[tuple[int, int, int, int]]:
    """Return (partition, seqno, opcode, bytes) of each."""
    return [
        (f.vb_id, int.from_bytes(f.extras[:8], "big"), f.opcode, len(f.value))
        for f in FrameDecoder().feed(frames)
    ]


STEPS: dict[str, float] = {
    "commit": 6, "branch": 1, "reserve": 1, "prepare": 1, "begin_merge": 1.5, "end_merge": 2,
    "stop": 0.3, "kill": 0.5, "sync": 1, "lose_power": 0.7, "sync_mark": 1,
}  # fmt: skip
"""What happens in a random life, and how often."""
SHARES = (0, 0.3, 0.7, 1)
FILE_SYNCS = ("sync", "sync_data")


def live(story: Story, steps: int, *, fail_share: float = 0.0) -> None:
    """Let a node live; the power is cut between steps and within them. During this share of the
    steps a sync may fail.
    """
    draw = story.draw
    if not story.pictures:
        survive(story, story.begin)
    for _ in range(steps):
        story.change(draw.choice((0, 1, 1, 2, 5)))
        name = draw.choices(list(STEPS), list(STEPS.values()))[0]
        if draw.random() < fail_share:
            story.fail_at = story.power.points + draw.randint(1, 12)
        if name == "lose_power":
            share = draw.choice(SHARES)
            survive(story, lambda share=share: story.lose_power(share))  # type: ignore[misc]
        else:
            survive(story, getattr(story, name))


def survive(story: Story, step: Callable[[], None]) -> None:
    """Do a step during which the power may be cut, and again during the start after it."""
    while True:
        if story.draw.random() < 0.15:
            story.cut_at = story.power.points + story.draw.randint(1, 8)
        try:
            story.survive_failed_sync(step)
        except PowerCutError:
            share = story.draw.choice(SHARES)
            step = lambda share=share: story.lose_power(share)  # type: ignore[misc]  # noqa: E731
        else:
            return
        finally:
            story.cut_at = 0
