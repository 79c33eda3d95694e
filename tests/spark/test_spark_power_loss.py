"""The Parquet sink over files that forget, in part, what was not synced: a power cut at any point.

No Spark: buckets are written and committed as executors and driver do it, in one process.
"""

from __future__ import annotations

import random
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pytest
from test_spark_sinks import Model, ParquetTable, table

from clients.spark.sink.parquet import FOLDERS, MANIFEST, TableFiles
from support.forgetful_disk import ForgetfulDisk, Power

FOLDER_FILE = "a folder:"
"""How a folder is told in the folder that it is in: as a file with such a name."""


class CutError(Exception):
    """The power is gone."""


class ForgetfulFiles(TableFiles):
    """A table's files in memory: a disk for each folder."""

    def __init__(self, power: Power, disks: dict[str, ForgetfulDisk] | None = None) -> None:
        super().__init__(Path("/nowhere"))
        self.disks = disks or {name: ForgetfulDisk(power) for name in ("", *FOLDERS)}

    def after(self, power: Power, draw: random.Random, share: float) -> ForgetfulFiles:
        """Return what a cut leaves."""
        disks = {name: disk.after(power, draw, share) for name, disk in self.disks.items()}
        for name in FOLDERS:
            if FOLDER_FILE + name not in disks[""].names():
                disks[name] = ForgetfulDisk(power)
        return ForgetfulFiles(power, disks)

    def at(self, name: str) -> tuple[ForgetfulDisk, str]:
        folder, _, file = name.rpartition("/")
        return self.disks[folder], file

    def make_folder(self, name: str) -> None:
        root = self.disks[""]
        if FOLDER_FILE + name not in root.names():
            root.close(root.create(FOLDER_FILE + name))
            root.sync_folder()

    def read(self, name: str) -> bytes:
        disk, file = self.at(name)
        return disk.read(file)

    def source(self, name: str) -> pa.BufferReader:
        return pa.BufferReader(self.read(name))

    def create(self, name: str, write) -> None:
        disk, file = self.at(name)
        buffer = BytesIO()
        write(buffer)
        descriptor = disk.create(file)
        disk.write(descriptor, buffer.getvalue(), 0)
        disk.close(descriptor)

    def sync(self, name: str) -> None:
        disk, file = self.at(name)
        descriptor = disk.open(file)
        disk.sync(descriptor)
        disk.close(descriptor)

    def sync_folder(self, name: str = "") -> None:
        self.disks[name].sync_folder()

    def replace(self, old: str, new: str) -> None:
        assert "/" not in old + new
        self.disks[""].rename(old, new)

    def remove(self, name: str) -> None:
        disk, file = self.at(name)
        if file in disk.names():
            disk.remove(file)

    def older_than(self, pattern: str, moment_s: float) -> list[str]:
        return []


def batches(seed: int, count: int) -> list[pa.Table]:
    """Batches of a history with branches, and documents that change."""
    model = Model(seed)
    at = dict.fromkeys(model.logs, 0)
    found = []
    for number in range(count):
        rows = []
        if number % 3 == 2:
            vb = model.random.choice(list(model.logs))
            at[vb] = model.branch(vb)
            rows.append((vb, at[vb], 7, "rollback", None, None, None))
        model.write()
        for vb, log in model.logs.items():
            rows += log[at[vb] :]
            at[vb] = len(log)
        found.append(table(rows))
    return found


def contents(files: TableFiles) -> tuple[list, list] | None:
    """Everything that a table says, None where there is none; every file that counts is read."""
    sink = ParquetTable(files.path, files)
    if MANIFEST not in files.disks[""].names():
        return None
    manifest = sink.manifest()
    log, documents = [], []
    for _, bucket in sorted(manifest.files.items()):
        names = [*(file.name for file in bucket.changes), bucket.current]
        for name in filter(None, names):
            rows = pa.parquet.read_table(files.source(name)).to_pylist()
            (documents if name == bucket.current else log).extend(rows)
    key = lambda row: (row["vb"], row["seqno"])  # noqa: E731
    return sorted(log, key=key), sorted(documents, key=key)


def states_of(given: list[pa.Table]) -> list:
    """The table after each batch, on a disk that keeps all."""
    files = ForgetfulFiles(Power())
    states = [contents(files)]
    for batch in given:
        ParquetTable(files.path, files, merge_files=2).apply(batch)
        states.append(contents(files))
    return states


def points_of(given: list[pa.Table]) -> int:
    power = Power()
    files = ForgetfulFiles(power)
    for batch in given:
        ParquetTable(files.path, files, merge_files=2).apply(batch)
    return power.points


def run_to(point: int, given: list[pa.Table]) -> tuple[ForgetfulFiles, int]:
    """Apply batches with the power cut at a point; return the files and how many were done."""
    power = Power()
    files = ForgetfulFiles(power)

    def cut(_name: str) -> None:
        if power.points > point:
            raise CutError

    power.on_point = cut
    done = 0
    try:
        for batch in given:
            ParquetTable(files.path, files, merge_files=2).apply(batch)
            done += 1
    except CutError:
        pass
    return files, done


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_power_cut_at_any_point_leaves_a_sound_table(
    share,
):
    given = batches(seed=5, count=4)
    states = states_of(given)
    points = points_of(given)
    assert points > 60
    for point in range(points):
        files, done = run_to(point, given)
        draw = random.Random(point)
        left = files.after(Power(), draw, share)
        found = contents(left)
        assert found in states[done : done + 2], f"after point {point}, {done} batches"
        for batch in given[done:]:  # Spark repeats what it was not told of
            ParquetTable(left.path, left, merge_files=2).apply(batch)
        assert contents(left) == states[-1]


def test_real_table_is_synced_in_order_of_one_that_is_simulated(tmp_path, monkeypatch):
    """What the calls mean on a real disk: each sync reaches the file or folder that is named."""
    import os

    synced = []
    fsync = os.fsync

    def note(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").resolve())
        fsync(file)

    monkeypatch.setattr(os, "fsync", note)
    path = tmp_path / "lake" / "table"
    sink = ParquetTable(path)
    (batch,) = batches(seed=1, count=1)
    sink.apply(batch)
    made, written = synced[:4], synced[4:]
    assert made == [path, tmp_path / "lake", tmp_path, path]
    *files, manifest, root = written
    assert root == path
    assert manifest.name.startswith(f"{MANIFEST}.")
    on_disk = {path / name for name in sink.manifest().named()}
    assert on_disk <= set(files)
    assert {path / name for name in FOLDERS} <= set(files)
