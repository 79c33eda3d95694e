"""The consumer's process: started with its environment, watched, paused, killed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from clients.conformance.consumers.documents import BadLineError, Documents

OUTPUT_BYTES_MAX: Final = 512 << 20
"""More output is a flood, and ends the process."""
LINE_BYTES_MAX: Final = 64 << 20
STDERR_BYTES_SHOWN: Final = 2_000
BODY_BYTES_MAX: Final = 64 << 20


class ConsumerProcess:
    """The command under test. `kill`, `pause` and `resume` act on it and its children."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self._command = command
        self._folder = folder
        self._errors = folder / "consumer.log"
        (folder / "state").mkdir()
        self.documents = Documents(folder / "documents.json")
        self._receiver = _Receiver(self.documents)
        self._environment = os.environ | environment | {
            "STATE_DIR": str(folder / "state"),
            "DOCUMENTS_FILE": str(folder / "documents.json"),
            "DOCUMENTS_URL": self._receiver.url,
        }  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self._fault = ""
        self.is_wanted = False
        """Whether it is meant to run."""

    def start(self) -> None:
        """Start it; it goes on from what it has in STATE_DIR. Raises OSError."""
        assert self._process is None, "it runs already"
        with self._errors.open("ab") as errors:
            self._process = process = subprocess.Popen(  # noqa: S603 - the user's own command
                self._command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL,
                env=self._environment, start_new_session=True,
            )  # fmt: skip
        self.is_wanted = True
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        taken = 0
        try:
            while line := process.stdout.readline(LINE_BYTES_MAX):
                taken += len(line)
                if taken > OUTPUT_BYTES_MAX or len(line) == LINE_BYTES_MAX:
                    self._fault = f"it floods its standard output: {taken:,} bytes"
                    self._signal(signal.SIGKILL)
                    return
                self.documents.take_line(line)
        except BadLineError as error:
            self._fault = f"its output cannot be judged: {error}"
            self._signal(signal.SIGKILL)
        except ValueError:
            pass  # the pipe was closed: the process was killed

    def ended(self) -> str:
        """Return how it ended although nobody stopped it; "" if it runs."""
        process = self._process
        if self._fault:
            return self._fault
        if not self.is_wanted or process is None or process.poll() is None:
            return ""
        return f"exit code {process.returncode}; {self._last_words()}"

    def _last_words(self) -> str:
        with suppress(OSError):
            words = self._errors.read_bytes()[-STDERR_BYTES_SHOWN:].decode(errors="replace")
            if last := [line for line in words.splitlines() if line.strip()][-3:]:
                return "its last words: " + " / ".join(last)
        return "it said nothing on its standard error"

    def kill(self) -> None:
        """Kill it (SIGKILL)."""
        self.is_wanted = False
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGKILL)
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()
        self._process = None

    def restart(self) -> None:
        """Kill it, and start it again with its state."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Let it stand still (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it, and stop taking documents."""
        self.kill()
        self._receiver.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it does not run"
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class _Receiver:
    """Takes PUT and DELETE of documents."""

    def __init__(self, documents: Documents) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                size = int(self.headers.get("content-length") or 0)
                if size > BODY_BYTES_MAX:
                    self.send_error(413)
                    return
                documents.put(self._key(), self.rfile.read(size).decode(errors="replace"))
                self._done()

            def do_DELETE(self) -> None:
                documents.put(self._key(), None)
                self._done()

            def _key(self) -> str:
                return unquote(self.path.lstrip("/"))

            def _done(self) -> None:
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
