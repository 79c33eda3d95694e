"""zstd: from the standard library (Python 3.14 and newer) or from the extra."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Final

from clients.backup.archives.archive_errors import MissingExtraError

LEVEL: Final = 1
"""Level 3 is half as fast on change streams and saves only 1 to 4 % more; see docs/backup.md."""


@lru_cache(maxsize=1)
def _module() -> Any:
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise MissingExtraError("zstd, which compresses archives, is not installed") from None
    return zstd


def compress(data: bytes, level: int = LEVEL) -> bytes:
    """Return a zstd frame with the size of its content."""
    packed: bytes = _module().compress(data, level)
    return packed


def decompress(data: bytes, size_bytes: int) -> bytes:
    """Return the content of a zstd frame. Raises ValueError if it is not `size_bytes` long."""
    zstd = _module()
    try:
        if zstd.get_frame_info(data).decompressed_size != size_bytes:
            raise ValueError("its size differs from the recorded size")
        content: bytes = zstd.decompress(data)
    except zstd.ZstdError as error:
        raise ValueError(f"not zstd: {error}") from error
    if len(content) != size_bytes:
        raise ValueError("its size differs from the recorded size")
    return content
