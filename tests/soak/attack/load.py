"""A writer in a thread: it sends batches of changes and records each answer.

It writes until it is stopped or the server is gone. A refusal (ETMPFAIL) is an answer: the writer
counts it and continues. It measures how long batches wait for their answers.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Final

from dcp.wire.status import Status
from support.raw_client import RawClient
from tests.soak.attack.case import AttackError
from tests.soak.attack.truth import Ledger, delete_packet, set_packet, value_of, words_of

BATCH: Final = 40
REFUSAL_PAUSE_S: Final = 0.02
DELETES_PART: Final = 0.1


class Load(threading.Thread):
    """See the module. While it runs, nobody else may use its `ledger`."""

    def __init__(
        self,
        port: int,
        ledger: Ledger,
        keys: list[bytes],
        draw: random.Random,
        *,
        value_bytes: int = 0,
    ) -> None:
        super().__init__(name="load", daemon=True)
        self.statuses: Counter[str] = Counter()
        self.refusals: set[str] = set()
        """The texts of refusals."""
        self.worst_s = 0.0
        """The longest wait of a batch."""
        self.failure: AttackError | None = None
        self.is_cut_off = False
        self._port, self._ledger, self._keys, self._draw = port, ledger, keys, draw
        self._value_bytes = value_bytes
        self._numbers: Counter[bytes] = Counter()
        self._began_s = 0.0
        self._is_over = threading.Event()
        self._client: RawClient | None = None

    def run(self) -> None:
        try:
            with RawClient(self._port) as self._client:
                while not self._is_over.is_set():
                    self._batch(self._client)
        except AttackError as error:
            self.failure = error
        except (OSError, AssertionError):
            self.is_cut_off = True
        self._ledger.cut_off()

    @property
    def standing_s(self) -> float:
        """How long the current batch has waited."""
        began_s = self._began_s
        return time.monotonic() - began_s if began_s else 0.0

    @property
    def is_refused(self) -> bool:
        return bool(self.statuses["ETMPFAIL"])

    def stop(self, wait_s: float = 15.0) -> None:
        """End after the current batch. A batch that waits longer is cut off, outcome unknown."""
        self._is_over.set()
        self.join(wait_s)
        if self.is_alive():
            self.cut()
            self.join(wait_s)
        if self.failure is not None:
            raise self.failure

    def cut(self) -> None:
        """Cut the connection."""
        self._is_over.set()
        if self._client is not None:
            self._client.hang_up()

    def _batch(self, client: RawClient) -> None:
        keys = self._draw.sample(self._keys, min(BATCH, len(self._keys)))
        packets = []
        for key in keys:
            if self._draw.random() < DELETES_PART:
                self._ledger.send(key, None)
                packets.append(delete_packet(key))
                continue
            self._numbers[key] += 1
            value = value_of(key, self._numbers[key])
            value += self._draw.randbytes(max(0, self._value_bytes - len(value)))
            self._ledger.send(key, value)
            packets.append(set_packet(key, value))
        self._began_s = time.monotonic()
        client.send(b"".join(packets))
        is_refused = False
        for key in keys:
            frame = client.receive()
            assert frame is not None, "the server has closed"
            self._ledger.answered(key, frame)
            self.worst_s = max(self.worst_s, self.standing_s)
            name = Status(frame.status).name
            self.statuses[name] += 1
            if frame.status and frame.status != Status.KEY_ENOENT:
                self.refusals.add(words_of(frame))
                is_refused = True
        self._began_s = 0.0
        if is_refused:
            self._is_over.wait(REFUSAL_PAUSE_S)
