"""The audit log: one JSON line per login, refusal for lack of rights and admin command.

    {"time": ..., "event": "login", "user": ..., "peer": ..., "over": ..., "result": "ok"}
    {"time": ..., "event": "denied", "user": ..., "peer": ..., "action": ..., "why": ...}
    {"time": ..., "event": "admin", "user": ..., "peer": ..., "action": ..., "result": ...}

Called on the loop. Its own thread writes, so a slow disk delays nobody. Callers pass names and
reasons only, no passwords and no values.

Invariants
- lines are whole, in the order of `write`, in a file that only its owner reads;
- if the file cannot be written, an error is logged and the server goes on. Lost lines are counted,
  and a line in the file reports them once it can be written again;
- at most PENDING_MAX lines wait in memory; `close` writes those that wait.
"""

from __future__ import annotations

import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from dcp.server.observe.event_log import EventLog

PENDING_MAX: Final = 10_000
FILES_KEPT: Final = 5
"""Full files that stay: audit.log.1 (the newest) to audit.log.5."""
TEXT_CHARS_MAX: Final = 300
"""Longest text in a line, because a client may have sent part of it."""
CLOSE_TIMEOUT_S: Final = 5.0


def audit_line(when: datetime, event: str, fields: dict[str, object]) -> bytes:
    """Return one line. Fields that are None or "" are left out, long texts are cut."""
    document: dict[str, object] = {
        "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "event": event,
    }
    for name, value in fields.items():
        if value is not None and value != "":
            document[name] = value[:TEXT_CHARS_MAX] if isinstance(value, str) else value
    return json.dumps(document, default=str).encode() + b"\n"


def _utc_now() -> datetime:
    return datetime.now(UTC)


class AuditLog:
    """See the module. `write` may be called from any thread."""

    def __init__(
        self,
        path: Path | None,
        log: EventLog,
        *,
        bytes_max: int,
    ) -> None:
        """Write to `path` (None: write nothing); a file is full at `bytes_max` bytes."""
        self.path = path
        self._log = log
        self._bytes_max = bytes_max
        self._changed = threading.Condition()
        self._pending: list[bytes] = []
        self._is_closing = False
        self._lost = 0
        """Lost lines that the file does not report yet."""
        self._is_failing = False
        self._writer: threading.Thread | None = None

    def write(self, event: str, **fields: object) -> None:
        """Queue a line; the thread writes it soon."""
        if self.path is None:
            return
        line = audit_line(_utc_now(), event, fields)
        with self._changed:
            if len(self._pending) >= PENDING_MAX:
                self._lost += 1
                return
            self._pending.append(line)
            if self._writer is None and not self._is_closing:
                self._writer = threading.Thread(target=self._run, name="audit", daemon=True)
                self._writer.start()
            self._changed.notify()

    def close(self) -> None:
        """Write the lines that wait, and stop. Later lines are lost."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
            writer = self._writer
        if writer is not None:
            writer.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            with self._changed:
                while not (self._pending or self._is_closing):
                    self._changed.wait()
                lines, self._pending = self._pending, []
                lost, self._lost = self._lost, 0
                is_closing = self._is_closing
            if lines or lost:
                self._append(lines, lost)

    def _append(self, lines: list[bytes], lost: int) -> None:
        assert self.path is not None
        data = b"".join(lines)
        if lost:
            data = audit_line(_utc_now(), "lost", {"lines": lost}) + data
        try:
            append_rotating(self.path, data, self._bytes_max)
        except OSError as error:
            with self._changed:
                self._lost += lost + len(lines)
            if not self._is_failing:
                self._log.error(
                    "audit log cannot be written", path=str(self.path), reason=str(error)
                )
            self._is_failing = True
            return
        if self._is_failing:
            self._log.warning("audit log is written again", path=str(self.path), lost=lost)
        self._is_failing = False


def append_rotating(path: Path, data: bytes, bytes_max: int) -> None:
    """Append to a file, all or nothing; rotate a full file first. Raises OSError."""
    try:
        is_full = path.stat().st_size + len(data) > bytes_max
    except FileNotFoundError:
        is_full = False
    if is_full:
        for number in range(FILES_KEPT - 1, 0, -1):
            older = path.with_name(f"{path.name}.{number}")
            if older.exists():
                older.replace(path.with_name(f"{path.name}.{number + 1}"))
        path.replace(path.with_name(f"{path.name}.1"))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size_bytes = os.fstat(descriptor).st_size
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            # Half a line would run into the line that is written next.
            os.ftruncate(descriptor, size_bytes)
            raise
    finally:
        os.close(descriptor)
