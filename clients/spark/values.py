"""Values as the option valueFormat wants them: bytes, text, or a JSON document's members. Pure.

A document that is not JSON, or a member that is not of its type, gives null: one writer's mistake
must not stop a query. Members that the schema does not have are left out.
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
    """Return what makes the column of values out of an array of bytes."""
    if value_format != "json":
        return lambda array: text_or_bytes(array, wanted)
    # What pyarrow is given has the kinds of JSON values that the types take, member by member:
    # on its own it takes true as 1.0, and ends the process over a null in a map's place.
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
    """Return the kinds of JSON values that a type takes, null among them, for msgspec."""
    return Optional[_kind_of(wanted)]  # noqa: UP045 - a kind may be a generic alias


def _kind_of(wanted: pa.DataType) -> Any:
    if pa.types.is_struct(wanted):
        members = {field.name: _json_type(field.type) for field in wanted}
        make: Any = TypedDict  # made while it runs, which type checkers do not follow
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
"""Whether a type is of a kind, and the kind of JSON value for it; the others are told by text."""


def fitted(value: Any, wanted: pa.DataType) -> Any:
    """Return a JSON value as a type takes it; None for what it does not take."""
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
    """Return a text as a day, a moment or a decimal where that is wanted."""
    if pa.types.is_date(wanted):
        return date.fromisoformat(text)
    if pa.types.is_timestamp(wanted):
        return datetime.fromisoformat(text)
    if pa.types.is_decimal(wanted):
        return Decimal(text)
    return text
