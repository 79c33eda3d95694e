"""Our tools as processes of their own: what the runners of benchmarks share."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tool(module: str, *arguments: object) -> dict[str, Any]:
    """Run one of our tools in its own process; return the JSON document that it printed."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}: {done.stderr}{done.stdout}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def generate(
    protocol: str, port: int, shape: tuple[int, int], *arguments: object
) -> dict[str, Any]:
    """Drive a server with the generator; return its result."""
    connections, in_flight = shape
    document = tool(
        "generator", "--protocol", protocol, "--port", port,
        "--connections", connections, "--in-flight", in_flight, *arguments,
    )  # fmt: skip
    result: dict[str, Any] = document["result"]
    return result
