"""Reads the operations out of sub-document requests, and checks them. Pure.

    single   extras u16 path length, u8 path flags (u32 expiry) (u8 document flags); path, value
    multi    extras (u32 expiry) (u8 document flags); then up to OPERATIONS_MAX operations:
             u8 opcode, u8 path flags, u16 path length (in mutations u32 value length), path, value

A request that is not sound raises RefusedError. Whether the document fits is not asked here.

Rules: kv_engine's. OperationList on XATTRs come before those on the body.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

from dcp.session.subdoc import json_operations as operations
from dcp.session.subdoc.json_operations import Lookup, Mutation
from dcp.session.subdoc.json_path import PATH_BYTES_MAX
from dcp.session.subdoc.virtual_xattrs import is_macro
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status
from dcp.wire.xattrs import is_name, is_system

OPERATIONS_MAX: Final = 16
CACHED_BYTES_MAX: Final = 512
"""Longest list of look-ups that is cached: clients send the same list for many documents."""
LISTS_CACHED: Final = 512

MKDIR_P, XATTR, EXPAND_MACROS = 0x01, 0x04, 0x10
"""Path flags: make missing objects; the path begins with the name of an XATTR; the value is a
macro."""
MKDOC, ADD, ACCESS_DELETED, CREATE_AS_DELETED, REVIVE = 0x01, 0x02, 0x04, 0x08, 0x10
"""Document flags: create the document if it is missing; only then; take a deletion for the
document; create it as a deletion with XATTRs; make a document of a deletion."""

_CREATES: Final = MKDOC | ADD
_MUTATION_FLAGS: Final = MKDOC | ADD | ACCESS_DELETED | CREATE_AS_DELETED | REVIVE
_LOOKUP_SPEC: Final = Struct(">BBH")
_MUTATION_SPEC: Final = Struct(">BBHI")
_SINGLE: Final = Struct(">HB")


class Traits(NamedTuple):
    """What an operation takes."""

    path_flags: int
    doc_flags: int
    run: Lookup | Mutation | None = None
    """None: the operation is on the whole body, or moves an XATTR there."""
    has_value: bool = False
    takes_empty_path: bool = False
    has_result: bool = False
    path_flags_needed: int = 0


class Operation(NamedTuple):
    """One operation of a request."""

    opcode: int
    traits: Traits
    flags: int
    path: bytes
    value: bytes

    @property
    def name(self) -> bytes:
        """The name of the XATTR that the path begins with."""
        return self.path.partition(b".")[0].partition(b"[")[0]


class OperationList(NamedTuple):
    """The operations of a request, in order."""

    each: tuple[Operation, ...]
    xattrs: int
    """How many are on XATTRs: the first ones."""
    has_system: bool
    """Whether one names a system XATTR."""


_WITH_MACROS: Final = XATTR | EXPAND_MACROS
LOOKUPS: Final[dict[int, Traits]] = {
    Opcode.GET: Traits(0, ACCESS_DELETED, takes_empty_path=True, has_result=True),
    Opcode.SUBDOC_GET: Traits(XATTR, ACCESS_DELETED, operations.get, has_result=True),
    Opcode.SUBDOC_EXISTS: Traits(XATTR, ACCESS_DELETED, operations.exists),
    Opcode.SUBDOC_GET_COUNT: Traits(
        XATTR, ACCESS_DELETED, operations.count, takes_empty_path=True, has_result=True
    ),
}
_PARENTS: Final = MKDIR_P | _WITH_MACROS
MUTATIONS: Final[dict[int, Traits]] = {
    Opcode.SET: Traits(0, _MUTATION_FLAGS, has_value=True, takes_empty_path=True),
    Opcode.DELETE: Traits(0, ACCESS_DELETED, takes_empty_path=True),
    Opcode.SUBDOC_DICT_ADD: Traits(_PARENTS, _MUTATION_FLAGS, operations.dict_add, has_value=True),
    Opcode.SUBDOC_DICT_UPSERT: Traits(
        _PARENTS, _MUTATION_FLAGS, operations.dict_upsert, has_value=True
    ),
    Opcode.SUBDOC_DELETE: Traits(XATTR, ACCESS_DELETED | REVIVE, operations.delete),
    Opcode.SUBDOC_REPLACE: Traits(
        _WITH_MACROS, _MUTATION_FLAGS & ~MKDOC, operations.replace_value, has_value=True
    ),
    Opcode.SUBDOC_ARRAY_PUSH_LAST: Traits(
        _PARENTS, _MUTATION_FLAGS, operations.array_push_last, has_value=True, takes_empty_path=True
    ),
    Opcode.SUBDOC_ARRAY_PUSH_FIRST: Traits(
        _PARENTS, _MUTATION_FLAGS, operations.array_push_first, has_value=True,
        takes_empty_path=True,
    ),
    Opcode.SUBDOC_ARRAY_INSERT: Traits(
        _WITH_MACROS, _MUTATION_FLAGS & ~MKDOC, operations.array_insert, has_value=True
    ),
    Opcode.SUBDOC_ARRAY_ADD_UNIQUE: Traits(
        MKDIR_P | XATTR, _MUTATION_FLAGS, operations.array_add_unique, has_value=True,
        takes_empty_path=True,
    ),
    Opcode.SUBDOC_COUNTER: Traits(
        MKDIR_P | XATTR, _MUTATION_FLAGS, operations.counter, has_value=True, has_result=True
    ),
    Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR: Traits(
        XATTR, ACCESS_DELETED | REVIVE, operations.get, path_flags_needed=XATTR
    ),
}  # fmt: skip
"""Opcode -> what it takes."""
_WHOLE_BODY: Final = frozenset({Opcode.GET, Opcode.SET, Opcode.DELETE})


def single_lookup(opcode: int, extras: bytes, body: bytes) -> tuple[OperationList, int]:
    """Return the operation and the document flags of a look-up; `body` is path and value."""
    if len(extras) not in {3, 4}:
        raise RefusedError(Status.EINVAL, "a look-up takes 3 bytes of extras, or 4 with flags")
    operation = _single(opcode, LOOKUPS[opcode], extras, body)
    doc_flags = extras[3] if len(extras) == 4 else 0
    _check_doc_flags(doc_flags, operation.traits)
    return _listed([operation]), doc_flags


def single_mutation(opcode: int, extras: bytes, body: bytes) -> tuple[OperationList, int, int]:
    """Return the operation, the document flags and the expiry of a change."""
    if len(extras) not in {3, 4, 7, 8}:
        raise RefusedError(
            Status.EINVAL, "a sub-document change takes 3, 4, 7 or 8 bytes of extras"
        )
    operation = _single(opcode, MUTATIONS[opcode], extras, body)
    expiry, doc_flags = _expiry_and_flags(extras[3:])
    _check_doc_flags(doc_flags, operation.traits)
    if doc_flags & CREATE_AS_DELETED and not operation.flags & XATTR:
        raise RefusedError(Status.EINVAL, "a deletion is created with XATTRs only")
    return _listed([operation]), doc_flags, expiry


def multi_lookup(extras: bytes, body: bytes) -> tuple[OperationList, int]:
    """Return the operations and the document flags of a SUBDOC_MULTI_LOOKUP."""
    if len(extras) > 1:
        raise RefusedError(Status.EINVAL, "a multi look-up takes no extras, or 1 byte of flags")
    doc_flags = extras[0] if extras else 0
    if doc_flags & ~ACCESS_DELETED:
        raise RefusedError(Status.EINVAL, f"document flags 0x{doc_flags:02x} do not fit look-ups")
    read = _cached_lookups if len(body) <= CACHED_BYTES_MAX else _lookups
    return read(body), doc_flags


def multi_mutation(extras: bytes, body: bytes) -> tuple[OperationList, int, int]:
    """Return the operations, the document flags and the expiry of a SUBDOC_MULTI_MUTATION."""
    if len(extras) not in {0, 1, 4, 5}:
        raise RefusedError(Status.EINVAL, "a multi mutation takes 0, 1, 4 or 5 bytes of extras")
    expiry, doc_flags = _expiry_and_flags(extras)
    found: list[Operation] = []
    at = 0
    while at < len(body) and len(found) <= OPERATIONS_MAX:
        if at + _MUTATION_SPEC.size > len(body):
            raise RefusedError(Status.EINVAL, f"the operation at byte {at} is cut short")
        opcode, flags, path_bytes, value_bytes = _MUTATION_SPEC.unpack_from(body, at)
        at += _MUTATION_SPEC.size
        value_at = at + path_bytes
        if value_at + value_bytes > len(body):
            raise RefusedError(Status.EINVAL, "path and value are longer than the body")
        traits = MUTATIONS.get(opcode)
        path, value = body[at:value_at], body[value_at : value_at + value_bytes]
        found.append(_operation(opcode, traits, flags, path, value))
        _check_doc_flags(doc_flags, found[-1].traits)
        at = value_at + value_bytes
    _check_combination(doc_flags)
    return _listed(found), doc_flags, expiry


def _lookups(body: bytes) -> OperationList:
    found: list[Operation] = []
    at = 0
    while at < len(body) and len(found) <= OPERATIONS_MAX:
        if at + _LOOKUP_SPEC.size > len(body):
            raise RefusedError(Status.EINVAL, f"the operation at byte {at} is cut short")
        opcode, flags, path_bytes = _LOOKUP_SPEC.unpack_from(body, at)
        at += _LOOKUP_SPEC.size
        if at + path_bytes > len(body):
            raise RefusedError(Status.EINVAL, "the path is longer than the body")
        path = body[at : at + path_bytes]
        found.append(_operation(opcode, LOOKUPS.get(opcode), flags, path, b""))
        at += path_bytes
    return _listed(found)


_cached_lookups: Final = lru_cache(maxsize=LISTS_CACHED)(_lookups)


def _expiry_and_flags(extras: bytes) -> tuple[int, int]:
    expiry = int.from_bytes(extras[:4], "big") if len(extras) >= 4 else 0
    return expiry, extras[-1] if len(extras) in {1, 5} else 0


def _single(opcode: int, traits: Traits, extras: bytes, body: bytes) -> Operation:
    path_bytes, flags = _SINGLE.unpack_from(extras)
    if path_bytes > len(body):
        raise RefusedError(Status.EINVAL, "the path is longer than the body")
    return _operation(opcode, traits, flags, body[:path_bytes], body[path_bytes:])


def _operation(
    opcode: int, traits: Traits | None, flags: int, path: bytes, value: bytes
) -> Operation:
    """Check an operation and return it."""
    if traits is None:
        why = f"no operation 0x{opcode:02x} in a request of this kind"
        raise RefusedError(Status.SUBDOC_INVALID_COMBO, why)
    if flags & EXPAND_MACROS and not flags & XATTR:
        raise RefusedError(
            Status.SUBDOC_XATTR_INVALID_FLAG_COMBO, "macros are expanded in XATTRs only (flag 0x04)"
        )
    needed = traits.path_flags_needed
    if flags & ~traits.path_flags or flags & needed != needed:
        raise RefusedError(Status.EINVAL, f"path flags 0x{flags:02x} do not fit 0x{opcode:02x}")
    if len(path) > PATH_BYTES_MAX:
        raise RefusedError(Status.EINVAL, f"a path has at most {PATH_BYTES_MAX} bytes")
    if opcode in _WHOLE_BODY and path:
        raise RefusedError(Status.EINVAL, "an operation on the whole body has no path")
    operation = Operation(opcode, traits, flags, path, value)
    if flags & XATTR:
        _check_xattr(operation)
    elif not path and not traits.takes_empty_path:
        raise RefusedError(Status.EINVAL, "the operation needs a path")
    if traits.has_value != bool(value):
        raise RefusedError(
            Status.EINVAL,
            "the operation needs a value" if traits.has_value else "the operation takes no value",
        )
    return operation


def _check_xattr(operation: Operation) -> None:
    name = operation.name
    is_virtual = name.startswith(b"$")
    if not is_virtual and not is_name(name):
        raise RefusedError(
            Status.XATTR_EINVAL,
            "the name of an XATTR has 1 to 16 bytes and must not begin with a special character",
        )
    if is_virtual and operation.opcode in MUTATIONS:
        raise RefusedError(
            Status.SUBDOC_XATTR_CANT_MODIFY_VATTR, f"{name.decode(errors='replace')} is virtual"
        )
    if operation.flags & EXPAND_MACROS and not is_macro(operation.value):
        raise RefusedError(Status.SUBDOC_XATTR_UNKNOWN_MACRO, "the value is not a macro")


def _check_doc_flags(doc_flags: int, traits: Traits) -> None:
    if doc_flags & ~traits.doc_flags:
        raise RefusedError(
            Status.EINVAL, f"document flags 0x{doc_flags:02x} do not fit the operation"
        )
    _check_combination(doc_flags)


def _check_combination(doc_flags: int) -> None:
    if doc_flags & _CREATES == _CREATES:
        raise RefusedError(Status.EINVAL, "document flags 0x01 and 0x02 exclude each other")
    if doc_flags & CREATE_AS_DELETED and not doc_flags & _CREATES:
        raise RefusedError(Status.EINVAL, "document flag 0x08 needs 0x01 or 0x02")
    if doc_flags & REVIVE and (not doc_flags & ACCESS_DELETED or doc_flags & CREATE_AS_DELETED):
        raise RefusedError(
            Status.EINVAL, "document flag 0x10 needs 0x04, and cannot be used with 0x08"
        )


def _listed(found: list[Operation]) -> OperationList:
    """Check which operations are together, and return them."""
    if not 0 < len(found) <= OPERATIONS_MAX:
        raise RefusedError(
            Status.SUBDOC_INVALID_COMBO, f"a request has 1 to {OPERATIONS_MAX} operations"
        )
    xattrs = 0
    for place, operation in enumerate(found):
        if operation.flags & XATTR:
            if xattrs < place:
                raise RefusedError(
                    Status.SUBDOC_INVALID_XATTR_ORDER, "operations on XATTRs come first"
                )
            xattrs += 1
        elif operation.opcode == Opcode.DELETE and (place > xattrs or place < len(found) - 1):
            raise RefusedError(
                Status.SUBDOC_INVALID_COMBO, "a deletion is the only operation on the body"
            )
    has_system = any(is_system(each.name) for each in found[:xattrs])
    return OperationList(tuple(found), xattrs, has_system)
