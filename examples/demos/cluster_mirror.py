"""A mirror in an LMDB file that reads from copies, so that masters carry none of it.

    python examples/demos/cluster_mirror.py 127.0.0.1:11210 mirror.lmdb

It follows until it is killed. The next run continues after the last transaction.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from processes import follow_until_killed

from dcpd import Mirror


def mirror_at(server: str, path: Path) -> Mirror:
    """Return the mirror; `async with` catches up."""
    return Mirror(server, path, from_replicas=True, validate=True)


async def follow(server: str, path: Path) -> None:
    """Follow without end."""
    async with mirror_at(server, path) as mirror:
        while True:
            await mirror.caught_up()  # raises what ends it
            await asyncio.sleep(1)


if __name__ == "__main__":
    help_ = "the LMDB file; created if missing"
    sys.exit(follow_until_killed("mirror", __doc__, help_, follow))
