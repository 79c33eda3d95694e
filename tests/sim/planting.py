"""How a fault of the product is put in for the time of a run: names are replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sim.cluster_node import ClusterNode


class Replaced(NamedTuple):
    """A name of a module or class, and what stands there during a run."""

    owner: Any
    name: str
    new: Any


class ClusterBug(NamedTuple):
    """See the module."""

    what: str
    replaced: tuple[Replaced, ...] = ()
    node: type[ClusterNode] | None = None
    act: str = ""
    """The act that it takes; "": what seeds have."""
    nodes: int = 3
    """The smallest cluster that shows it."""


@contextmanager
def all_replaced(items: Iterable[Replaced]) -> Iterator[None]:
    """Let other things stand under these names as long as the context lasts."""
    with ExitStack() as stack:
        for owner, name, new in items:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)
        yield
