"""The load generator against a responder: counts are right, and a wrong answer is noticed."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks import responder, workload
from benchmarks.answers import RespCounter, TextCounter
from benchmarks.generator import Load, batches_of, run
from clients.cli.node.answers import AnswerError, BinaryCounter
from clients.cli.node.histogram import Histogram
from vbucket.model.ids import vbucket_of

PROTOCOLS = pytest.mark.parametrize("protocol", ["binary", "resp"])


@contextmanager
def responding(wrong_every: int = 0) -> Iterator[int]:
    """A responder on a free port, until its peers are gone."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    thread = threading.Thread(target=responder.serve, args=(listener, wrong_every))
    thread.start()
    try:
        yield port
    finally:
        thread.join(20)
        assert not thread.is_alive()


@PROTOCOLS
@pytest.mark.parametrize(("connections", "in_flight"), [(1, 1), (1, 128), (3, 7)])
def test_a_load_writes_every_key_once(protocol, connections, in_flight):
    load = Load(protocol, 0, connections=connections, in_flight=in_flight, keys=1000, load=True)
    sent = b"".join(batch for place in range(connections) for batch, _ in batches_of(load, place))
    assert all(
        sent.count(workload.key_of(n)) == sent.count(workload.key_of(0)) for n in range(1000)
    )
    with responding() as port:
        result = run(Load(**{**load.__dict__, "port": port}))
    assert result.operations == 1000
    assert result.errors == 0
    assert result.batches == sum(
        -(-len(range(place, 1000, connections)) // in_flight) for place in range(connections)
    )


@PROTOCOLS
def test_a_wrong_answer_is_counted_and_the_rest_stays_in_step(protocol):
    with responding(wrong_every=10) as port:
        result = run(Load(protocol, port, connections=2, in_flight=16, keys=800, load=True))
    assert result.operations == 800
    assert result.errors == 80
    assert result.first_error in {"status 0x86", "-OOM command not allowed"}


@PROTOCOLS
def test_a_batch_larger_than_the_socket_takes_is_sent_in_parts(protocol):
    load = Load(protocol, 0, in_flight=100, keys=200, value_bytes=200_000, load=True)
    with responding() as port:
        result = run(Load(**{**load.__dict__, "port": port}))
    assert (result.operations, result.errors) == (200, 0)


@PROTOCOLS
def test_the_process_prints_one_json_document(protocol):
    with responding() as port:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.generator", "--protocol", protocol,
             "--port", str(port), "--connections", "2", "--in-flight", "8", "--seconds", "0.2",
             "--warmup-seconds", "0", "--keys", "100", "--prebuilt", "160"],
            capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
    document = json.loads(done.stdout)
    result = document["result"]
    assert document["load"]["in_flight"] == 8
    assert result["operations"] == result["batches"] * 8 > 0
    assert 0 < result["p50_us"] <= result["p99_us"] <= result["p9999_us"] <= result["max_us"]
    assert result["errors"] == 0


def test_the_process_fails_when_an_answer_is_wrong():
    with responding(wrong_every=3) as port:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.generator", "--protocol", "binary",
             "--port", str(port), "--keys", "9", "--load"],
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
    assert done.returncode == 1
    assert json.loads(done.stdout)["result"]["errors"] == 3


def test_a_batch_goes_to_the_partition_of_its_keys():
    load = Load("binary", 0, in_flight=4, keys=4, load=True)
    ((batch, operations),) = batches_of(load, 0)
    at = 0
    for index in range(operations):
        key = workload.key_of(index)
        assert batch[at : at + 2] == b"\x80\x01"
        assert int.from_bytes(batch[at + 6 : at + 8], "big") == vbucket_of(key)
        assert batch[at + 32 : at + 33 + len(key)] == b"\0" + key
        at += 24 + int.from_bytes(batch[at + 8 : at + 12], "big")
    assert at == len(batch)


def test_the_same_seed_gives_the_same_requests_over_many_keys():
    load = Load("resp", 0, connections=2, in_flight=4, keys=10, prebuilt=800)
    first, again, other = (batches_of(load, place) for place in (0, 0, 1))
    taken = [[next(source)[0] for _ in range(100)] for source in (first, again, other)]
    assert taken[0] == taken[1] != taken[2]
    assert all(workload.key_of(n) in b"".join(taken[0]) for n in range(10))


OK, WRONG = responder.SET_OK, responder.SET_WRONG
RESP_OK, RESP_WRONG = responder.RESP_OK, responder.RESP_WRONG


@pytest.mark.parametrize(
    ("make", "answers", "errors"),
    [
        (BinaryCounter, OK * 3, 0),
        (BinaryCounter, OK + WRONG + OK, 1),
        (BinaryCounter, WRONG * 3, 3),
        (RespCounter, RESP_OK * 3, 0),
        (RespCounter, RESP_OK + RESP_WRONG + RESP_OK, 1),
        (RespCounter, RESP_WRONG * 3, 3),
        (RespCounter, RESP_OK * 2 + b"+OK\r\n-ERR no\r\n", 1),
    ],
)
def test_answers_are_counted_wherever_they_are_cut(make, answers, errors):
    for cut in range(1, len(answers)):
        counter = make()
        counter.begin(3)
        assert not counter.feed(answers[:cut])
        assert counter.feed(answers[cut:])
        assert counter.errors == errors


@pytest.mark.parametrize(
    ("counter", "answers"),
    [
        (BinaryCounter(), OK * 3),
        (BinaryCounter(), b"\x80" + OK[1:]),
        (BinaryCounter(), WRONG * 3),
        (RespCounter(), RESP_OK * 3),
        (RespCounter(), b"+QUEUED\r\n$1\r\nx\r\n" * 2),
    ],
)
def test_what_is_no_answer_to_the_batch_is_refused(counter, answers):
    counter.begin(2)
    with pytest.raises(AnswerError):
        counter.feed(answers)


def test_a_refused_session_says_which_step():
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse() -> None:
        connection, _ = listener.accept()
        connection.recv(4096)
        connection.sendall(workload.HEADER.pack(0x81, workload.OP_HELLO, 0, 0, 0, 0x24, 0, 0, 0))
        connection.close()
        listener.close()

    thread = threading.Thread(target=refuse)
    thread.start()
    with pytest.raises(AnswerError, match="HELLO was answered with status 0x24"):
        run(Load("binary", listener.getsockname()[1]))
    thread.join(20)


def test_percentiles_are_within_a_bucket():
    histogram = Histogram()
    for value in range(1, 100_001):
        histogram.add(value)
    assert len(histogram) == 100_000
    for percent in (50, 99, 100):
        assert histogram.percentile(percent) == pytest.approx(percent * 1000, rel=1 / 64)
    assert Histogram().percentile(50) == 0


def test_text_answers_are_counted():
    counter = TextCounter()
    counter.begin(3)
    assert not counter.feed(b"STORED\r\nSTO")
    assert counter.feed(b"RED\r\nSERVER_ERROR no\r\n")
    assert (counter.errors, counter.first_error) == (1, "SERVER_ERROR no")
    counter.begin(1)
    with pytest.raises(AnswerError, match="more than 1"):
        counter.feed(b"STORED\r\nSTORED\r\n")
