"""The event log: one line per event on stderr, as text for people or JSON for machines.

The server's parts get an `EventLog`. An event is a constant phrase ("connection closed"). What
varies goes into fields, so that a log can be searched and counted. It uses the standard library's
logging, so lines of uvicorn and asyncio have the same form.

A client that is refused a thousand times a second causes some lines and a count, not a full disk:
`RefusalLog` has a limit for each kind of line and peer.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from datetime import UTC, datetime
from typing import Final, NamedTuple, TextIO

LOGGER_NAME: Final = "dcpd"

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
"""Values of the setting `log_level`."""


LINES_KEPT: Final = 500
"""Lines that are kept in memory for the web console: some 200 KB."""
_FIELD_CHARS_MAX: Final = 500
LINES_PER_S: Final = 0.2
BURST: Final = 10
KEYS_MAX: Final = 1024
"""Pairs of event and peer whose lines are counted."""


class KeptLine(NamedTuple):
    """An event as it was logged."""

    time_s: float
    """Unix time."""
    level: str
    event: str
    fields: dict[str, str]


class EventLog:
    """Writes events. Fields must be plain values; they are written as key=value or JSON members."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self.lines: deque[KeptLine] = deque(maxlen=LINES_KEPT)
        """The last ones, the newest at the end."""

    def set_level(self, level: str) -> None:
        """Log from this level on, one of LEVELS."""
        self._logger.setLevel(LEVELS[level])

    def debug(self, event: str, **fields: object) -> None:
        """Log what only matters for finding a bug."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log what an operator may want to know later."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log what an operator should look at."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log what the server could not do."""
        self._write(logging.ERROR, event, fields)

    def failure(self, event: str, error: Exception, **fields: object) -> None:
        """Log a bug, or a failure of what the server runs on, with its traceback."""
        fields["reason"] = str(error) or type(error).__name__
        self._keep(logging.ERROR, event, fields)
        self._logger.error(event, extra={"fields": fields}, exc_info=error)

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._keep(level, event, fields)
            self._logger.log(level, event, extra={"fields": fields})

    def _keep(self, level: int, event: str, fields: dict[str, object]) -> None:
        shown = {name: str(value)[:_FIELD_CHARS_MAX] for name, value in fields.items()}
        name = logging.getLevelName(level).lower()
        self.lines.append(KeptLine(round(time.time(), 3), name, event, shown))


class Suppressed(NamedTuple):
    """Suppressed lines that no later line has reported."""

    event: str
    peer: str
    lines: int


class _Bucket:
    __slots__ = ("lines", "suppressed", "when_s")

    def __init__(self, now_s: float) -> None:
        self.lines = float(BURST)
        self.suppressed = 0
        self.when_s = now_s


class LogLimiter:
    """Limits how often one peer may cause one kind of line: a token bucket for each pair. Pure.

    Invariants
    - of n events of one kind and peer within t seconds, at most BURST + t * LINES_PER_S are
      admitted;
    - every event is admitted or counted, and every count is returned exactly once;
    - at most KEYS_MAX buckets are kept; those that were quiet longest go first.
    """

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], _Bucket] = {}
        self._evicted: list[Suppressed] = []

    def admit(self, event: str, peer: str, now_s: float) -> int | None:
        """Return how many lines like this one were suppressed since the last one. None: suppress
        this one, too. Times are seconds of a clock that never goes back.
        """
        key = (event, peer)
        bucket = self._buckets.pop(key, None) or _Bucket(now_s)
        self._buckets[key] = bucket  # at the end: the dictionary is in order of use
        bucket.lines = min(float(BURST), bucket.lines + (now_s - bucket.when_s) * LINES_PER_S)
        bucket.when_s = now_s
        if len(self._buckets) > KEYS_MAX:
            self._evict()
        if bucket.lines < 1:
            bucket.suppressed += 1
            return None
        bucket.lines -= 1
        left_out, bucket.suppressed = bucket.suppressed, 0
        return left_out

    def drain(self, now_s: float) -> list[Suppressed]:
        """Return counts that no later line will report soon, because their peers are quiet."""
        told, self._evicted = self._evicted, []
        for (event, peer), bucket in self._buckets.items():
            if bucket.suppressed and now_s - bucket.when_s > 1 / LINES_PER_S:
                told.append(Suppressed(event, peer, bucket.suppressed))
                bucket.suppressed = 0
        return told

    def tell(self, log: EventLog, now_s: float) -> None:
        """Log the number of suppressed lines that no later line will report soon."""
        for event, peer, lines in self.drain(now_s):
            log.info("log lines left out", about=event, peer=peer, lines=lines)

    def _evict(self) -> None:
        (event, peer), bucket = next(iter(self._buckets.items()))
        del self._buckets[event, peer]
        if bucket.suppressed:
            self._evicted.append(Suppressed(event, peer, bucket.suppressed))


class RefusalLog:
    """Log lines about refusals, each kind at a bounded rate per host. Lives on one event loop.

    Connections, the TLS listener, the admin port and the pager write here. The upkeep calls `tick`,
    so suppressed lines are reported even if no further line follows.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._limiter = LogLimiter()
        self.suppressed_lines = 0
        """Lines that were left out so far."""

    def write(self, event: str, peer_host: str, **fields: object) -> None:
        """Log one refusal, or count it as suppressed."""
        left_out = self._limiter.admit(event, peer_host, time.monotonic())
        if left_out is None:
            self.suppressed_lines += 1
            return
        if left_out:
            fields["left_out_before"] = left_out
        self._log.info(event, **{"peer": peer_host, **fields})

    def tick(self, now_s: float) -> None:
        """Report suppressed lines; monotonic seconds."""
        self._limiter.tell(self._log, now_s)


def format_text(when: datetime, level: str, event: str, fields: dict[str, object]) -> str:
    """Return an event as one line for people."""
    stamp = when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line = f"{stamp} {level:<7} {_one_line(event)}"
    return line + "".join(f"  {name}={_text_value(value)}" for name, value in fields.items())


def format_json(when: datetime, level: str, event: str, fields: dict[str, object]) -> str:
    """Return an event as one JSON object; the fields come after time, level and event."""
    stamp = when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"time": stamp, "level": level, "event": event, **fields}, default=str)


def set_up_logging(level: str, log_format: str, stream: TextIO | None = None) -> EventLog:
    """Send all logging of the process to a stream (stderr) and return the server's log.

    `log_format` is text, json, or auto: text on a terminal, JSON otherwise.
    """
    target = sys.stderr if stream is None else stream
    is_json = log_format == "json" or (log_format == "auto" and not target.isatty())
    handler = logging.StreamHandler(target)
    handler.setFormatter(_EventFormatter(is_json=is_json))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(LEVELS[level])
    return EventLog(logger)


class _EventFormatter(logging.Formatter):
    def __init__(self, *, is_json: bool) -> None:
        super().__init__()
        self._render = format_json if is_json else format_text

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = dict(getattr(record, "fields", {}))
        if record.name != LOGGER_NAME:
            fields["logger"] = record.name
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        when = datetime.fromtimestamp(record.created, UTC)
        return self._render(when, record.levelname.lower(), record.getMessage(), fields)


def _text_value(value: object) -> str:
    text = str(value)
    if text and text.isprintable() and not any(c in ' "=' for c in text):
        return text
    return json.dumps(text)


def _one_line(text: str) -> str:
    """Escape line breaks: inside an event they would let a client forge log lines."""
    return text if text.isprintable() else json.dumps(text)


class MembershipOverError(RuntimeError):
    """Another process is the member, or has its address, or the versions differ. The text says what
    to do.
    """


class NodeRemovedError(MembershipOverError):
    """An operator has removed the node: its work is done."""


def event_of(error: Exception) -> str:
    """Return what the log calls the end of a server by this error."""
    return "removed from the cluster" if isinstance(error, NodeRemovedError) else "server failed"
