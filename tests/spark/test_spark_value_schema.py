"""Value schemas: what Spark takes is taken, and what is wrong is said."""

from __future__ import annotations

import pytest

from clients.spark.options import OptionError, check_columns, parse_options

GOOD = (
    "a INT",
    "carrier STRING, flight int",
    "at STRUCT<airport: STRING, gate INT>, tags ARRAY<STRING>",
    "`two words` DOUBLE, m MAP<STRING, ARRAY<STRUCT<x: DECIMAL(10, 2)>>>",
    "d DECIMAL, e DECIMAL(5), t TIMESTAMP_NTZ, day DATE, raw BINARY, b BOOLEAN",
)


@pytest.mark.parametrize("text", GOOD)
def test_what_is_right_is_taken(text):
    check_columns(text)


def test_spark_takes_it_too(spark):
    for text in GOOD:
        assert spark.createDataFrame([], f"value STRUCT<{text}>").columns == ["value"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a", "a: the end is not a type; use BIGINT, .*STRUCT<...>"),
        ("a INTEGR", "a: 'INTEGR' is not a type"),
        ("a INT b INT", "a comma is missing before 'b'"),
        ("a INT,", "name is missing before the end"),
        ("a INT NOT NULL", "a comma is missing before 'NOT'"),
        ("a INT, A STRING", "column A occurs twice"),
        ("a STRUCT<b INT", "a comma is missing before the end"),
        ("a ARRAY", "'<' is missing before the end"),
        ("a MAP<INT, STRING>", "keys of a map must be STRING"),
        ("a DECIMAL(50)", "precision up to 38"),
        ("a INT> , b STRUCT<c INT", "a comma is missing before '>'"),
        ("a INT; drop", "comma is missing before ';'"),
        ("a " + "ARRAY<" * 40 + "INT" + ">" * 40, "nested deeper"),
    ],
)
def test_what_is_wrong_is_said_with_the_option(text, words):
    given = {"servers": "a:1", "valueFormat": "json", "valueSchema": text}
    with pytest.raises(OptionError, match=words) as caught:
        parse_options(given)
    assert "option valueSchema takes the columns of a JSON value in Spark's DDL" in str(
        caught.value
    )
