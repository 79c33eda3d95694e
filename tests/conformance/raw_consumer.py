"""A small consumer of DCP over a plain socket, with mistakes to choose from: for the kit's tests.

    HOST=... PORT=... STATE_DIR=... python raw_consumer.py [MISTAKE | oso | history]

It follows few partitions, keeps all in one JSON file, and tells an event on each line. Without a
mistake it passes every scenario of one node.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from struct import Struct
from typing import Any

PARTITIONS = (92, 93, 700, *range(100, 160), *range(200, 220), *range(300, 340))
MISTAKES = {
    "ignores-rollback": "it asks on from where it was after ROLLBACK",
    "keeps-undone": "it goes back in the stream, and keeps what was undone",
    "skips-new-history": "it takes no seqno twice, also after ROLLBACK",
    "saves-inside-snapshot": "it saves every position as a snapshot of its own",
    "ignores-deletions": "it takes mutations only",
    "keeps-on-restart": "it begins at 0 again with what it has",
    "no-noop": "it leaves NOOPs unanswered",
    "no-ack": "it asks for a window and never acknowledges",
    "no-return": "it takes STREAM_END for the end",
    "gives-up": "it ends at a temporary failure",
    "rounds": "its seqnos are doubles",
    "resumes-inside-oso": "it saves positions inside an out-of-order snapshot",
    "skips-repeats": "it takes each key once in a snapshot of history",
    "splits": "it takes what comes at once for whole packets",
    "silent": "it does nothing",
    "floods": "it writes without end",
}
OSO_MODES = {"oso", "resumes-inside-oso"}
"""It asks for out-of-order snapshots; "oso" is no mistake."""
HISTORY_MODES = {"history", "skips-repeats"}
"""It asks for history streams; "history" is no mistake."""
REQUEST = Struct(">IIQQQQQ")
HEADER = Struct(">BBHBBHIIQ")
SASL_AUTH, SELECT, HELLO = 0x21, 0x89, 0x1F
OPEN, STREAM, END, MARKER, MUTATION, DELETION, EXPIRATION, NOOP, ACK, CONTROL, OSO = (
    0x50, 0x53, 0x55, 0x56, 0x57, 0x58, 0x59, 0x5C, 0x5D, 0x5E, 0x65,
)  # fmt: skip
COLLECTIONS = 0x12
ROLLBACK, ERANGE, WINDOW = 0x23, 0x22, 1 << 20


class LostError(Exception):
    """The connection is gone."""


class RawConsumer:
    """See the module."""

    def __init__(self, mistake: str, state: Path) -> None:
        self.mistake = mistake
        self.path = state / "state.json"
        saved = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.places: dict[int, dict[str, Any]] = {
            vb_id: saved.get(str(vb_id), {"log": [], "snap": [0, 0], "events": [], "seqno": 0})
            for vb_id in PARTITIONS
        }
        self.highest: dict[int, int] = {}
        self.data = b""
        self.counted = 0
        self.due: dict[int, float] = {}
        self.out_of_order: dict[int, int] = {}
        """Partition -> the highest seqno of an out-of-order snapshot that is not complete."""
        self.in_snapshot: dict[int, set[str]] = {}

    def run(self) -> None:
        """Follow, and come back after every loss of the connection."""
        while True:
            try:
                self.connect()
                while True:
                    self.take(*self.packet())
            except (OSError, LostError):
                time.sleep(0.05)

    def connect(self) -> None:
        self.socket = socket.create_connection((os.environ["HOST"], int(os.environ["PORT"])), 5)
        self.socket.settimeout(0.05)
        self.data, self.counted = b"", 0
        self.out_of_order.clear()
        if self.mistake in OSO_MODES:
            self.send(HELLO, key=b"raw", value=COLLECTIONS.to_bytes(2, "big"))
        self.send(SASL_AUTH, key=b"PLAIN", value=b"\0guest\0guest")
        self.send(SELECT, key=b"default")
        self.send(OPEN, key=b"raw-%d" % os.getpid(), extras=Struct(">II").pack(0, 1))
        self.send(CONTROL, key=b"connection_buffer_size", value=b"%d" % WINDOW)
        self.send(CONTROL, key=b"enable_noop", value=b"true")
        if self.mistake in OSO_MODES:
            self.send(CONTROL, key=b"enable_out_of_order_snapshots", value=b"true")
        if self.mistake in HISTORY_MODES:
            self.send(CONTROL, key=b"change_streams", value=b"true")
        self.due = dict.fromkeys(PARTITIONS, 0.0)

    def send(
        self, opcode: int, vb_id: int = 0, *, magic: int = 0x80, opaque: int = 0,
        extras: bytes = b"", key: bytes = b"", value: bytes = b"",
    ) -> None:  # fmt: skip
        body = extras + key + value
        header = HEADER.pack(
            magic, opcode, len(key), len(extras), 0, vb_id, len(body), opaque, 0
        )  # fmt: skip
        self.socket.settimeout(5)
        self.socket.sendall(header + body)
        self.socket.settimeout(0.05)

    def packet(self) -> tuple[int, int, int, int, bytes, bytes, bytes]:
        """Return the next packet; requests that are due are sent meanwhile."""
        while len(self.data) < 24 or len(self.data) < 24 + HEADER.unpack_from(self.data)[6]:
            self.ask_what_is_due()
            try:
                more = self.socket.recv(1 << 16)
            except TimeoutError:
                continue
            if not more:
                raise LostError
            if self.mistake == "splits":
                self.data = more
                assert len(more) >= 24 + HEADER.unpack_from(more)[6]
            else:
                self.data += more
        magic, opcode, keys, extras, _, field, body, opaque, _ = HEADER.unpack_from(self.data)
        at = 24 + extras
        found = (
            magic, opcode, field, opaque, self.data[24:at], self.data[at : at + keys],
            self.data[at + keys : 24 + body],
        )  # fmt: skip
        self.data = self.data[24 + body :]
        if magic == 0x80 and opcode in {MARKER, MUTATION, DELETION, EXPIRATION, END}:
            self.counted += 24 + body
            if self.counted > WINDOW // 2 and self.mistake != "no-ack":
                self.send(ACK, extras=self.counted.to_bytes(4, "big"))
                self.counted = 0
        return found

    def ask_what_is_due(self) -> None:
        now_s = time.monotonic()
        for vb_id, at_s in tuple(self.due.items()):
            if at_s <= now_s:
                del self.due[vb_id]
                place = self.places[vb_id]
                snap_start, snap_end = place["snap"]
                uuid = place["log"][0][0] if place["log"] and place["seqno"] else 0
                extras = REQUEST.pack(
                    0, 0, place["seqno"], 2**64 - 1, uuid, min(snap_start, place["seqno"]),
                    max(snap_end, place["seqno"]),
                )  # fmt: skip
                only = b'{"collections": ["0"]}' if self.mistake in OSO_MODES else b""
                self.send(STREAM, vb_id, opaque=vb_id + 1, extras=extras, value=only)

    def take(
        self, magic: int, opcode: int, field: int, opaque: int, extras: bytes, key: bytes,
        value: bytes,
    ) -> None:  # fmt: skip
        if magic == 0x80 and opcode == NOOP and self.mistake != "no-noop":
            self.send(NOOP, magic=0x81, opaque=opaque)
        elif magic == 0x81 and opcode == STREAM:
            self.answered(opaque - 1, field, value)
        elif magic == 0x80 and opcode == END and self.mistake != "no-return":
            self.due[field] = time.monotonic()
        elif magic == 0x80 and opcode == MARKER:
            self.places[field]["snap"] = [self.seqno(extras[:8]), self.seqno(extras[8:16])]
            self.in_snapshot[field] = set()
        elif magic == 0x80 and opcode == OSO:
            self.take_out_of_order(field, int.from_bytes(extras, "big"))
        elif magic == 0x80 and opcode in {MUTATION, DELETION, EXPIRATION}:
            text = value.decode() if opcode == MUTATION else None
            name = key[1:] if self.mistake in OSO_MODES else key  # it begins with the collection
            self.change(field, self.seqno(extras[:8]), name.decode(), text)

    def take_out_of_order(self, vb_id: int, flags: int) -> None:
        """The position stays before such a snapshot until it is complete."""
        if flags == 1:
            self.out_of_order[vb_id] = 0
            return
        seqno = self.out_of_order.pop(vb_id)
        place = self.places[vb_id]
        place["seqno"], place["snap"] = seqno, [seqno, seqno]
        self.save()

    def seqno(self, raw: bytes) -> int:
        seqno = int.from_bytes(raw, "big")
        return int(float(seqno)) if self.mistake == "rounds" else seqno

    def answered(self, vb_id: int, status: int, value: bytes) -> None:
        place = self.places[vb_id]
        if status == 0:
            log = [list(pair) for pair in Struct(">QQ").iter_unpack(value)]
            place["log"] = log
            self.save()
            return
        if self.mistake == "gives-up":
            sys.exit("a stream request was refused")
        if status == ROLLBACK and self.mistake != "ignores-rollback":
            self.go_back(vb_id, int.from_bytes(value[:8], "big"))
        elif status == ERANGE:
            self.go_back(vb_id, 0)
        self.due[vb_id] = time.monotonic() + (0.0 if status == ROLLBACK else 0.1)

    def go_back(self, vb_id: int, seqno: int) -> None:
        """Go to the newest complete state at or below a seqno."""
        place = self.places[vb_id]
        self.highest[vb_id] = max(self.highest.get(vb_id, 0), place["seqno"])
        if self.mistake != "keeps-undone" and (seqno or self.mistake != "keeps-on-restart"):
            place["events"] = [each for each in place["events"] if each[0] <= seqno]
            self.tell({"op": "rollback", "vb": vb_id, "seqno": seqno})
        place["seqno"], place["snap"] = seqno, [seqno, seqno]
        self.save()

    def change(self, vb_id: int, seqno: int, key: str, value: str | None) -> None:
        place = self.places[vb_id]
        if vb_id in self.out_of_order:
            self.out_of_order[vb_id] = max(seqno, self.out_of_order[vb_id])
        if vb_id not in self.out_of_order or self.mistake == "resumes-inside-oso":
            place["seqno"] = seqno
        if self.mistake == "saves-inside-snapshot":
            place["snap"] = [seqno, seqno]
        skips = self.mistake == "skips-new-history" and seqno <= self.highest.get(vb_id, 0)
        if self.mistake == "skips-repeats":
            seen = self.in_snapshot.setdefault(vb_id, set())
            skips = key in seen
            seen.add(key)
        if not skips and (value is not None or self.mistake != "ignores-deletions"):
            place["events"].append([seqno, key, value])
            event = {"vb": vb_id, "seqno": seqno, "key": key}
            what = {"op": "delete"} if value is None else {"op": "set", "value": value}
            self.tell(what | event)
        self.save()

    def tell(self, event: dict[str, Any]) -> None:
        print(json.dumps(event), flush=True)

    def save(self) -> None:
        used = {vb_id: place for vb_id, place in self.places.items() if place["log"]}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({vb: {**place, "events": []} for vb, place in used.items()}))
        new.replace(self.path)


def main() -> None:
    mistake = sys.argv[1] if len(sys.argv) > 1 else ""
    if mistake == "silent":
        time.sleep(600)
    while mistake == "floods":
        print("x" * 10_000_000)
    RawConsumer(mistake, Path(os.environ["STATE_DIR"])).run()


if __name__ == "__main__":
    main()
