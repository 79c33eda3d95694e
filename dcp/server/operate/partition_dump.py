"""Dumps: the documents of a partition as of a seqno, as JSON lines, while writes continue.

The admin interface calls it. A dump converts a read view to text, in slices, as fast as the
consumer reads. Nothing is buffered for a slow consumer.

A line is one document: `v` 1, `collection`, `key`, `value` (`key_encoding` and `value_encoding`
"base64" mark binary data), `seqno`, `rev`, `cas` (text), `flags`, `expiry`, `datatype`, and
`xattrs` (name: JSON text) where there are any. A dump that cannot be finished ends with a line that
has only `error`.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any, Final

from dcp.server.storage.waiters import CommitWaiters
from dcp.wire.xattrs import body_of, section_of, unpack_xattrs
from vbucket.engine.engine import Engine
from vbucket.engine.read_view import ReadView, Shown, ViewInvalidError, ViewRefusedError, Views
from vbucket.model.manifest import collection_of, decode_leb128
from vbucket.store.environment import StoreDamagedError
from vbucket.store.plain_value import plain

SLICE_DOCUMENTS: Final = 100
"""Documents converted in one turn of the loop: 1 to 2 ms."""
LARGE_LINE_BYTES: Final = 64 * 1024
"""A line of this size leaves with what is before it, so that no reader holds two."""
DUMPS_MAX: Final = 8
"""Dumps at a time. Each holds up to one large line until its reader takes it: up to six times the
size of the document, because JSON writes some bytes as six."""
SCHEMA_VERSION: Final = 1
_OWNER: Final = "(dumps)"
"""What the views of dumps count for: no user has this name."""


class Dumps:
    """See the module."""

    def __init__(self, engine: Engine, views: Views, commits: CommitWaiters) -> None:
        self._engine = engine
        self._views = views
        self._commits = commits
        self._running: set[ReadView] = set()

    async def open(self, vb_id: int, at_seqno: int | None) -> ReadView:
        """Open the view for a dump; None: of the committed state. Raises ViewRefusedError."""
        await self._commits.until_partition(vb_id)
        committed_seqno = self._engine.partitions[vb_id].committed_seqno
        if at_seqno is not None and at_seqno > committed_seqno:
            raise ViewRefusedError(
                f"partition {vb_id} ends at seqno {committed_seqno}, below {at_seqno}"
            )
        # A view may have been closed elsewhere: for its age, or because its answer never began.
        self._running = {view for view in self._running if view in self._views}
        if len(self._running) >= DUMPS_MAX:
            raise ViewRefusedError(f"{DUMPS_MAX} dumps run already; try again when one has ended")
        view = self._views.open(vb_id, committed_seqno if at_seqno is None else at_seqno, _OWNER)
        self._running.add(view)
        return view

    async def lines(self, view: ReadView) -> AsyncIterator[bytes]:
        """Yield the dump of a view, some lines at a time, and close the view."""
        scan = view.scan()
        try:
            while not scan.is_done:
                lines: list[bytes] = []
                for shown in scan.step(SLICE_DOCUMENTS):
                    lines.append(line := self._line(shown))
                    if len(line) >= LARGE_LINE_BYTES:
                        yield b"".join(lines)
                        lines.clear()
                if lines:
                    yield b"".join(lines)
                await asyncio.sleep(0)
        except (ViewInvalidError, StoreDamagedError) as error:
            what = f"the dump of partition {view.vb_id} as of seqno {view.seqno} is incomplete"
            yield _packed({"error": {"what": what, "why": str(error), "try": "dump it again"}})
        finally:
            self._views.close(view)

    def _line(self, shown: Shown) -> bytes:
        engine = self._engine
        if not engine.keyspace.is_reachable(shown.key):
            return b""
        meta = shown.meta
        datatype, value = plain(meta.datatype, shown.value)
        decoded = decode_leb128(shown.key)
        assert decoded is not None, "stored keys begin with a collection's id"
        return _packed(
            {
                "v": SCHEMA_VERSION,
                "collection": engine.keyspace.manifest.path_of(collection_of(shown.key)),
                **_text("key", shown.key[decoded[1] :]),
                **_text("value", body_of(value, datatype)),
                **_xattrs(section_of(value, datatype)),
                "seqno": meta.seqno,
                "rev": meta.rev_seqno,
                "cas": str(meta.cas),
                "flags": meta.flags,
                "expiry": meta.expiry,
                "datatype": datatype,
            }
        )


def _text(name: str, raw: bytes) -> dict[str, str]:
    try:
        return {name: raw.decode()}
    except UnicodeDecodeError:
        return {name: b64encode(raw).decode(), f"{name}_encoding": "base64"}


def _xattrs(section: bytes) -> dict[str, dict[str, str]]:
    """Return the XATTRs as JSON texts, nothing if there are none."""
    found = unpack_xattrs(section)
    if not found:
        return {}
    return {"xattrs": {name.decode(): text.decode() for name, text in found.items()}}


def _packed(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"
