"""A data folder as an older server left it. That server accepted any CAS below 2^63 and any 48-bit
revision, and continued from there itself.
"""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import patch

from dcp.server.config.sources import Settings
from dcp.server.storage.opening import Storage
from vbucket.engine import engine as engine_module
from vbucket.engine.engine import MUTATION, SET
from vbucket.model.ids import vbucket_of

FAR_CAS = 2**63 - 1
TOP_REV = 2**48 - 1
KEYS = 6
"""Documents of a partition with a CAS too far ahead, or a revision above the limit."""
KEY = b"poisoned"
VB = vbucket_of(KEY)


def write_folder(path: Path) -> dict[bytes, bytes]:
    """Write the folder; return the documents of partition VB by their keys. One more is deleted."""
    storage = Storage(path, Settings(data=path))
    storage.writer.rotate()
    engine = storage.engine
    engine.cas_drift_ns = 2**63
    engine.begin_batch(time.time_ns())
    documents = {b"before": b"0"}
    put(storage, b"before", b"0")
    for key, rev, cas in ((KEY, 7, FAR_CAS), (b"gone", 1, FAR_CAS)):
        body = b"\0" + key + b"v"
        engine.put_with_meta(MUTATION, VB, b"\0" + key, body, 5, 0, 0, rev, cas, 0)
    documents[KEY] = b"v"
    for number in range(KEYS - 2):
        documents[b"after %d" % number] = b"%d" % number
        put(storage, b"after %d" % number, b"%d" % number)
    assert engine.delete(VB, b"\0gone", 0)[0] == 0
    # The highest revision that was possible without a limit.
    part = engine.partitions[VB]
    with patch.object(engine_module, "REV_SEQNO_MAX", 2**60):
        cas = part.max_cas + 1
        engine.put_with_meta(MUTATION, VB, b"\0top", b"\0topv", 0, 0, 0, TOP_REV, cas, 0)
        put(storage, b"top", b"w")
    documents[b"top"] = b"w"
    commit(storage)
    assert part.max_cas > FAR_CAS
    assert storage.close(is_clean=True) == ""
    return documents


def put(storage: Storage, key: bytes, value: bytes) -> None:
    """Store a document in partition VB, whatever partition its key belongs to."""
    stored = b"\0" + key
    assert storage.engine.store(SET, VB, stored, stored + value, 0, 0, 0, 0)[0] == 0


def commit(storage: Storage) -> None:
    """Write and sync the open group."""
    group = storage.engine.keyspace.take_group()
    assert group is not None
    storage.writer.append(group.number, group.payload)
    storage.writer.sync()
    storage.engine.keyspace.group_synced(group)
