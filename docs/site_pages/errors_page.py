"""docs/errors.md, from the tables of statuses, exceptions and exit codes."""

from __future__ import annotations

from clients import errors
from clients.cli import dcpctl
from dcp.server.main import ExitCode
from dcp.wire.status import ERROR_TABLE

HEAD = """# Errors

Generated from the code by `scripts/pages`; do not edit.

An error says what happened, where, why, and what to try. This page lists what programs look at:
statuses of the protocol, Python exceptions, and exit codes.
[troubleshooting.md](troubleshooting.md) begins with symptoms.
"""

EXCEPTIONS_HEAD = """All are subclasses of `DcpdError`. `error.retry` says whether the same
request may be sent again, and `error.hint` what to try. A write that may have been applied raises
`AmbiguousWriteError`. After any other error of a write nothing was changed.

"""

ATTRIBUTES = {
    "item-only": "concerns this document only; the connection is fine",
    "invalid-input": "the request is wrong; the same request fails again",
    "retry-now": "send it again",
    "retry-later": "send it again after a pause",
    "temp": "temporary; nothing was changed",
    "fetch-config": "get the partition map again, then send it to the right node",
    "conn-state-invalidated": "log in or select the bucket again, or reconnect",
    "auth": "about the login",
    "support": "the server does not have it, or the user may not use it",
    "special-handling": "a part of the protocol, not a failure",
    "success": "not a failure",
    "internal": "a fault of the server or its data; its log says more",
    "dcp": "about change streams",
    "subdoc": "about sub-documents",
    "item-locked": "the document is locked for a while",
}

DCPCTL_CODES = {
    dcpctl.EXIT_OK: "done",
    dcpctl.EXIT_FAILED: "failed; stderr says why",
    dcpctl.EXIT_USAGE: "wrong usage",
    dcpctl.EXIT_NOT_FOUND: "not found",
    dcpctl.EXIT_CONFLICT: "conflict: it exists, or the CAS differs",
    dcpctl.EXIT_TIMEOUT: "no answer in time",
    dcpctl.EXIT_CONNECT: "cannot connect, or the connection broke",
    dcpctl.EXIT_AUTH: "not authorized",
    dcpctl.EXIT_PARTIAL: "done in part; the same command continues",
    dcpctl.EXIT_AMBIGUOUS: "a write got no answer: it may have been done, or not",
    dcpctl.EXIT_UNAVAILABLE: "not possible now: the cluster's metadata store is away, or the "
    "server starts; try again",
    dcpctl.EXIT_INTERRUPTED: "Ctrl-C",
}

DCPD_CODES = {
    ExitCode.STOPPED: "stopped by a signal, or removed from its cluster",
    ExitCode.FAILED: "failed; the log says why",
    ExitCode.USAGE: "wrong usage or settings, or another address than loopback without users",
    ExitCode.FOLDER: "the data folder cannot be used: in use, not a dcpd folder, unknown format; "
    "or the node may not join its cluster",
    ExitCode.DAMAGED: "data is damaged",
    ExitCode.PORT: "a port cannot be used",
    ExitCode.META_STORE: "the metadata store of the cluster to be joined does not answer; start it "
    "again when it does",
}


def exception_of(status: int) -> str:
    """Return the name of the Python exception for a status."""
    return errors._CLASSES.get(status, errors.ServerError).__name__  # noqa: SLF001


def summary(error: type[errors.DcpdError]) -> str:
    """Return the first paragraph of a class's docstring, in one line."""
    return " ".join((error.__doc__ or "").split("\n\n")[0].split())


def exceptions(error: type[errors.DcpdError]) -> list[type[errors.DcpdError]]:
    """Return a class and those below it, in the order of their definition."""
    found = (each for child in error.__subclasses__() for each in exceptions(child))
    return list(dict.fromkeys([error, *found]))  # one class has two parents


def statuses() -> list[str]:
    """Return the section on the protocol's statuses."""
    lines = [
        "\n## Statuses of the protocol\n\n",
        "Attributes come with GET_ERROR_MAP. With them a client can handle unknown statuses.\n",
        "It leaves out codes above 0x7fff, which are between nodes: the Java SDK reads 16 bits\n",
        "with a sign, and would discard the whole map.\n\n",
        "| attribute | meaning |\n|---|---|\n",
    ]
    used = {name for _, _, names in ERROR_TABLE.values() for name in names}
    assert used == set(ATTRIBUTES), used ^ set(ATTRIBUTES)
    lines += [f"| {name} | {meaning} |\n" for name, meaning in ATTRIBUTES.items()]
    lines += ["\n| status | name | meaning | attributes | Python |\n|---|---|---|---|---|\n"]
    for status, (name, text, names) in ERROR_TABLE.items():
        attributes = ", ".join(names)
        lines.append(
            f"| 0x{status:02x} | {name} | {text} | {attributes} | `{exception_of(status)}` |\n"
        )
    return lines


def markdown() -> str:
    """Return the page."""
    lines = [HEAD, *statuses()]
    lines += [
        "\n## Python exceptions\n\n",
        EXCEPTIONS_HEAD,
        "| exception | meaning | what to try |\n|---|---|---|\n",
    ]
    lines += [
        f"| `{error.__name__}` | {summary(error)} | {error.default_hint} |\n"
        for error in exceptions(errors.DcpdError)
        if error.__module__ == errors.__name__
    ]
    for program, codes in (("dcpctl", DCPCTL_CODES), ("dcpd", DCPD_CODES)):
        lines += [f"\n## Exit codes of {program}\n\n", "| code | meaning |\n|---|---|\n"]
        lines += [f"| {code:d} | {meaning} |\n" for code, meaning in codes.items()]
    return "".join(lines)
