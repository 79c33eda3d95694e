"""What the generator says to etcd and NATS, and how it counts their answers, in any pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import etcd, nats
from benchmarks.answers import Counter
from clients.cli.node.answers import AnswerError


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[low:high] for low, high in pairwise(places)]


def feed(counter: Counter, data: bytes, cuts: list[int]) -> list[bool]:
    return [counter.feed(piece) for piece in pieces(data, cuts)]


def etcd_answer(stream_id: int, *, is_error: bool = False) -> bytes:
    head = b"" if is_error else etcd.frame(etcd.HEADERS, etcd.END_HEADERS, stream_id, b"h")
    body = b"" if is_error else etcd.frame(etcd.DATA, 0, stream_id, b"\0\0\0\0\x02ok")
    flags = etcd.END_HEADERS | etcd.END_STREAM
    return head + body + etcd.frame(etcd.HEADERS, flags, stream_id, b"t")


def test_requests_of_etcd_get_rising_odd_stream_ids_over_batches():
    counter = etcd.EtcdCounter()
    batch = etcd.put_request(b"a", b"1") + etcd.put_request(b"b", b"x" * 200)
    ids = []
    for _ in range(2):
        counter.begin(0)
        out, at = bytes(counter.outgoing(batch)), 0
        while at < len(out):
            high, low, kind, _, stream_id = etcd.FRAME_HEAD.unpack_from(out, at)
            ids.append((kind, stream_id))
            at += etcd.FRAME_HEAD_BYTES + (high << 16 | low)
        assert at == len(out)
    assert ids == [
        (kind, stream_id) for stream_id in (1, 3, 5, 7) for kind in (etcd.HEADERS, etcd.DATA)
    ]


def test_a_put_of_etcd_holds_key_and_value():
    body = etcd.put_request(b"key", b"v" * 300)[-(5 + 5 + 303) :]
    assert body[:5] == b"\0" + (5 + 303).to_bytes(4, "big")
    assert body[5:] == b"\x0a\x03key\x12\xac\x02" + b"v" * 300


@given(st.lists(st.integers(0, 500), max_size=8))
def test_answers_of_etcd_are_counted_in_any_pieces(cuts):
    counter = etcd.EtcdCounter()
    for first in (1, 7):
        counter.begin(3)
        noise = etcd.frame(etcd.WINDOW_UPDATE, 0, 0, bytes(4))
        data = noise.join(etcd_answer(first + 2 * place) for place in range(3))
        assert feed(counter, data, cuts)[-1]
    assert counter.errors == 0


def test_an_error_of_etcd_is_counted():
    counter = etcd.EtcdCounter()
    counter.begin(2)
    assert counter.feed(etcd_answer(1) + etcd_answer(3, is_error=True))
    assert counter.errors == 1
    counter.begin(1)
    with pytest.raises(AnswerError, match="closes the connection"):
        counter.feed(etcd.frame(etcd.GOAWAY, 0, 0, bytes(8) + b"why"))


ACKNOWLEDGED = b'MSG _INBOX.x 1 20\r\n{"stream":"S","seq":1}\r\n'


@given(st.lists(st.integers(0, 500), max_size=8))
def test_acknowledgements_of_nats_are_counted_in_any_pieces(cuts):
    counter = nats.NatsCounter()
    counter.begin(3)
    done = feed(counter, ACKNOWLEDGED * 2 + b"PING\r\n" + ACKNOWLEDGED, cuts)
    assert done[-1]
    assert not any(done[:-1])
    assert counter.errors == 0


def test_an_error_of_nats_is_counted():
    counter = nats.NatsCounter()
    counter.begin(2)
    assert counter.feed(ACKNOWLEDGED + b'MSG i 1 9\r\n{"error":{"code":503}}\r\n')
    assert (counter.errors, counter.first_error[:7]) == (1, '"error"')
    counter.begin(1)
    with pytest.raises(AnswerError, match="not 1"):
        counter.feed(ACKNOWLEDGED * 2)


def test_each_connection_to_nats_has_an_inbox_of_its_own():
    first, second = nats.NatsCounter(), nats.NatsCounter()
    batch = nats.put_request(b"key:1", b"v")
    assert first.inbox != second.inbox
    assert bytes(first.outgoing(batch)) == b"PUB $KV.benchmark.key.1 %b 1\r\nv\r\n" % first.inbox
