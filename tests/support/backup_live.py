"""dcpctl backup against a live server: how to call it, and documents of a server."""

from __future__ import annotations

import json
import struct

from clients.address import parse_address
from clients.link.blocking_link import SyncLink
from dcp.wire.frame import HEADER
from dcp.wire.opcode import Opcode
from vbucket.model.ids import vbucket_of

META = struct.Struct(">IIIQB")


def lines(out):
    return [json.loads(line) for line in out.splitlines()]


def backup(ctl, server, archive, *options):
    code, out, err = ctl(server, "backup", "run", "--archive", archive, "-o", "json", *options)
    assert code == 0, err
    return lines(out)[0]


def restore(ctl, to, archive, *options, code=0):
    found, out, err = ctl(to, "backup", "restore", "--archive", archive, "-o", "json", *options)
    assert found == code, err
    return lines(out)[0]


class Keys:
    """Documents of one server, with their metadata."""

    def __init__(self, server):
        self.link = SyncLink(parse_address(server.address))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.link.close()

    def set(self, key, value, *, flags=0, expiry=0):
        extras = struct.pack(">II", flags, expiry)
        frame = self.link.request(
            Opcode.SET, vb_id=vbucket_of(key), key=b"\0" + key, value=value, extras=extras
        )
        assert frame.status == 0
        return frame.cas

    def delete(self, key):
        vb_id = vbucket_of(key)
        assert self.link.request(Opcode.DELETE, vb_id=vb_id, key=b"\0" + key).status == 0

    def meta(self, key):
        """Deleted, flags, expiry, revision, datatype, CAS."""
        frame = self.link.request(
            Opcode.GET_META, vb_id=vbucket_of(key), key=b"\0" + key, extras=b"\2"
        )
        return (*META.unpack(frame.extras), frame.cas) if not frame.status else None

    def get(self, key):
        frame = self.link.request(Opcode.GET, vb_id=vbucket_of(key), key=b"\0" + key)
        return frame.value if not frame.status else None


def fill(server, prefix, count, size=100, first=0):
    """Write documents in one batch."""
    packets = []
    for number in range(first, first + count):
        key = b"\0%s%d" % (prefix, number)
        value = b"%d:" % number + bytes(size)
        head = HEADER.pack(
            0x80, Opcode.SETQ, len(key), 8, 0, vbucket_of(key[1:]), 8 + len(key) + len(value), 0, 0
        )
        packets.append(head + bytes(8) + key + value)
    with Keys(server) as keys:
        keys.link._write(b"".join(packets))
        assert keys.link.request(Opcode.NOOP).status == 0


def export(ctl, server, archive, *options):
    code, out, err = ctl(
        server, "backup", "export", "--archive", archive, "--to", "-", "--format", "jsonl", *options
    )
    assert code == 0, err
    return {document["key"]: document for document in lines(out)}


def seconds(time_ns):
    return f"{time_ns // 10**9}.{time_ns % 10**9:09}"


def high_seqnos(server):
    with Keys(server) as keys:
        frame = keys.link.request(Opcode.GET_ALL_VB_SEQNOS)
    return dict(struct.iter_unpack(">HQ", frame.value))


def high_seqno(server, vb_id):
    return high_seqnos(server)[vb_id]


def ends_of(record):
    return {vb_id: legs[-1].to_seqno for vb_id, legs in record.legs.items()}
