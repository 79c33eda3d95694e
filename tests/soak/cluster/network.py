"""The proxy of `tests.soak.cluster.links` in its process, as tests and soaks use it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Final

ROOT: Final = Path(__file__).parents[3]


class NetworkError(Exception):
    """The proxy refused an order, or is gone."""


class Network:
    """See the module. A context manager; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        path = f"{ROOT}:{ROOT / 'tests'}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.cluster.links"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            # Ctrl-C at the terminal is for who started us; the end of its input ends the proxy.
            start_new_session=True,
        )  # fmt: skip
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not sent is not sent any more
                pipe.close()

    def serve(self, target: str, port: int, *, source: str = "", to_port: int = 0) -> int:
        """Listen before a party; return the port."""
        found: int = self._order("serve", target=target, port=port, source=source, to_port=to_port)
        return found

    def runs(self, node: str, pid: int) -> None:
        """Tell which process a node is. Its connections are a client's before."""
        self._order("runs", node=node, pid=pid)

    def hold(self, source: str, target: str) -> None:
        """Let nothing pass from one party to the other, until `heal`."""
        self._order("set", source=source, target=target, is_held=True, delay_s=0.0)

    def cut(self, one: str, other: str) -> None:
        """Let nothing pass between two parties, until `heal`."""
        self.hold(one, other)
        self.hold(other, one)

    def delay(self, source: str, target: str, delay_s: float) -> None:
        """Let everything from one party to the other be late."""
        self._order("set", source=source, target=target, is_held=False, delay_s=delay_s)

    def heal(self) -> None:
        """Open everything. What was held arrives."""
        self._order("heal")

    def reset(self, one: str, other: str) -> int:
        """Break all connections between two parties; return how many."""
        found: int = self._order("reset", one=one, other=other)
        return found

    def _order(self, what: str, **parts: Any) -> Any:
        with self._lock:
            process = self._process
            if process is None:
                raise NetworkError("the proxy has ended")
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps({"do": what, **parts}) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError as error:
                raise NetworkError(f"the proxy is gone: {error}") from error
        if not line:
            raise NetworkError("the proxy has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise NetworkError(answer["error"])
        return answer["answer"]
