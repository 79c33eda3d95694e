"""Discard files and loss receipts."""

from __future__ import annotations

import json
from pathlib import Path

import cramjam
import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.cli.dcpctl import run
from support.stored_bytes import pack_deletion, pack_mutation
from vbucket.model.datatype import SNAPPY
from vbucket.model.entry import pack_system_event
from vbucket.model.manifest import ManifestEvent, SystemEventKind, encode_leb128
from vbucket.model.receipt import (
    RECEIPT_KEYS_MAX,
    CutOff,
    DiscardDamagedError,
    ElectionLoss,
    changes_of,
    cut_off_receipt,
    election_receipt,
    pack_cut_off,
    unpack_cut_off,
)

UUID = 2**63 + 5
VERSIONS = ((UUID, 7), (3, 0))


def entries() -> tuple[bytes, ...]:
    packed = bytes(cramjam.snappy.compress_raw(b"long " * 20))
    return (
        pack_mutation(vb_id=9, key=b"\0one", value=b"{}", cas=1, seqno=8, rev_seqno=1, epoch=3),
        pack_deletion(
            vb_id=9, key=encode_leb128(300) + b"\xff", cas=2, seqno=9, rev_seqno=2, epoch=3
        ),
        pack_mutation(
            vb_id=9, key=b"\0one", value=packed, cas=3, seqno=10, rev_seqno=2, datatype=SNAPPY
        ),
    )


CUT = CutOff(9, 4, VERSIONS, entries())


def test_a_file_is_read_as_it_was_written() -> None:
    assert unpack_cut_off(pack_cut_off(CUT)) == CUT
    assert (CUT.first_seqno, CUT.last_seqno) == (8, 10)
    assert CUT.file_name == f"vb0009-version{UUID}-epoch4-8-10.cut"
    rows = [(item.seqno, item.kind, item.collection_id, item.key) for item in changes_of(CUT)]
    assert rows == [
        (8, "mutation", 0, b"one"), (9, "deletion", 300, b"\xff"), (10, "mutation", 0, b"one"),
    ]  # fmt: skip


@given(st.data())
def test_damage_is_found(data: st.DataObject) -> None:
    stored = bytearray(pack_cut_off(CUT))
    at = data.draw(st.integers(0, len(stored) - 1))
    if data.draw(st.booleans()):
        del stored[at:]
    else:
        stored[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DiscardDamagedError):
        unpack_cut_off(bytes(stored))


def sealed(data: bytes) -> bytes:
    return data + google_crc32c.value(data).to_bytes(4, "big")


HEAD = pack_cut_off(CUT)[:14]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "too few"),
        (sealed(b"something else, which is long"), "no discard file"),
        (sealed(HEAD[:8] + b"\0\2" + HEAD[10:]), "format 2, this program reads format 1"),
        (sealed(HEAD + b"{}"), "its content is not"),
        (sealed(pack_cut_off(CUT)[:-5]), "an entry reaches to byte"),
        (pack_cut_off(CUT)[:-1] + b"\0", "it is damaged"),
    ],
)
def test_what_cannot_be_read_is_refused_with_words(data: bytes, words: str) -> None:
    with pytest.raises(DiscardDamagedError, match=words):
        unpack_cut_off(data)


def test_the_receipt_of_what_was_cut_off() -> None:
    receipt = cut_off_receipt(CUT)
    assert json.loads(json.dumps(receipt)) == {
        "receipt": "cut_off", "vb": 9, "epoch": 4, "versions": [[str(UUID), "7"], ["3", "0"]],
        "first_seqno": "8", "last_seqno": "10", "count": 3, "file": CUT.file_name,
        "changes": [
            {"seqno": "8", "kind": "mutation", "collection_id": 0, "key": "one"},
            {
                "seqno": "9", "kind": "deletion", "collection_id": 300, "key": "/w==",
                "key_encoding": "base64",
            },
            {"seqno": "10", "kind": "mutation", "collection_id": 0, "key": "one"},
        ],
    }  # fmt: skip
    many = CUT._replace(entries=CUT.entries * RECEIPT_KEYS_MAX)
    assert len(cut_off_receipt(many)["changes"]) == RECEIPT_KEYS_MAX
    assert cut_off_receipt(many)["count"] == 3 * RECEIPT_KEYS_MAX


@pytest.mark.parametrize(("told", "known"), [(None, None), (5, 0), (12, 2)])
def test_the_receipt_of_an_election(told: int | None, known: int | None) -> None:
    receipt = election_receipt(ElectionLoss(9, 4, VERSIONS, 10, told))
    assert receipt["end_seqno"] == "10"
    assert receipt["committed_seqno"] == (None if told is None else str(told))
    assert receipt["known_lost"] == known


def test_a_system_event_is_named() -> None:
    event = ManifestEvent(SystemEventKind.CREATE_COLLECTION, 5, 0, 8, "name")
    cut = CutOff(9, 4, VERSIONS, (pack_system_event(9, 8, event),))
    (change,) = changes_of(cut)
    assert (change.seqno, change.kind) == (8, "system_event")


class TestTheCommand:
    def test_it_prints_the_changes(self, tmp_path: Path, capfdbinary) -> None:
        file = tmp_path / CUT.file_name
        file.write_bytes(pack_cut_off(CUT))
        assert run(["discarded", "show", str(file), "-o", "plain"]) == 0
        out, _ = capfdbinary.readouterr()
        assert out.splitlines()[2:] == [
            b"9\tdeletion\t300\t\\xff\t0", b"10\tmutation\t0\tone\t100",
        ]  # fmt: skip
        assert run(["discarded", "show", str(file), "-o", "json"]) == 0
        first, second, third = map(json.loads, capfdbinary.readouterr()[0].splitlines())
        assert (first["value"], first["vb"], first["epoch"]) == ("{}", 9, 4)
        assert second["key_encoding"] == "base64"
        assert (third["value"], third["datatype"]) == ("long " * 20, 0)

    def test_a_damaged_file_is_refused(self, tmp_path: Path, capfdbinary) -> None:
        file = tmp_path / "some.cut"
        file.write_bytes(pack_cut_off(CUT)[:-2])
        assert run(["discarded", "show", str(file)]) == 1
        assert b"some.cut: the checksum" in capfdbinary.readouterr()[1]
        assert run(["discarded", "show", str(tmp_path / "none.cut")]) == 2
