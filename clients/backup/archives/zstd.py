"""zstd: from the standard library (Python 3.14 and newer) or from a package of the base."""

from __future__ import annotations

import sys
from typing import Final

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LEVEL: Final = 1
"""Level 3 is half as fast on change streams and saves only 1 to 4 % more; see docs/backup.md."""


def compress(data: bytes, level: int = LEVEL) -> bytes:
    """Return a zstd frame with the size of its content."""
    return zstd.compress(data, level)


def decompress(data: bytes, size_bytes: int) -> bytes:
    """Return the content of a zstd frame. Raises ValueError if it is not `size_bytes` long."""
    try:
        if zstd.get_frame_info(data).decompressed_size != size_bytes:
            raise ValueError("its size differs from the recorded size")
        content = zstd.decompress(data)
    except zstd.ZstdError as error:
        raise ValueError(f"not zstd: {error}") from error
    if len(content) != size_bytes:
        raise ValueError("its size differs from the recorded size")
    return content
