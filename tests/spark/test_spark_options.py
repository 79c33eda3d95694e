"""Options: what they mean, and that a wrong one is named with what it takes."""

import pickle

import pytest

from clients.spark.options import _OPTIONS, OptionError, parse_options
from clients.spark.source import ReadTask

SERVER = {"servers": "127.0.0.1:11210"}


def test_names_in_any_case_and_defaults():
    settings = parse_options({"SERVERS": "a:1, dcpd://u:p@b:2", "maxrowspertrigger": "5"})
    assert [(server.host, server.port, server.user) for server in settings.servers] == [
        ("a", 1, "guest"), ("b", 2, "u"),
    ]  # fmt: skip
    assert (settings.rows_max, settings.history, settings.fails_on_rollback) == (5, True, False)
    assert settings.partitions is None, "all of the server"
    assert settings.starting == "earliest"
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_credentials_and_tls_go_to_every_server():
    given = {"servers": "a:1,b:2", "username": "ada", "password": "secret", "tls": "true",
             "tlsCa": "ca.pem", "tlsCert": "me.pem"}  # fmt: skip
    for server in parse_options(given).servers:
        assert (server.user, server.password) == ("ada", "secret")
        assert (server.is_tls, server.tls_ca, server.tls_cert) == (True, "ca.pem", "me.pem")
    assert parse_options({"servers": "dcpds://a"}).servers[0].is_tls


@pytest.mark.parametrize(
    ("text", "partitions"),
    [("5", (5,)), ("0-3, 600", (0, 1, 2, 3, 600)), ("7,7,1-2", (1, 2, 7))],
)
def test_partitions(text, partitions):
    assert parse_options({**SERVER, "partitions": text}).partitions == partitions


@pytest.mark.parametrize(
    ("text", "starting"),
    [
        ("latest", "latest"),
        ('{"17": 120, "3": "9 ab@0"}', {"17": "120", "3": "9 ab@0"}),
        ("1000", 1_000_000_000),
        ("1970-01-01T00:00:02", 2_000_000_000),
        ("1970-01-01T02:00:02.5+02:00", 2_500_000_000),
    ],
)
def test_starting_offsets(text, starting):
    assert parse_options({**SERVER, "startingOffsets": text}).starting == starting


def test_columns():
    plain = parse_options(SERVER).schema
    assert plain == (
        "vb INT, seqno BIGINT, vb_uuid BIGINT, op STRING, key BINARY, value BINARY, cas BIGINT,"
        " revision BIGINT, flags BIGINT, expiry TIMESTAMP, time TIMESTAMP"
    )
    given = {"valueFormat": "JSON", "valueSchema": "a INT", "keyFormat": "string",
             "collections": "shop.orders, shop.items"}  # fmt: skip
    rich = parse_options({**SERVER, **given})
    assert "value STRUCT<a INT>" in rich.schema
    assert "key STRING" in rich.schema
    assert rich.schema.endswith(", collection STRING")
    assert rich.collections == ("shop.orders", "shop.items")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("servers", "host:99999"),
        ("servers", "a:1,,b:2"),
        ("servers", "http://a"),
        ("partitions", "5-2"),
        ("partitions", "1024"),
        ("partitions", "all"),
        ("startingOffsets", "yesterday"),
        ("startingOffsets", "{"),
        ("startingOffsets", '{"2000": 1}'),
        ("startingOffsets", '{"2": -1}'),
        ("startingOffsets", '{"2": "x"}'),
        ("startingOffsets", '{"2": 18446744073709551616}'),
        ("startingOffsets", '{"2": 1, "2": 5}'),
        ("startingOffsets", '{"2": 1, "02": 5}'),
        ("startingOffsets", "1969-12-31T23:59:59"),
        ("startingOffsets", "1970-01-01T00:00:00+01:00"),
        ("startingOffsets", "-1"),
        ("startingOffsets", "18446744073710"),
        ("startingOffsets", "3000-01-01"),
        ("collections", "a.b,a.b"),
        ("maxRowsPerTrigger", "0"),
        ("maxBytesPerTrigger", "1MB"),
        ("numPartitions", "5000"),
        ("onRollback", "ignore"),
        ("history", "on"),
        ("tls", "1"),
        ("valueFormat", "avro"),
        ("collections", "orders"),
        ("username", ""),
    ],
)
def test_a_wrong_value_is_named_with_what_the_option_takes(name, text):
    with pytest.raises(OptionError) as caught:
        parse_options({**SERVER, name: text})
    assert f"option {name} takes {_OPTIONS[name][0]}, not " in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "option servers is missing"),
        ({**SERVER, "maxRowPerTrigger": "1"}, "did you mean maxRowsPerTrigger"),
        ({**SERVER, "valueFormat": "json"}, "valueSchema"),
        ({**SERVER, "valueSchema": "a INT"}, "valueFormat=json"),
        ({**SERVER, "tlsCa": "x.pem"}, "set tls=true"),
        ({**SERVER, "startingOffsets": "1969-07-20"}, "it is before 1970"),
        ({**SERVER, "startingOffsets": '{"2": 1, "02": 5}'}, "partition 2 is named twice"),
        (
            {**SERVER, "partitions": "0-2", "startingOffsets": '{"2": 1, "7": 1, "3": 1}'},
            "startingOffsets names partitions that option partitions leaves out: 3, 7;",
        ),
    ],
)
def test_what_does_not_fit_together_is_said(options, words):
    with pytest.raises(OptionError, match=words):
        parse_options(options)


@pytest.mark.parametrize(
    "options",
    [
        {"servers": "dcpd://ada:sesame@host:99999"},
        {"servers": "ada:sesame@host:x"},
        {"servers": "http://ada:sesame@host"},
        {"servers": "dcpd://ada:sesame,same@host:1"},
        {**SERVER, "password": ""},
        {**SERVER, "pasword": "sesame"},
    ],
)
def test_a_password_is_not_repeated_in_errors(options):
    with pytest.raises(OptionError) as caught:
        parse_options(options)
    assert "sesame" not in str(caught.value)
    assert "not ''" not in str(caught.value)


def test_password_is_in_no_description_of_what_goes_to_executors():
    settings = parse_options({"servers": "dcpd://ada:sesame@a:1", "tls": "true", "tlsCa": "c.pem"})
    assert settings.servers[0].password == "sesame"
    assert "sesame" not in repr(ReadTask(settings, (), (0,)))


def test_limits_are_for_streams():
    with pytest.raises(OptionError, match=r"spark\.read"):
        parse_options({**SERVER, "maxRowsPerTrigger": "1"}, is_batch=True)
