"""Tells who started the server that it is ready: in words, and for programs as one line of JSON.

    dcpd --print json        the line goes to stdout instead of the words
    dcpd --ready-fd 3        the line goes to that file descriptor, which is closed afterwards

    {"v": 1, "event": "ready", "version": ..., "pid": ..., "data": ..., "durability": ...,
     "host": ..., "kv_port": ..., "admin_port": ..., "kv_tls_port": ..., "admin_tls_port": ...}

A port of 0 means that there is none. If the server does not start, there is no line, and the
descriptor is closed with the process: its reader sees the end of the file.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Final, NamedTuple

FORMAT_VERSION: Final = 1
_STDERR: Final = 2


class Ready(NamedTuple):
    """What a program wants to know of a server that is ready."""

    version: str
    pid: int
    data: str
    durability: str
    host: str
    kv_port: int
    admin_port: int
    kv_tls_port: int
    admin_tls_port: int

    def line(self) -> str:
        """Return the line."""
        return json.dumps({"v": FORMAT_VERSION, "event": "ready", **self._asdict()})


class Announcement(NamedTuple):
    """Where the server says that it is ready."""

    prints_json: bool = False
    ready_fd: int | None = None

    def problem(self) -> str:
        """Return why the descriptor cannot be used, "" if it can. Child processes do not get it:
        its reader waits until all copies are closed.
        """
        if self.ready_fd is None:
            return ""
        try:
            if self.ready_fd > _STDERR:
                os.set_inheritable(self.ready_fd, False)
            else:
                os.fstat(self.ready_fd)
        except OSError as error:
            return (
                f"--ready-fd {self.ready_fd}: {error.strerror}. The process that starts dcpd opens"
                " it, for example: dcpd --ready-fd 3 3> ready"
            )
        return ""

    def tell(self, ready: Ready, words: str) -> None:
        """Say it. A reader that is gone does not stop the server."""
        line = ready.line()
        with contextlib.suppress(OSError):
            print(line if self.prints_json else words, flush=True)
        if self.ready_fd is None:
            return
        with contextlib.suppress(OSError):
            os.write(self.ready_fd, f"{line}\n".encode())
            if self.ready_fd > _STDERR:
                os.close(self.ready_fd)


IN_WORDS: Final = Announcement()
"""Words on stdout only."""
