"""The kind `cas`: absurd numbers wherever a client may send one.

CAS and revisions by SET_WITH_META, DEL_WITH_META and X_PUT_FRAMES; seqnos and versions in stream
requests; expiries; mixed with the requests of ordinary clients. Each is stored or refused. A CAS
further ahead of the clock than `cas_drift_max` is refused, or replaced if the option FIT_META asks
for it. Afterwards, in every partition:

- no document has a CAS beyond that bound;
- normal writes work, and their CAS rises and stays within the bound;
- both are still true after a kill;
- a backup, restored into a fresh server, gives every document.
"""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path
from typing import Final

from dcp.server.config.settings import Settings
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.message import (
    FIT_META,
    PUT_FRAMES_REQUEST,
    U32,
    StreamRequest,
    pack_open,
    pack_stream_request,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient
from support.stored_bytes import pack_deletion, pack_mutation
from tests.soak.attack.case import AttackedServer, Case, Fault
from tests.soak.attack.commands import dcpctl
from tests.soak.attack.probe import Watched
from tests.soak.attack.streams import PRODUCER
from tests.soak.attack.truth import get_all, keys_in, receive, some_of, words_of
from vbucket.model.entry import PREFIX_BYTES
from vbucket.model.ids import NUM_VBUCKETS, vbucket_of

CASES_PER_SERVER: Final = 6
PARTITIONS: Final = 6
YEAR_NS: Final = 365 * 86400 * 10**9
DRIFT_NS: Final = int(Settings().cas_drift_max_s * 1e9)
SLACK_NS: Final = 10**9
"""Between the server's reading of the clock and ours; changes at the limit add 1 ns each."""
SKIP: Final = 0x01
"""No conflict resolution."""
REGENERATE_CAS: Final = 0x04
META: Final = struct.Struct(">IIQQ")
UNKNOWN: Final = 0xA4
"""ADD_WITH_META, which this server does not have."""
ANSWER_S: Final = 10.0


class CasServer:
    """A server, and the newest CAS that each partition has answered."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.server = AttackedServer(folder / "data", "--memtable-bytes", "1MiB")
        self.vb_ids = draw.sample(range(NUM_VBUCKETS), PARTITIONS)
        self.keys = keys_in(self.vb_ids, 40, b"doc")
        self.cas: dict[int, int] = {}
        self.number = 0
        self.server.start()  # last: after an interrupt, nobody else would close it

    def close(self) -> None:
        self.server.close()


def absurd(draw: random.Random) -> int:
    """Draw a CAS, revision or seqno."""
    now = time.time_ns()
    return draw.choice(
        (0, 1, 2, now, now + 10**9, now + 3600 * 10**9, now + YEAR_NS, now + 50 * YEAR_NS,
         2**48 - 2, 2**48 - 1, 2**48, 2**62, 2**63 - 65536, 2**63 - 2, 2**63 - 1, 2**63,
         2**64 - 65536, 2**64 - 2, 2**64 - 1, draw.getrandbits(64), draw.getrandbits(48))
    )  # fmt: skip


def expiry(draw: random.Random) -> int:
    now = int(time.time())
    return draw.choice((0, 0, 0, 1, 30 * 86400, 30 * 86400 + 1, now - 5, now + 9, 2**31, 2**32 - 1))


def cas_limit() -> int:
    """Return the highest CAS that a server accepts or assigns now."""
    return time.time_ns() + DRIFT_NS + SLACK_NS


def with_meta(draw: random.Random, key: bytes) -> tuple[bytes, bool]:
    """Return a SET_WITH_META or DEL_WITH_META, mostly well-formed, and whether its CAS is too high
    to be stored.
    """
    opcode = draw.choice((Opcode.SET_WITH_META,) * 4 + (Opcode.DEL_WITH_META, UNKNOWN))
    rev = draw.choice((1, 2, 3, 1000, absurd(draw)))
    own_cas = absurd(draw)
    extras = META.pack(draw.getrandbits(32), expiry(draw), rev, own_cas)
    options = draw.choice((None, 0, SKIP, SKIP, SKIP | REGENERATE_CAS, 0x10, 0xFFFF_FFFF))
    if options is not None:
        extras += U32.pack(options)
    if draw.random() < 0.1:
        extras += struct.pack(">H", draw.choice((0, 3, 65535)))
    value = b"" if opcode == Opcode.DEL_WITH_META else b"meta-%d" % draw.getrandbits(30)
    cas = absurd(draw) if draw.random() < 0.1 else 0
    vb_id = vbucket_of(key)
    packet = pack_request(opcode, key=key, value=value, extras=extras, vb_id=vb_id, cas=cas)
    return packet, own_cas > cas_limit() and not (options or 0) & (FIT_META | REGENERATE_CAS)


def put_frames(draw: random.Random, keys: list[bytes]) -> bytes:
    """Return an X_PUT_FRAMES of some changes of one partition."""
    vb_id = vbucket_of(draw.choice(keys))
    frames = []
    for key in draw.sample(keys, min(len(keys), 8)):
        if vbucket_of(key) != vb_id:
            continue
        common = {"vb_id": vb_id, "key": b"\0" + key, "cas": absurd(draw), "seqno": absurd(draw)}
        rev = draw.choice((1, 2, 1000, 2**48 - 1, absurd(draw)))
        if draw.random() < 0.2:
            entry = pack_deletion(**common, rev_seqno=rev)
        else:
            value = b"put-%d" % draw.getrandbits(30)
            entry = pack_mutation(**common, value=value, rev_seqno=rev, expiry=expiry(draw))
        frames.append(entry[PREFIX_BYTES:])
    sizes = b"".join(U32.pack(len(frame) - 24) for frame in frames)
    count = len(frames) if draw.random() < 0.95 else 2**32 - 1
    extras = PUT_FRAMES_REQUEST.pack(draw.choice((0, SKIP, FIT_META, SKIP | FIT_META)), count)
    return pack_request(
        Opcode.X_PUT_FRAMES, extras=extras, value=sizes + b"".join(frames), vb_id=vb_id
    )


def ordinary(draw: random.Random, key: bytes) -> bytes:
    """Return an ordinary request, now and then with an absurd number."""
    vb_id = vbucket_of(key)
    what = draw.randrange(5)
    if what == 0:
        extras = struct.pack(">QQI", absurd(draw), absurd(draw), expiry(draw))
        return pack_request(Opcode.INCREMENT, key=b"n" + key, extras=extras, vb_id=vb_id)
    if what == 1:
        return pack_request(
            Opcode.TOUCH, key=key, extras=struct.pack(">I", expiry(draw)), vb_id=vb_id
        )
    if what == 2:
        value = U64_2.pack(absurd(draw) & 0xFFFF_FFFF_FFFF_FFFF)
        return pack_request(Opcode.OBSERVE_SEQNO, value=value, vb_id=vb_id)
    extras = struct.pack(">II", draw.getrandbits(32), expiry(draw))
    cas = absurd(draw) if draw.random() < 0.2 else 0
    opcode = draw.choice((Opcode.SET, Opcode.ADD, Opcode.REPLACE))
    value = b"set-%d" % draw.getrandbits(30)
    return pack_request(opcode, key=key, value=value, extras=extras, vb_id=vb_id, cas=cas)


U64_2: Final = struct.Struct(">Q")


def send_absurd(case: Case, shared: CasServer) -> None:
    """Send absurd requests; each must be answered."""
    draw, port = case.draw, shared.server.port
    stored = refused = 0
    collections = (Feature.XERROR, Feature.COLLECTIONS, Feature.X_PUT_FRAMES, Feature.X_FIT_META)
    with RawClient(port) as plain, RawClient(port) as frames:
        hello = b"".join(int(feature).to_bytes(2, "big") for feature in collections)
        case.demand(frames.ask(Opcode.HELLO, value=hello).value == hello, Fault.BROKEN, "HELLO")
        for _ in range(30 if case.is_short else draw.randint(50, 250)):
            key = draw.choice(shared.keys)
            what = draw.random()
            client = frames if what < 0.25 else plain
            is_too_high = False
            if what < 0.25:
                packet = put_frames(draw, shared.keys)
            elif what < 0.7:
                packet, is_too_high = with_meta(draw, key)
            else:
                packet = ordinary(draw, key)
            client.send(packet)
            frame = receive(client)
            if is_too_high and not frame.status:
                case.find(Fault.WRONG, f"a CAS beyond cas_drift_max was stored: {packet.hex()}")
            refused += bool(frame.status)
            stored += not frame.status
    case.note(f"{stored} taken, {refused} refused")


def ask_absurd_streams(case: Case, shared: CasServer) -> None:
    """Send stream requests with absurd numbers: they are answered, and so is the next request."""
    draw = case.draw
    with RawClient(shared.server.port) as client:
        assert not client.ask(Opcode.SELECT_BUCKET, key=b"default").status
        client.send(pack_open(b"absurd-%d" % draw.getrandbits(40), PRODUCER))
        assert not receive(client).status
        for number in range(20):
            start = absurd(draw)
            begin, end = draw.choice(((start, start), (absurd(draw), absurd(draw))))
            flags = draw.choice((0, 0, 1, 4, 0x20, 0x80, 0xFFFF_FFFF))
            wanted = StreamRequest(flags, start, absurd(draw), absurd(draw), begin, end)
            vb_id = draw.choice((*shared.vb_ids, 1023, 1024, 65535))
            client.send(pack_stream_request(vb_id, wanted, opaque=number))
            give_up_at_s = time.monotonic() + ANSWER_S
            while (frame := receive(client)).opcode != Opcode.DCP_STREAM_REQ:
                late = time.monotonic() > give_up_at_s
                case.demand(not late, Fault.BROKEN, f"{wanted} was not answered")
            if not frame.status:
                client.send(pack_request(Opcode.DCP_CLOSE_STREAM, vb_id=vb_id, opaque=99))


def check_writes(case: Case, shared: CasServer) -> None:
    """In every partition normal writes must work, and their CAS must rise within the limit."""
    with RawClient(shared.server.port) as client:
        for vb_id in shared.vb_ids:
            for key in keys_in([vb_id], 3, b"after"):
                shared.number += 1
                frame = client.ask(
                    Opcode.SET, key=key, value=b"%d" % shared.number, extras=bytes(8), vb_id=vb_id
                )
                where = f"vb {vb_id}: a normal SET"
                case.demand(not frame.status, Fault.BROKEN, f"{where} was {words_of(frame)}")
                before = shared.cas.get(vb_id, 0)
                text = f"{where} got CAS {frame.cas} after {before}"
                case.demand(frame.cas > before, Fault.WRONG, text)
                text = f"{where} got CAS {frame.cas}, which is too far ahead of the clock"
                case.demand(frame.cas <= cas_limit(), Fault.WRONG, text)
                shared.cas[vb_id] = frame.cas
                back = client.ask(Opcode.GET, key=key, vb_id=vb_id)
                is_right = (back.value, back.cas) == (b"%d" % shared.number, frame.cas)
                case.demand(is_right, Fault.WRONG, f"{where} was read back as {back}")


def documents(shared: CasServer, port: int) -> dict[bytes, tuple[bytes, int, bytes]]:
    """Return value, CAS and flags of all documents."""
    keys = [*shared.keys, *(b"n" + key for key in shared.keys)]
    keys += [key for vb_id in shared.vb_ids for key in keys_in([vb_id], 3, b"after")]
    with RawClient(port) as client:
        frames = get_all(client, keys)
    found = {}
    for key, frame in frames.items():
        if frame.status == Status.OK:
            found[key] = (frame.value, frame.cas, frame.extras)
        elif frame.status != Status.KEY_ENOENT:
            found[key] = (words_of(frame).encode(), 0, b"")
    return found


def check_restore(case: Case, shared: CasServer) -> None:
    """Check that a restore into a fresh server has every document."""
    before = documents(shared, shared.server.port)
    high = [f"{key!r} has CAS {item[1]}" for key, item in before.items() if item[1] > cas_limit()]
    case.demand(not high, Fault.WRONG, f"too far ahead of the clock: {high[:3]}")
    archive = case.folder / "archive"
    at = ("--server", shared.server.address, "backup", "run", "--archive", archive)
    dcpctl(*at).check()
    fresh = AttackedServer(case.folder / "fresh")
    fresh.start()
    try:
        at = ("--server", fresh.address, "backup", "restore", "--archive", archive, "-o", "json")
        told = dcpctl(*at)
        text = f"the restore ended with {told.code}: {told.text[-600:]}"
        case.demand(not told.code, Fault.WRONG, text)
        found = documents(shared, fresh.port)
        # Documents that expire meanwhile do not count.
        after = documents(shared, shared.server.port)
        wanted = {key: item for key, item in before.items() if after.get(key) == item}
        other = sorted(key for key, item in wanted.items() if found.get(key) != item)
        example = f"{wanted.get(other[0])} became {found.get(other[0])}" if other else ""
        text = f"not restored as they were: {some_of(other)}: {example}"
        case.demand(not other, Fault.WRONG, text)
        fresh.check(case)
    finally:
        fresh.close()


def run(case: Case) -> None:
    shared = case.share("cas", CASES_PER_SERVER, CasServer)
    server = shared.server
    case.watch(Watched(server.port, server.admin_port))
    send_absurd(case, shared)
    ask_absurd_streams(case, shared)
    check_writes(case, shared)
    case.rest()
    if case.draw.random() < 0.5:
        kept = documents(shared, server.port)
        server.restart_after_kill()
        case.note("killed")
        found = documents(shared, server.port)
        lost = sorted(key for key, item in kept.items() if found.get(key) not in {item, None})
        case.demand(not lost, Fault.WRONG, f"other after a kill: {some_of(lost)}")
        check_writes(case, shared)
    check_restore(case, shared)
    server.check(case)
