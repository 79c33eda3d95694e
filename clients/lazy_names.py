"""Names of a package that are imported when they are first used.

A package that names its public classes in `__init__` would otherwise import all of their modules:
`dcpctl get` would pay for asyncio.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package. `names`: module in the package -> its public names,
    separated by spaces. Raises AttributeError for other names.
    """
    module_of = {name: module for module, line in names.items() for name in line.split()}

    def get(name: str) -> Any:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{module}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
