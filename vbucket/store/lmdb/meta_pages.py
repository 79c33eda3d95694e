"""LMDB's two meta pages: which content of them counts, and putting a damaged one back.

    page 0   its own META_BYTES ... at COPY_AT: a copy of those of page 1, with a checksum
    page 1   its own META_BYTES ... at COPY_AT: a copy of those of page 0, with a checksum

LMDB gives meta pages no checksum, and never touches the rest of these pages. A commit of
transaction T writes page T & 1; then its copy is written into the other page, and synced, before
anybody hears of the commit. So one damaged page is always known from the other one.

Who calls it: `vbucket.store.lmdb.lmdb_file` reads by `sound_metas`; `environment_lmdb` writes.

Invariants
- the two pages that count are of neighbouring transactions, and at least one of them is in its own
  place. Of several such pairs the newest counts, so a newer state is never replaced by an older
  one, also if a crash, or an older dcpd, left older copies;
- pages are put back by the only process that writes, and while it has no transaction.
"""

from __future__ import annotations

import os
from struct import Struct
from typing import Final

import google_crc32c

from vbucket.store.lmdb.lmdb_pages import META_BYTES, Meta, read_meta

COPY_AT: Final = 2048
"""In another sector than what LMDB writes."""
COPY_HEAD: Final = Struct("=8sI")
_MAGIC: Final = b"dcpdmeta"
COPY_BYTES: Final = COPY_HEAD.size + META_BYTES
HEAD_BYTES: Final = 32
"""Of a meta page: what LMDB writes once, when it makes the file."""
_STATE_BYTES: Final = META_BYTES - 8
"""All of it but the transaction."""
PAGE_SIZES: Final = (4096, 8192, 16384, 32768)
"""Of systems with LMDB."""


def copy_of(content: bytes) -> bytes:
    """Return what the other page has of a meta page."""
    return COPY_HEAD.pack(_MAGIC, google_crc32c.value(content)) + content


def read_copy(data: bytes, slot: int) -> bytes | None:
    """Return the content of a meta page that a copy has; None: it is damaged, or there is none."""
    if len(data) < COPY_BYTES:
        return None
    content = data[COPY_HEAD.size : COPY_BYTES]
    is_sound = data[: COPY_HEAD.size] == COPY_HEAD.pack(_MAGIC, google_crc32c.value(content))
    return content if is_sound and read_meta(content, slot) is not None else None


def sound_metas(fd: int) -> tuple[bytes, bytes] | None:
    """Return what the two meta pages of a file must hold; None: nobody can tell."""
    for page_bytes in PAGE_SIZES:
        options = [
            _options(
                _read(fd, slot * page_bytes, META_BYTES),
                read_copy(_read(fd, (1 - slot) * page_bytes + COPY_AT, COPY_BYTES), slot),
                slot, page_bytes,
            )
            for slot in (0, 1)
        ]  # fmt: skip
        pairs = [
            (transaction + other, first, second)
            for transaction, first, is_copy in options[0]
            for other, second, is_copy_too in options[1]
            if abs(transaction - other) == 1 and not (is_copy and is_copy_too)
        ]
        if pairs:
            _, first, second = max(pairs)
            return first, second
    return None


def _options(
    own: bytes, copy: bytes | None, slot: int, page_bytes: int
) -> list[tuple[int, bytes, bool]]:
    """Return what a meta page may hold: its transaction, the content, and whether it is a copy."""
    found = []
    for content in (own, copy):
        meta = None if content is None else read_meta(content, slot)
        if content is None or meta is None or meta.page_bytes != page_bytes:
            continue
        if content is own and copy is not None and own != copy:
            # A commit changes where the trees begin, and the transaction.
            cut = _STATE_BYTES
            if own[cut:] == copy[cut:] or own[:cut] == copy[:cut]:
                continue
        found.append((meta.transaction, content, content is not own))
    return found


def _read(fd: int, at: int, size: int) -> bytes:
    try:
        return os.pread(fd, size, at).ljust(size, b"\0")
    except OSError:  # a bad sector: another place may tell
        return bytes(size)


class MetaPages:
    """See the module. Of the only process that writes; `close` closes its descriptor."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises OSError."""
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._known: tuple[bytes, bytes] | None = None
        """What the pages hold, since `learn`."""

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def learn(self) -> list[int]:
        """Take what counts in the file, and put it where it is not; return the pages that were
        mended. Raises OSError.
        """
        self._known = sound_metas(self._fd)
        if self._known and os.fstat(self._fd).st_size < len(self._known) * self._page_bytes:
            self._known = None  # it is cut short, and does not become longer here
        return self.put_back()

    def put_heads_back(self) -> None:
        """After a commit, which may have been written to a page whose head was damaged meanwhile:
        put the heads back. Raises OSError.
        """
        for slot, content in enumerate(self._known or ()):
            at = slot * self._page_bytes
            if _read(self._fd, at, HEAD_BYTES) != content[:HEAD_BYTES]:
                os.pwrite(self._fd, content[:HEAD_BYTES], at)

    def put_back(self) -> list[int]:
        """Make both pages what is known of them, also the copies; return the pages that were
        mended. Raises OSError.
        """
        known = self._known or ()
        mended = [
            slot for slot, content in enumerate(known)
            if _read(self._fd, slot * self._page_bytes, META_BYTES) != content
        ]  # fmt: skip
        for slot in mended:  # all of the page: it may have had another content
            page = known[slot].ljust(self._page_bytes, b"\0")
            os.pwrite(self._fd, page, slot * self._page_bytes)
        is_changed = bool(mended)
        for slot, content in enumerate(known):
            at, copy = (1 - slot) * self._page_bytes + COPY_AT, copy_of(content)
            if _read(self._fd, at, COPY_BYTES) != copy:
                os.pwrite(self._fd, copy, at)
                is_changed = True
        if is_changed:
            os.fdatasync(self._fd)
        return mended

    @property
    def newest(self) -> Meta | None:
        """The newest state; None: nobody can tell."""
        metas = [read_meta(each, slot) for slot, each in enumerate(self._known or ())]
        return max((meta for meta in metas if meta is not None), default=None)

    @property
    def _page_bytes(self) -> int:
        assert self._known is not None, "it was read"
        meta = read_meta(self._known[0], 0)
        assert meta is not None, "it counts"
        return meta.page_bytes
