"""Sub-document operations against a model: the same operation on Python objects, found by walking.

A case is a document, a path and an operation. The operation works on the text of the document, the
model on lists and dicts. Statuses and results must be equal, and everything outside of what was
changed must keep its text: numbers are compared by their digits, and a document that is replaced by
what it had must not change by a byte.
"""

from __future__ import annotations

import json
import random
import re
from copy import deepcopy
from typing import Any, Final

from dcp.session.subdoc import json_operations as operations
from dcp.session.subdoc import subdoc_request
from dcp.session.subdoc.document_change import run_through
from dcp.session.subdoc.draft import Draft, all_found, new_value
from dcp.session.subdoc.json_path import DEPTH_MAX, Key, Path, SubdocError, parse_path
from dcp.session.subdoc.subdoc_request import MKDIR_P, OPERATIONS_MAX, Operation
from dcp.session.subdoc.virtual_xattrs import ChangeFacts, DocumentFacts
from dcp.wire.status import Status

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
LOOKUPS: Final[dict[str, operations.Lookup]] = {
    "get": operations.get,
    "exists": operations.exists,
    "count": operations.count,
}
MUTATIONS: Final[dict[str, operations.Mutation]] = {
    "dict_add": operations.dict_add,
    "dict_upsert": operations.dict_upsert,
    "replace": operations.replace_value,
    "delete": operations.delete,
    "push_last": operations.array_push_last,
    "push_first": operations.array_push_first,
    "add_unique": operations.array_add_unique,
    "insert": operations.array_insert,
    "counter": operations.counter,
}


class Number:
    """A number, as the text it has."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text


class RefusedCaseError(Exception):
    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


def loads(text: bytes | str) -> Any:
    return json.loads(text, parse_int=Number, parse_float=Number, parse_constant=None)


# -- the model -------------------------------------------------------------------------------------


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


def walk(document: Any, path: Path) -> Any:
    for step in path:
        if isinstance(step, Key):
            if not isinstance(document, dict):
                raise RefusedCaseError(Status.SUBDOC_PATH_MISMATCH)
            if step.name not in document:
                raise RefusedCaseError(Status.SUBDOC_PATH_ENOENT)
            document = document[step.name]
        else:
            if not isinstance(document, list):
                raise RefusedCaseError(Status.SUBDOC_PATH_MISMATCH)
            if not -len(document) <= step < len(document):
                raise RefusedCaseError(Status.SUBDOC_PATH_ENOENT)
            document = document[step]
    return document


def has(document: Any, path: Path) -> bool:
    try:
        walk(document, path)
    except RefusedCaseError as refused:
        if refused.status == Status.SUBDOC_PATH_MISMATCH:
            raise
        return False
    return True


def make_parents(document: Any, path: Path, makes: bool) -> Any:
    """Return the object that holds the last step of a path that does not exist."""
    for level in range(len(path)):
        if not has(document, path[:level]):
            if not makes or any(isinstance(step, int) for step in path[level - 1 :]):
                raise RefusedCaseError(Status.SUBDOC_PATH_ENOENT)
            walk(document, path[: level - 1])[path[level - 1].name] = {}  # type: ignore[union-attr]
    parent = walk(document, path[:-1])
    if isinstance(parent, list) and isinstance(path[-1], int):
        raise RefusedCaseError(Status.SUBDOC_PATH_ENOENT)
    if not isinstance(parent, dict):
        raise RefusedCaseError(Status.SUBDOC_PATH_MISMATCH)
    return parent


def put(document: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    parent, step = walk(document, path[:-1]), path[-1]
    parent[step.name if isinstance(step, Key) else step] = value
    return document


def model_value(text: bytes, levels: int) -> Any:
    try:
        value = loads(text)
    except ValueError:
        raise RefusedCaseError(Status.SUBDOC_VALUE_CANTINSERT) from None
    if levels + depth(value) > DEPTH_MAX:
        raise RefusedCaseError(Status.SUBDOC_VALUE_ETOODEEP)
    return value


def model_items(text: bytes, levels: int) -> list[Any]:
    items: list[Any] = model_value(b"[" + text + b"]", levels)
    if not items:
        raise RefusedCaseError(Status.SUBDOC_VALUE_CANTINSERT)
    return items


def model_store(name: str, document: Any, path: Path, text: bytes, makes: bool) -> Any:
    if not path:
        raise RefusedCaseError(Status.SUBDOC_VALUE_CANTINSERT)
    value = model_value(text, len(path))
    if name != "replace" and isinstance(path[-1], int):
        raise RefusedCaseError(Status.SUBDOC_PATH_EINVAL)
    if has(document, path):
        if name == "dict_add":
            raise RefusedCaseError(Status.SUBDOC_PATH_EEXISTS)
        return put(document, path, value)
    if name == "replace":
        raise RefusedCaseError(Status.SUBDOC_PATH_ENOENT)
    make_parents(document, path, makes)[path[-1].name] = value  # type: ignore[union-attr]
    return document


def model_array(name: str, document: Any, path: Path, text: bytes, makes: bool) -> Any:
    items = model_items(text, len(path))
    if name == "add_unique" and (len(items) != 1 or isinstance(items[0], dict | list)):
        raise RefusedCaseError(Status.SUBDOC_VALUE_CANTINSERT)
    if not has(document, path):
        if not makes:
            raise RefusedCaseError(Status.SUBDOC_PATH_ENOENT)
        parent = make_parents(document, path, makes)
        parent[path[-1].name] = items  # type: ignore[union-attr]
        return document
    array = walk(document, path)
    if not isinstance(array, list):
        raise RefusedCaseError(Status.SUBDOC_PATH_MISMATCH)
    if name == "add_unique":
        if any(isinstance(each, dict | list) for each in array):
            raise RefusedCaseError(Status.SUBDOC_PATH_MISMATCH)
        if items[0] in array:
            raise RefusedCaseError(Status.SUBDOC_PATH_EEXISTS)
    array[:] = items + array if name == "push_first" else array + items
    return document


def model_insert(document: Any, path: Path, text: bytes) -> Any:
    if not path or not isinstance(path[-1], int) or path[-1] < 0:
        raise RefusedCaseError(Status.SUBDOC_PATH_EINVAL)
    items = model_items(text, len(path) - 1)
    array = walk(document, path[:-1])
    if not isinstance(array, list):
        raise RefusedCaseError(Status.SUBDOC_PATH_MISMATCH)
    if path[-1] > len(array):
        raise RefusedCaseError(Status.SUBDOC_PATH_ENOENT)
    array[path[-1] : path[-1]] = items
    return document


def model_counter(document: Any, path: Path, text: bytes, makes: bool) -> Any:
    if not re.fullmatch(rb"-?[1-9][0-9]*", text) or not INT64_MIN <= int(text) <= INT64_MAX:
        raise RefusedCaseError(Status.SUBDOC_DELTA_EINVAL)
    if not path:
        raise RefusedCaseError(Status.SUBDOC_PATH_MISMATCH)
    if not has(document, path):
        if isinstance(path[-1], int):
            raise RefusedCaseError(Status.SUBDOC_PATH_ENOENT)
        make_parents(document, path, makes)[path[-1].name] = Number(text.decode())
        return document
    number = walk(document, path)
    if not isinstance(number, Number) or not re.fullmatch("-?[0-9]+", number.text):
        raise RefusedCaseError(Status.SUBDOC_PATH_MISMATCH)
    if not INT64_MIN <= int(number.text) <= INT64_MAX:
        raise RefusedCaseError(Status.SUBDOC_NUM_ERANGE)
    total = int(number.text) + int(text)
    if not INT64_MIN <= total <= INT64_MAX:
        raise RefusedCaseError(Status.SUBDOC_VALUE_CANTINSERT)
    return put(document, path, Number(str(total)))


def model(name: str, document: Any, path: Path, text: bytes, makes: bool) -> Any:
    """Return the changed document, or what a look-up finds."""
    document = deepcopy(document)
    if name in {"dict_add", "dict_upsert", "replace"}:
        return model_store(name, document, path, text, makes)
    if name in {"push_last", "push_first", "add_unique"}:
        return model_array(name, document, path, text, makes)
    if name == "insert":
        return model_insert(document, path, text)
    if name == "counter":
        return model_counter(document, path, text, makes)
    if name == "delete":
        if not path:
            raise RefusedCaseError(Status.SUBDOC_VALUE_CANTINSERT)
        walk(document, path)
        parent, step = walk(document, path[:-1]), path[-1]
        del parent[step.name if isinstance(step, Key) else step]
        return document
    found = walk(document, path)
    if name == "count" and not isinstance(found, dict | list):
        raise RefusedCaseError(Status.SUBDOC_PATH_MISMATCH)
    return found if name == "get" else len(found) if name == "count" else None


# -- cases -----------------------------------------------------------------------------------------

NAMES: Final = ("a", "b", "ab", "a.b", "a`b", 'q"', "\\", "é", "x[0]", "\n", "long name " * 3)
NUMBERS: Final = (
    "0", "-0", "1", "12", "-7", "1.0", "1.50", "1e5", "1E+05", "-0.0", "123456789012345678901234",
    "0.1000000000000000055511151231257827", str(INT64_MAX), str(INT64_MIN), str(INT64_MAX + 1),
)  # fmt: skip
SCALARS: Final = ("null", "true", "false", '""', '"a"', '"{"', '"\\"a\\":1"', '"\\u00e9"', '"é,]"')


def gap_of(draw: random.Random) -> str:
    return draw.choice(("", "", "", "", " ", "\n\t "))


def text_of(draw: random.Random, levels: int = 4) -> str:
    """A JSON text, with whitespace anywhere and keys escaped in several ways."""
    kind = draw.randrange(10 if levels else 4)
    if kind < 4:
        return draw.choice(NUMBERS + SCALARS)
    gap = gap_of(draw)
    count = draw.randrange(5)
    if kind < 7:
        items = [text_of(draw, levels - 1) for _ in range(count)]
        return "[" + gap + (gap + "," + gap).join(items) + gap + "]"
    is_ascii = draw.random() < 0.5
    members = [
        json.dumps(name, ensure_ascii=is_ascii) + gap + ":" + gap + text_of(draw, levels - 1)
        for name in draw.sample(NAMES, count)
    ]
    return "{" + gap + (gap + "," + gap).join(members) + gap + "}"


def path_text(steps: list[str | int]) -> str:
    """The path of these steps, as a client writes it."""
    text = ""
    for step in steps:
        if isinstance(step, int):
            text += f"[{step}]"
            continue
        name = json.dumps(step, ensure_ascii=False)[1:-1]
        if re.search(r"[.\[\]`]", name):
            name = "`" + name.replace("`", "``") + "`"
        text += ("." if text else "") + name
    return text


VALUES: Final = ("", " ", "1,2", "[1],[2]", "1],[2", '1,"k":2', "01", "tru", "1 2")
DELTAS: Final = ("1", "-1", "5", "0", str(INT64_MIN), str(INT64_MAX))


def steps_in(draw: random.Random, text: str | bytes) -> list[str | int]:
    """The steps of a path that exists in a document."""
    steps: list[str | int] = []
    here = loads(text)
    for _ in range(draw.randrange(6)):
        if not draw.randrange(10) or not isinstance(here, dict | list) or not here:
            break
        if isinstance(here, list):
            index = draw.randrange(len(here))
            steps.append(draw.choice((index, index, -1)))
        else:
            steps.append(draw.choice(sorted(here)))
        here = here[steps[-1]]
    return steps


def case_of(draw: random.Random) -> tuple[str, bytes, bytes, bytes, bool]:
    """Operation, document, path, value, whether parents are made."""
    gap = gap_of(draw)
    text = text_of(draw)
    while text[0] not in "{[":
        text = text_of(draw)
    steps = steps_in(draw, text)
    if not draw.randrange(3):
        more = (draw.choice((draw.choice(NAMES), draw.randint(-1, 5))) for _ in range(3))
        steps += [*more][: draw.randint(1, 3)]
    name = draw.choice((*LOOKUPS, *MUTATIONS))
    value = draw.choice(DELTAS) if name == "counter" else text_of(draw, 2)
    if not draw.randrange(4):
        value = draw.choice(VALUES)
    document = (gap + text + gap).encode()
    return name, document, path_text(steps).encode(), value.encode(), draw.random() < 0.5


def run(name: str, document: bytes, path: Path, value: bytes, makes: bool = False) -> bytes:
    """Run an operation; return what it finds, or the changed document."""
    if name in LOOKUPS:
        return looked_up(name, document, path)
    return changed(name, document, path, value, makes)


def looked_up(name: str, document: bytes, path: Path) -> bytes:
    """Return what a look-up finds. Raises SubdocError."""
    found = run_through(all_found(document, [path]))[0]
    return bytes(LOOKUPS[name](found))


def changed(name: str, document: bytes, path: Path, value: bytes, makes: bool = False) -> bytes:
    """Return the changed document. Raises SubdocError."""
    mutate = MUTATIONS[name]
    new = run_through(new_value(mutate, path, value))
    wanted = [value.strip()] if name == "add_unique" else [None]
    found = run_through(all_found(document, [path], wanted, DEPTH_MAX))[0]
    return mutate(found, new, makes).applied(document)


def check(name: str, document: bytes, path_bytes: bytes, value: bytes, makes: bool) -> None:
    """Hold one operation against the model. Raises AssertionError."""
    path = parse_path(path_bytes)
    before = loads(document)
    try:
        expected: Any = model(name, before, path, value, makes)
    except RefusedCaseError as refused:
        expected = refused.status
    try:
        if name in LOOKUPS:
            found = looked_up(name, document, path)
            got: Any = loads(found) if name == "get" else int(found) if name == "count" else None
        else:
            after = changed(name, document, path, value, makes)
            got = loads(after)
            if name == "replace":
                undo = looked_up("get", document, path)
                assert changed("replace", after, path, undo) == document
    except SubdocError as error:
        got = error.status
    assert got == expected, (name, document, path_bytes, value, makes, got, expected)


def request_of(draw: random.Random) -> tuple[bytes, list[Operation]]:
    """A document, and the changes of one request. Many paths have a beginning in common."""
    document = case_of(draw)[1]
    known = [path_text(steps_in(draw, document)).encode() for _ in range(4)]
    found: list[Operation] = []
    for _ in range(draw.randint(2, OPERATIONS_MAX)):
        name, _, path, value, _ = case_of(draw)
        while name in LOOKUPS:
            name = draw.choice([*MUTATIONS])
        if draw.random() < 0.7:
            path = draw.choice([*known, *known, b"a", b"a.b", b"[0]", b"[-1]", b""])
            path = draw.choice(
                (path, path, path + b"[0]", path + b"[1]", path + b".b", path + b".a")
            )
        if draw.random() < 0.6:
            value = draw.choice((b"1", b"2", b'"a"', b"-7"))
        opcode, traits = _TRAITS[name]
        flags = MKDIR_P if draw.random() < 0.5 and traits.path_flags & MKDIR_P else 0
        found.append(Operation(opcode, traits, flags, path, value))
    return document, found


def check_request(document: bytes, asked: list[Operation]) -> int:
    """Hold a request against its operations one by one; return how many of them succeeded. Those
    that would be refused are left out. Raises AssertionError.
    """
    expected, sound = document, []
    for operation in asked:
        name = _NAMES[operation.opcode]
        path, makes = operation.path, bool(operation.flags & MKDIR_P)
        status = 0
        try:
            after = changed(name, expected, parse_path(path), operation.value, makes)
        except SubdocError as error:
            status = int(error.status)
        draft = Draft(b"", document, 1)
        got = _status_of(draft, [*sound, operation])
        assert (got, draft.index) == (status, len(sound)), (document, sound, operation, status, got)
        if not status:
            sound.append(operation)
            expected = after
            assert bytes(draft.body) == expected, (document, sound, draft.body, expected)
    return len(sound)


def _status_of(draft: Draft, asked: list[Operation]) -> int:
    """Run a request on a document; return its status."""
    facts = ChangeFacts(0, 0, 0)
    try:
        run_through(draft.change(asked, facts, _no_facts, makes_parents=False))
    except SubdocError as error:
        return int(error.status)
    return 0


def _no_facts() -> DocumentFacts:
    raise AssertionError("there are no macros")


_NAMES: Final[dict[int, str]] = {
    opcode: name
    for opcode, traits in subdoc_request.MUTATIONS.items()
    for name, run_one in MUTATIONS.items()
    if traits.run is run_one
}
_TRAITS: Final = {
    name: (opcode, subdoc_request.MUTATIONS[opcode]) for opcode, name in _NAMES.items()
}


def soak(wanted: int, number: int) -> int:
    """Check this many cases from the one with this number on. A failing case names its number."""
    for checked in range(wanted):
        case = case_of(random.Random(number + checked))
        try:
            check(*case)
            check_request(*request_of(random.Random(number + checked)))
        except BaseException:
            print(f"\ncase {number + checked} failed: {case}")
            raise
        if checked % 1_000 == 999:
            print(f"\r{checked + 1:,} of {wanted:,} cases", end="", flush=True)
    print(f"\n{wanted:,} cases: the model and the operations agree")
    return 0
