"""How a fault of the product is put in for the time of a run: names are replaced, or nodes are of
another type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple


class Replaced(NamedTuple):
    """A name of a module or class, and what stands there during a run."""

    owner: Any
    name: str
    new: Any


class Bug(NamedTuple):
    """See the module."""

    what: str
    replaced: tuple[Replaced, ...] = ()
    node: type[Any] | None = None
    """The type of the nodes that have it; None: the usual one."""
    act: str = ""
    """The act that it takes; "": what seeds have."""
    nodes: int = 3
    """The smallest cluster that shows it."""


def one(what: str, owner: Any, name: str, new: Any, *, nodes: int = 3, act: str = "") -> Bug:
    """Return a bug that replaces one name."""
    return Bug(what, (Replaced(owner, name, new),), nodes=nodes, act=act)


def answering(answer: object = None) -> Callable[..., Any]:
    """Return a function, or a method, that does nothing and answers this, whatever it is given."""

    def answered(*_args: object, **_named: object) -> object:
        return answer

    return answered


@contextmanager
def all_replaced(items: Iterable[Replaced]) -> Iterator[None]:
    """Let other things stand under these names as long as the context lasts."""
    with ExitStack() as stack:
        for owner, name, new in items:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)
        yield
