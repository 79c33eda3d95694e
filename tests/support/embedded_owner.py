"""Owns an embedded metadata store until it is killed.

    python -m support.embedded_owner FOLDER PORT

Prints a line when it listens.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from failover.metadata.embedded.server import EmbeddedServer
from support.embedded_store import SECRET


async def main(folder: str, port: str) -> str:
    server = EmbeddedServer(Path(folder), SECRET, lambda text: print(text, file=sys.stderr))
    await server.start(port=int(port))
    print("listening", flush=True)
    return await server.failed


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
