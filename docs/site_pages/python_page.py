"""The public names of the Python packages, for autodoc."""

from __future__ import annotations

import inspect
from importlib import import_module

from sphinx.ext.autodoc.mock import mock

NOT_INSTALLED = ("deltalake", "numpy", "pandas", "pyarrow", "pyspark")
"""What only the extra `spark` has. The site shows its names without it."""

SECTIONS = {
    "Key-value clients": ("dcpd", ("KvClient", "SyncKv", "ServerAddress", "parse_address")),
    "Consumers and mirrors": (
        "dcpd",
        ("Consumer", "ConsumerOptions", "SyncConsumer", "Mirror", "SyncMirror", "Group",
         "GroupMember", "Share", "Delivery", "Position", "ConsumerMetrics", "export_prometheus"),
    ),
    "Events": (
        "dcpd",
        ("Change", "Event", "Mutation", "Deletion", "Rollback", "SnapshotStart", "SnapshotEnd",
         "SeqnoAdvanced", "StreamOpened", "StreamEnded", "StreamFailed", "SystemEvent"),
    ),
    "Checkpoints": (
        "dcpd",
        ("CheckpointFile", "LmdbCheckpoint", "ServerCheckpoint", "MemoryCheckpoint", "Checkpoint",
         "CheckpointStore", "encode_position", "decode_position"),
    ),
    "Testing": ("dcpd.testing", None),
    "Spark": ("dcpd.spark", None),
}  # fmt: skip
"""Title -> module and public names; None: all of them. Every other public name of `dcpd` is an
error class, or goes under "Other names"."""


def sections() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return title -> module and names, so that every public name is there once."""
    found = {
        title: (module, tuple(names or import_module(module).__all__))
        for title, (module, names) in SECTIONS.items()
    }
    placed = {name for module, names in found.values() if module == "dcpd" for name in names}
    rest = [name for name in import_module("dcpd").__all__ if name not in placed]
    errors = tuple(name for name in rest if is_error(name))
    others = tuple(name for name in rest if not is_error(name))
    return found | {"Errors": ("dcpd", errors)} | {"Other names": ("dcpd", others)}


def is_error(name: str) -> bool:
    """Return whether a public name of `dcpd` is an error class."""
    value = getattr(import_module("dcpd"), name)
    return isinstance(value, type) and issubclass(value, Exception)


def kind_of(module: str, name: str) -> str:
    """Return what a name is. "data" is a type made of others, which has no docstring of its own."""
    with mock(list(NOT_INSTALLED)):
        value = getattr(import_module(module), name)
    if inspect.isclass(value) and value.__module__.startswith("clients."):
        return "exception" if issubclass(value, Exception) else "class"
    return "function" if inspect.isfunction(value) else "data"


def markdown() -> str:
    """Return a section for each group of names, with autodoc's directives."""
    parts = []
    for title, (module, names) in sections().items():
        if not names:
            continue
        parts += [f"## {title}", "", f"From `{module}`.", "", "```{eval-rst}"]
        for name in names:
            kind = kind_of(module, name)
            directive = "py:data" if kind == "data" else f"auto{kind}"
            parts += [f".. {directive}:: {module}.{name}", ""]
            if kind == "data":
                parts += [f"   :value: {getattr(import_module(module), name)!r}", ""]
        parts += ["```", ""]
    return "\n".join(parts)
