"""The kind `arrays`: look-ups into large arrays and changes of them, many at a time.

Each client has an array of its own, so it knows what every answer has to be; all of them read one
that does not change. Others send what a server must refuse: broken documents, thousands of levels,
long lists of features, small requests that write much. Meanwhile the probe is answered.
"""

from __future__ import annotations

import json
import random
import struct
import threading
import time
from pathlib import Path
from typing import Final

from dcp.wire.frame import Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient
from tests.soak.attack.case import AttackedServer, AttackError, Case, Fault
from tests.soak.attack.probe import Watched
from vbucket.model.ids import vbucket_of

MIB: Final = 1 << 20
CASES_PER_SERVER: Final = 8
OPERATIONS: Final = 16
SHAPES: Final = (b"1,", b'{"id":7},', b"[],", b'"abcdefgh",', b" 1.5e3 ,\n", b'{"a":[1,{"b":2}]},')
COMMON: Final = b"common"
_DONE: Final = frozenset({Status.OK, Status.SUBDOC_MULTI_PATH_FAILURE})


class Arrays:
    """A server with the settings of production, which the cases of a few seeds share."""

    def __init__(self, folder: Path, _draw: random.Random) -> None:
        self.server = AttackedServer(folder / "data")
        self.server.start()

    def close(self) -> None:
        self.server.close()


class Worker(threading.Thread):
    """Works on one connection until a time; `failure` says what was wrong."""

    def __init__(self, port: int, draw: random.Random, until_s: float, size: int) -> None:
        super().__init__(daemon=True)
        self.failure = ""
        self.done = 0
        self.port, self.draw, self.size, self.until_s = port, draw, size, until_s

    def run(self) -> None:
        try:
            with RawClient(self.port) as client:
                while time.monotonic() < self.until_s or not self.done:
                    self.work(client)
                    self.done += 1
                self.finish(client)
        except (AssertionError, OSError, AttackError) as error:
            self.failure = f"{type(self).__name__}: {error!r}"[:500]

    def work(self, client: RawClient) -> None:
        """Send some requests, and hold the answers against what they have to be."""
        raise NotImplementedError

    def finish(self, client: RawClient) -> None:
        """Check what is stored in the end."""


class Reader(Worker):
    """Looks up elements of the array that all read, from the front and the back."""

    def work(self, client: RawClient) -> None:
        count = array_items(self.size)
        places = [self.draw.randrange(count) for _ in range(OPERATIONS - 2)]
        paths = [b"[%d]" % place for place in places] + [b"[-1]", b"[%d]" % count]
        answer = ask(client, Opcode.SUBDOC_MULTI_LOOKUP, COMMON, lookups(paths))
        if answer.status == Status.ETMPFAIL:
            return
        wanted = b"".join(struct.pack(">HI", 0, 1) + b"1" for _ in places)
        wanted += struct.pack(">HI", 0, 1) + b"2"
        wanted += struct.pack(">HI", Status.SUBDOC_PATH_ENOENT, 0)
        assert answer.value == wanted, answer.value[:200]


class Changer(Worker):
    """Changes an array of its own, in all ways, and keeps a list of what it has to be."""

    def __init__(self, port: int, draw: random.Random, until_s: float, size: int) -> None:
        super().__init__(port, draw, until_s, size)
        self.key = b"own %d" % draw.getrandbits(40)
        self.model: list[object] = []
        self.number = 1_000

    def work(self, client: RawClient) -> None:
        if not self.model:
            shape = self.draw.choice(SHAPES[:1] + SHAPES[3:5])
            text = b"[" + shape * (self.size // len(shape)) + shape.strip(b" ,\n") + b"]"
            assert put(client, self.key, text).status == 0
            self.model = json.loads(text)
        model, specs = list(self.model), []
        for _ in range(self.draw.randint(1, OPERATIONS)):
            self.number += 1
            value, place = b"%d" % self.number, self.draw.randrange(len(model))
            match self.draw.randrange(5):
                case 0 | 1:
                    specs.append((Opcode.SUBDOC_ARRAY_ADD_UNIQUE, b"", value))
                    model.append(self.number)
                case 2:
                    specs.append((Opcode.SUBDOC_ARRAY_PUSH_FIRST, b"", value))
                    model.insert(0, self.number)
                case 3:
                    specs.append((Opcode.SUBDOC_ARRAY_INSERT, b"[%d]" % place, value))
                    model.insert(place, self.number)
                case _:
                    specs.append((Opcode.SUBDOC_DELETE, b"[%d]" % place, b""))
                    del model[place]
        answer = ask(client, Opcode.SUBDOC_MULTI_MUTATION, self.key, mutations(specs))
        if answer.status == Status.OK:
            self.model = model
        else:
            assert answer.status == Status.ETMPFAIL, answer

    def finish(self, client: RawClient) -> None:
        stored = json.loads(ask(client, Opcode.GET, self.key).value)
        assert stored == self.model, f"{len(stored)} elements, not {len(self.model)}, or others"


class Burdener(Worker):
    """Sends what costs a server much if it does not look at the length first."""

    def work(self, client: RawClient) -> None:
        key = b"burden %d" % self.draw.randrange(3)
        match self.draw.randrange(5):
            case 0:
                answer = ask(client, Opcode.HELLO, b"", b"\0\x0b" * (self.size // 2))
                assert answer.status == Status.EINVAL, answer
            case 1:
                text = b"[" * self.size
                assert put(client, key, text).status == 0
                answer = ask(client, Opcode.SUBDOC_MULTI_LOOKUP, key, lookups([b"[0]"]))
                assert answer.value == struct.pack(">HI", Status.SUBDOC_DOC_E2DEEP, 0), answer
            case 2:
                text = b"[" + self.draw.choice(SHAPES) * (self.size // 9) + b"}"
                assert put(client, key, text).status == 0
                answer = ask(client, Opcode.SUBDOC_MULTI_LOOKUP, key, lookups([b"[0]"]))
                assert answer.status in _DONE, answer
            case 3:
                assert put(client, key, bytes(self.size)).status == 0
                one = request(Opcode.APPEND, key, b"x")
                client.send(one * 20)
                for _ in range(20):
                    frame = client.receive()
                    assert frame is not None, "the server closed"
                    assert frame.status in {0, Status.ETMPFAIL}, frame
            case _:
                value = b"[" + self.draw.choice(SHAPES) * (self.size // 9) + b"1]"
                assert put(client, key, b"{}").status == 0
                specs = [(Opcode.SUBDOC_DICT_UPSERT, b"a", value)]
                answer = ask(client, Opcode.SUBDOC_MULTI_MUTATION, key, mutations(specs))
                assert answer.status in {0, Status.ETMPFAIL}, answer


def request(opcode: int, key: bytes, value: bytes = b"", extras: bytes = b"") -> bytes:
    return pack_request(opcode, vb_id=vbucket_of(key), key=key, value=value, extras=extras)


def ask(
    client: RawClient, opcode: int, key: bytes, value: bytes = b"", extras: bytes = b""
) -> Frame:
    client.send(request(opcode, key, value, extras))
    frame = client.receive()
    if frame is None:
        raise AttackError(Fault.BROKEN, "the server closed")
    return frame


def put(client: RawClient, key: bytes, value: bytes) -> Frame:
    """SET; try again while the store is behind."""
    while True:
        frame = ask(client, Opcode.SET, key, value, bytes(8))
        if frame.status != Status.ETMPFAIL:
            return frame
        time.sleep(0.05)


def lookups(paths: list[bytes]) -> bytes:
    return b"".join(struct.pack(">BBH", Opcode.SUBDOC_GET, 0, len(path)) + path for path in paths)


def mutations(specs: list[tuple[Opcode, bytes, bytes]]) -> bytes:
    return b"".join(
        struct.pack(">BBHI", opcode, 0, len(path), len(value)) + path + value
        for opcode, path, value in specs
    )


def array_items(size: int) -> int:
    return size // 2


def run(case: Case) -> None:
    """Run a case."""
    server = case.share("arrays", CASES_PER_SERVER, Arrays).server
    size = MIB if case.is_short else case.draw.choice((2, 5, 10)) * MIB
    with RawClient(server.port) as client:
        text = b"[" + b"1," * (array_items(size) - 1) + b"2]"
        if put(client, COMMON, text).status:
            raise AttackError(Fault.BROKEN, "a SET was refused")
    case.watch(Watched(server.port, server.admin_port))
    until_s = time.monotonic() + case.seconds(1.0, 6.0)
    workers = [
        kind(server.port, random.Random(case.draw.random()), until_s, size)
        for kind in (Reader, Reader, Changer, Changer, Burdener)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    case.note(f"arrays of {size // MIB} MiB, {sum(worker.done for worker in workers)} rounds")
    case.rest()
    server.check(case)
    for worker in workers:
        case.demand(not worker.failure, Fault.WRONG, worker.failure)
