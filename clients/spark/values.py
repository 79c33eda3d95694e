"""Converts values as the option valueFormat says: bytes, text, or members of a JSON document. Pure.

If a document is not JSON, or a member has the wrong type, the result is null: one bad document must
not stop a query. Members that are not in the schema are dropped.
"""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from types import GenericAlias
from typing import Any, Final, Optional, TypedDict

import msgspec
import pyarrow as pa

from clients.spark.columns import ValueParser, text_or_bytes


def value_parser(value_format: str, wanted: pa.DataType) -> ValueParser:
    """Return the function that turns an array of bytes into the value column."""
    if value_format != "json":
        return lambda array: text_or_bytes(array, wanted)
    # pyarrow must only get JSON values that match the types. By itself it converts true to 1.0, and
    # a null in place of a map crashes the process.
    exact = msgspec.json.Decoder(_json_type(wanted))
    any_kind = msgspec.json.Decoder()

    def document_of(value: bytes | None) -> Any:
        if value is None:
            return None
        try:
            return exact.decode(value)
        except msgspec.ValidationError:
            return fitted(any_kind.decode(value), wanted)

    def parse(array: Any) -> Any:
        documents = []
        for value in array.to_pylist():
            try:
                documents.append(document_of(value))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                documents.append(None)
        try:
            return pa.array(documents, wanted)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
            return pa.array([fitted(document, wanted) for document in documents], wanted)

    return parse


def _json_type(wanted: pa.DataType) -> Any:
    """Return the JSON values that a type accepts, null included, as a type for msgspec."""
    return Optional[_kind_of(wanted)]  # noqa: UP045 - a kind may be a generic alias


def _kind_of(wanted: pa.DataType) -> Any:
    if pa.types.is_struct(wanted):
        members = {field.name: _json_type(field.type) for field in wanted}
        make: Any = TypedDict  # created at run time, which type checkers cannot follow
        return make("Members", members, total=False)
    if pa.types.is_list(wanted):
        return GenericAlias(list, (_json_type(wanted.value_type),))
    if pa.types.is_map(wanted):
        return GenericAlias(dict, (str, _json_type(wanted.item_type)))
    return next((kind for is_of, kind in _KINDS if is_of(wanted)), str | int | float)


_KINDS: Final = (
    (pa.types.is_boolean, bool),
    (pa.types.is_integer, int),
    (pa.types.is_floating, float),
    (pa.types.is_string, str),
    (pa.types.is_binary, str),
)
"""(test for an Arrow type, JSON type for it). Other types accept text and numbers."""


def fitted(value: Any, wanted: pa.DataType) -> Any:
    """Convert a JSON value to a type; None if it does not fit."""
    if value is None:
        return None
    if pa.types.is_struct(wanted):
        if not isinstance(value, dict):
            return None
        return {field.name: fitted(value.get(field.name), field.type) for field in wanted}
    if pa.types.is_list(wanted):
        if not isinstance(value, list):
            return None
        return [fitted(item, wanted.value_type) for item in value]
    if pa.types.is_map(wanted):
        if not isinstance(value, dict):
            return None
        return {key: fitted(item, wanted.item_type) for key, item in value.items()}
    return _scalar(value, wanted)


def _scalar(value: Any, wanted: pa.DataType) -> Any:
    try:
        if isinstance(value, str):
            value = _from_text(value, wanted)
        elif pa.types.is_string(wanted) or isinstance(value, bool) != pa.types.is_boolean(wanted):
            return None
        elif pa.types.is_decimal(wanted):
            value = Decimal(str(value))
        return pa.scalar(value, wanted).as_py()
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, ValueError,
            OverflowError, InvalidOperation):  # fmt: skip
        return None


def _from_text(text: str, wanted: pa.DataType) -> Any:
    """Parse text as a date, a timestamp or a decimal if the type is one of these."""
    if pa.types.is_date(wanted):
        return date.fromisoformat(text)
    if pa.types.is_timestamp(wanted):
        return datetime.fromisoformat(text)
    if pa.types.is_decimal(wanted):
        return Decimal(text)
    return text
