"""A mirror in an LMDB file that reads from copies, so that masters carry none of it.

    python examples/demos/cluster_mirror.py 127.0.0.1:11210 mirror.lmdb

It follows until it is killed. The next run continues after the last transaction.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from dcpd import DcpdError, Mirror


def mirror_at(server: str, path: Path) -> Mirror:
    """Return the mirror; `async with` catches up."""
    return Mirror(server, path, from_replicas=True, validate=True)


async def follow(server: str, path: Path) -> None:
    """Follow without end."""
    async with mirror_at(server, path) as mirror:
        while True:
            await mirror.caught_up()  # raises what ends it
            await asyncio.sleep(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("server", help="HOST:PORT, or several separated by commas")
    parser.add_argument("file", type=Path, help="the LMDB file; created if missing")
    options = parser.parse_args()
    try:
        asyncio.run(follow(options.server, options.file))
    except DcpdError as error:
        print(f"mirror: {error}. {error.hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
