"""The same keys written again and again: the store's file stays as small as it is meant to."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from support.stored_bytes import pack_mutation
from vbucket.engine.recovery.startup import new_partitions
from vbucket.log.device import pack_segment_header
from vbucket.log.record import pack_group
from vbucket.model.control import pack_control
from vbucket.store.lmdb.environment_lmdb import LmdbEnv
from vbucket.store.records import BY_SEQNO_TABLE, STORE_FORMAT_VERSION, TABLES, NodeRecord
from vbucket.store.store import Store, StoreView
from vbucket.upkeep.compaction import Compactor, Floors
from vbucket.upkeep.merge import merge
from vbucket.upkeep.retention import DiskUse, Planner, Windows

KEYS = 12_000
VALUE = b"." * 128
PARTITIONS = 16
MEMTABLE_BYTES = 1 << 20
HISTORY_BYTES = 8 << 20
SLICE_BYTES = 256 << 10
LIVE_BYTES = KEYS * (12 + len(VALUE) + 55 + 40 + 12)
"""Key, value, the frame's head, the record by key, the columns."""
SALT = 1 << 63
HOUR_NS = 3600 * 10**9
START_NS = 1_800_000_000_000_000_000


class Churn:
    """Writes keys by chance, a segment at a time."""

    def __init__(self) -> None:
        self.now_ns = START_NS
        self.floors: dict[int, Floors] = {}
        """Those that the next segment begins with."""
        self._random = random.Random(1)
        self._previous = [0] * KEYS
        self._seqnos = [0] * PARTITIONS
        self._sizes = [0]
        self._crc = 0

    def segment(self) -> tuple[int, bytes]:
        entries = [
            pack_control(vb_id, {"kind": "floor", "seqno": floor, "purge": purge})
            for vb_id, (floor, purge) in self.floors.items()
        ]
        self.floors = {}
        size = 0
        while size < MEMTABLE_BYTES:
            number = self._random.randrange(KEYS)
            vb_id = number % PARTITIONS
            self.now_ns += 10_000
            self._seqnos[vb_id] += 1
            entry = pack_mutation(
                vb_id=vb_id, key=b"\0key%09d" % number, value=VALUE, cas=self.now_ns,
                seqno=self._seqnos[vb_id], rev_seqno=1, prev_seqno=self._previous[number],
            )  # fmt: skip
            self._previous[number] = self._seqnos[vb_id]
            entries.append(entry)
            size += len(entry)
        at = len(self._sizes)
        record, self._crc = pack_group(at, b"".join(entries), SALT, self._crc)
        data = pack_segment_header(at, self._sizes[-1], SALT) + record
        self._sizes.append(len(data))
        return at, data


def compact(env: LmdbEnv, churn: Churn, planner: Planner) -> Iterator[int]:
    """Plan and compact; yield the versions that each slice dropped."""
    blocks_bytes = env.used_bytes([BY_SEQNO_TABLE])
    other_bytes = env.used_bytes() - blocks_bytes
    use = DiskUse(blocks_bytes, other_bytes, 2 * MEMTABLE_BYTES, 3 * SLICE_BYTES)
    snapshot = env.snapshot()
    report = planner.plan(
        StoreView(snapshot),
        range(PARTITIONS),
        Windows(HOUR_NS, HISTORY_BYTES, HOUR_NS),
        churn.now_ns,
        use=use,
    )
    snapshot.close()
    assert not report.damages
    churn.floors = todo = {step.vb_id: Floors(step.floor, step.purge) for step in report.steps}
    compactor = Compactor(slice_bytes=SLICE_BYTES)
    while todo:
        done = compactor.run(env, list(todo), lambda: False, floors=todo)
        assert not done.damages
        todo = {vb_id: todo[vb_id] for vb_id in todo if vb_id not in done.finished}
        yield done.versions


def test_file_stays_within_three_times_live_data_and_history(tmp_path: Path) -> None:
    env = LmdbEnv(tmp_path / "store", TABLES)
    drawn = random.Random(2)
    records = new_partitions(drawn, PARTITIONS)
    node = NodeRecord(STORE_FORMAT_VERSION, env.engine, "00", False, "commit", 0)
    store = Store.create(env, node, records)
    churn, planner = Churn(), Planner()
    dropped = 0
    for _ in range(30):
        merge(env, [churn.segment()])
        store.refresh()  # as the server does after a merge, and beside a compaction
        for versions in compact(env, churn, planner):
            dropped += versions
            store.refresh()
        file_bytes = (tmp_path / "store" / "data.mdb").stat().st_size
        assert file_bytes <= 3 * LIVE_BYTES + HISTORY_BYTES
    versions = sum(record.versions for record in store.partitions().values())
    assert dropped > 5 * KEYS, "there was something to be dropped"
    assert versions > 2 * KEYS, "and there is history left"
    store.close()
    env.close()
