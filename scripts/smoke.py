"""Tries an installed dcpd: has it the loops in C, does it start, and does it keep what was stored?

    python scripts/smoke.py [--plain]      with the interpreter of the environment to try

`--plain`: plain Python is all right, too. The release runs it in an empty environment for each
wheel with the loops.
"""

from __future__ import annotations

import sys

from dcpd.testing import DcpServer

DOCUMENTS = 300


def main(arguments: list[str]) -> int:
    """Return 0 if all is well."""
    with DcpServer() as server:
        status = server.ask("GET", "/api/v1/status")
        print(f"dcpd {status['version']} ({status['form']}), Python {sys.version.split()[0]}")
        if status["form"] != "loops in C" and arguments != ["--plain"]:
            print("it has no loops in C", file=sys.stderr)
            return 1
        with server.connect() as kv:
            for number in range(DOCUMENTS):
                kv.set(f"key-{number}", b"value %d" % number)
        server.restart()
        with server.connect() as kv:
            for number in range(DOCUMENTS):
                assert kv.get(f"key-{number}").value == b"value %d" % number, number
    print(f"{DOCUMENTS} documents were stored, and read after a restart")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
