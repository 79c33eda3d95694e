"""One flipped bit, anywhere: what is read is right or refused, and the offline check names it.

The bytes of records are flipped one by one; LMDB's own pages (where a record may vanish, which no
checksum of a record can tell) at random, in a real file: `scripts/soak flip` in small.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from keyspace_model import ModelPartition, SegmentWriter, create_store

from memory.kv_env import MemoryEnv
from memory.log_device import MemoryLogDevice, SegmentsOf
from tests.soak import flip
from vbucket.check.log_check import KnownEnds, LogCheck
from vbucket.check.store_check import StoreCheck
from vbucket.log.device import UnknownFormatError
from vbucket.log.end_mark import read_marks
from vbucket.log.record import LogDamagedError
from vbucket.log.recovery import RecoveredGroup, recover
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import (
    BY_KEY_TABLE,
    BY_SEQNO_TABLE,
    EXPIRY_TABLE,
    FAILOVER_TABLE,
    META_TABLE,
    STATE_TABLE,
    TABLES,
)
from vbucket.store.store import Store
from vbucket.upkeep.merge import merge

VBS = (3, 4)
LMDB_DAMAGES = 100
"""Others in every run; `scripts/soak flip` does thousands."""


class SomeLog:
    """Two sealed segments and a newest one, of a few groups each."""

    def __init__(self) -> None:
        self.model = ModelPartition(VBS[0])
        writer = SegmentWriter()
        for _ in range(2):
            for _ in range(2):
                writer.add(self.model.write(b"\0a", b"x" * 20), self.model.write(b"\0b", None))
                writer.end_group()
            writer.seal()
        writer.add(self.model.write(b"\0c", b"y"))
        writer.end_group()
        writer.writer.sync()
        self.marks_before = writer.device.marks()
        writer.add(self.model.branch(7))
        writer.end_group()
        writer.writer.sync()
        self.marks = writer.device.marks()
        self.device: MemoryLogDevice = writer.device
        self.groups = list(self.recovered())
        self.bytes = {segment: self.device.read(segment) for segment in self.device.segments()}

    def recovered(self) -> Iterator[RecoveredGroup]:
        return recover(self.device, 0).groups()

    def findings(self, bytes_of: dict[int, bytes], marks: list[bytes]) -> list[str]:
        check = LogCheck(
            bytes_of,
            known=KnownEnds(merged_segment=0, mark=read_marks(marks)),
            high_seqnos={VBS[0]: 0},
        )
        return [finding.kind for finding in check.findings()]


class DamagedLog(MemoryLogDevice):
    """A log of given bytes."""

    def __init__(self, bytes_of: dict[int, bytes], marks: list[bytes]) -> None:
        super().__init__()
        self.bytes_of = bytes_of
        self._marks = marks

    def segments(self) -> list[int]:
        return sorted(self.bytes_of)

    def read(self, segment: int) -> bytes:
        return self.bytes_of[segment]


def flipped(data: bytes, at: int, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[at] ^= 1 << bit
    return bytes(damaged)


@pytest.mark.parametrize("is_last_marked", [True, False])
def test_every_byte_of_a_log(is_last_marked: bool) -> None:
    """While the end mark does not name it, the last group cannot be told from a torn write: it
    goes, and that is said. Everything else is refused.
    """
    log = SomeLog()
    marks = log.marks if is_last_marked else log.marks_before
    assert log.findings(log.bytes, marks) == []
    newest = max(log.bytes)
    names: list[tuple[int, str]] = []
    for segment, data in log.bytes.items():
        for at in range(len(data)):
            damaged = log.bytes | {segment: flipped(data, at, at % 8)}
            recovery = recover(DamagedLog(damaged, marks), 0)
            try:
                groups = list(recovery.groups())
            except (LogDamagedError, UnknownFormatError) as error:
                names.append((segment, str(error)))
                kinds = log.findings(damaged, marks)
                assert "log" in kinds
                assert "torn-tail" not in kinds
                continue
            assert not is_last_marked
            assert segment == newest
            assert groups == log.groups[:-1]
            assert recovery.torn is not None
            assert log.findings(damaged, marks) == ["torn-tail"]
    assert all(text.startswith(f"log segment {segment} ") for segment, text in names)
    assert len(names) > 100


@pytest.fixture(scope="module")
def merged() -> tuple[MemoryEnv, dict[int, ModelPartition]]:
    """A store of a few versions in two partitions, some with gaps, deletions and expiries."""
    env = MemoryEnv(TABLES)
    create_store(env, list(VBS)).close()
    models = {vb_id: ModelPartition(vb_id) for vb_id in VBS}
    writer = SegmentWriter()
    for vb_id, model in models.items():
        writer.add(*(model.write(b"\0k%d" % (n % 3), b"v%d" % n) for n in range(5)))
        writer.add(model.write(b"\0k1", None), model.write(b"\0k2", b"w", gap=vb_id % 2))
    writer.seal()
    merge(env, writer.sealed())
    return env, models


def check(env: MemoryEnv) -> list[str]:
    segment = SegmentWriter()
    segment.device.rotate()
    found = StoreCheck(env.snapshot(), SegmentsOf(segment.device), vb_ids=VBS).findings()
    return [finding.kind for finding in found if not finding.is_harmless]


def told(env: MemoryEnv, models: dict[int, ModelPartition]) -> list[object]:
    """Return every answer of a store; a refusal is its class."""
    store = Store(env)
    asked = [store.partitions]
    answers: list[object] = []
    for vb_id, model in models.items():
        keys = model.keys()
        asked += [lambda v=vb_id, k=key: store.meta(v, k) for key in keys]
        asked += [lambda v=vb_id, s=seqno: store.entry(v, s) for seqno in range(1, 10)]
        asked.append(lambda v=vb_id: store.frames(v, 1, 8, b"opaq", set(), 1 << 20))
        asked.append(lambda v=vb_id: store.first_changes_after(v, 2, 8))
    for ask in asked:
        try:
            answers.append(ask())
        except StoreDamagedError as error:
            answers.append(type(error))
    return answers


def test_a_whole_store_is_found_whole(merged: tuple[MemoryEnv, dict[int, ModelPartition]]) -> None:
    env, models = merged
    assert check(env) == []
    assert not [answer for answer in told(env, models) if isinstance(answer, type)]


@pytest.mark.parametrize(
    "table",
    [META_TABLE, STATE_TABLE, FAILOVER_TABLE, BY_KEY_TABLE, BY_SEQNO_TABLE, EXPIRY_TABLE],
)
def test_every_byte_of_a_value(
    table: str, merged: tuple[MemoryEnv, dict[int, ModelPartition]]
) -> None:
    env, models = merged
    truth = told(env, models)
    rows = dict(env.tables[table].items())
    assert rows
    for key, value in rows.items():
        for at in range(len(value)):
            damaged = MemoryEnv(TABLES)
            damaged.tables = env.tables | {table: env.tables[table].copy()}
            damaged.tables[table][key] = flipped(value, at, at % 8)
            assert check(damaged), f"{table} {key!r}, byte {at}: the check found nothing"
            if table == META_TABLE:
                if key.startswith(b"hashes"):
                    assert told(damaged, models) == truth, "nothing but comparisons needs them"
                    continue
                with pytest.raises(StoreDamagedError):
                    Store(damaged).manifest() if key != b"node" else Store(damaged)
                continue
            for found, right in zip(told(damaged, models), truth, strict=True):
                assert found == right or isinstance(found, type), f"{table} {key!r}, byte {at}"


@pytest.mark.parametrize(
    "table", [STATE_TABLE, FAILOVER_TABLE, BY_KEY_TABLE, BY_SEQNO_TABLE, EXPIRY_TABLE]
)
def test_every_byte_of_a_key(
    table: str, merged: tuple[MemoryEnv, dict[int, ModelPartition]]
) -> None:
    """A record under another key is not found under its own: that is all that may go wrong."""
    env, models = merged
    truth = told(env, models)
    for key, value in list(env.tables[table].items()):
        for at in range(len(key)):
            damaged = MemoryEnv(TABLES)
            damaged.tables = env.tables | {table: env.tables[table].copy()}
            del damaged.tables[table][key]
            damaged.tables[table][flipped(key, at, at % 8)] = value
            assert check(damaged), f"{table} {key!r}, byte {at}: the check found nothing"
            for found, right in zip(told(damaged, models), truth, strict=True):
                is_lost = table == BY_KEY_TABLE and found is None
                assert found == right or isinstance(found, type) or is_lost, f"{key!r}, byte {at}"


@pytest.mark.parametrize("damages", [flip.flips, flip.bad_pages])
def test_damaged_lmdb_pages(
    tmp_path: Path, damages: Callable[[bytes, random.Random], Iterator[flip.Damage]]
) -> None:
    """What is read is right or refused in words, without a crash; the check names what is wrong."""
    seed = random.Random().getrandbits(32)
    results = list(flip.run(tmp_path, seed, LMDB_DAMAGES, damages))
    assert [flip.problem_of(result) for result in results if flip.problem_of(result)] == [], seed
    assert len({result.damage.page_class for result in results}) == len(flip.CLASSES)
    assert any(result.outcome == flip.Outcome.REFUSED for result in results)
