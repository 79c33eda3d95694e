"""Values as the option valueFormat wants them: bytes, text, or a JSON document's members. Pure.

A document that is not JSON, or a member that is not of its type, gives null: one writer's mistake
must not stop a query. Members that the schema does not have are left out.
"""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import pyarrow as pa

from clients.spark.columns import ValueParser, text_or_bytes


def value_parser(value_format: str, wanted: pa.DataType) -> ValueParser:
    """Return what makes the column of values out of an array of bytes."""
    if value_format != "json":
        return lambda array: text_or_bytes(array, wanted)
    decoder = msgspec.json.Decoder()

    def parse(array: Any) -> Any:
        documents = []
        for value in array.to_pylist():
            try:
                documents.append(None if value is None else decoder.decode(value))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                documents.append(None)
        try:
            return pa.array(documents, wanted)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
            return pa.array([fitted(document, wanted) for document in documents], wanted)

    return parse


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
        return [(key, fitted(item, wanted.item_type)) for key, item in value.items()]
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
