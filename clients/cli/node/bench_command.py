"""dcpctl bench: how fast is this server, from here? A table, and a histogram of latencies."""

from __future__ import annotations

from typing import Any, Final

import click

from clients.cli.dcpctl import EXIT_FAILED, EXIT_OK, Target, help_text, time_of, with_target
from clients.cli.node.answers import AnswerError
from clients.cli.node.generator import Load, Measured, run
from clients.cli.output import write_json, write_raw
from clients.errors import ConnectError
from clients.operation import DURABILITY_NAMES, DurabilityChoice, durability_of

BUSY_SHARE: Final = 0.9
"""Of a core: above it the generator may be what is slow."""
ROWS: Final = 12
BAR: Final = 40
"""Rows and columns of a histogram."""
_COLUMNS: Final = (
    ("verb", ""), ("ops_per_s", "ops/s"), ("mib_per_s", "MiB/s"), ("p50_ms", "p50 ms"),
    ("p90_ms", "p90 ms"), ("p99_ms", "p99 ms"), ("p99.9_ms", "p99.9 ms"), ("max_ms", "max ms"),
    ("errors", "errors"), ("generator_cpu", "generator"),
)  # fmt: skip
"""Name in JSON, heading."""
_PERCENTS: Final = {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99, "p99.9_ms": 99.9, "max_ms": 100}


@click.command(
    "bench",
    help=help_text(
        "Measure SETs, then GETs. It writes its own keys once, measures, and deletes them again. A"
        " latency is that of a whole batch of --in-flight operations; with --rate it counts from"
        " when the batch was due, so a pause of the server counts for all that it delayed. The last"
        " column is the share of a core that dcpctl itself took: near 100 % the server could do"
        " more. Consumers see the changes; do not run it beside users who must not wait.",
        "dcpctl bench",
        "dcpctl bench --connections 16 --in-flight 64       # throughput",
        "dcpctl bench --in-flight 1 --connections 1         # latency of one client",
        "dcpctl bench --rate 5000                           # latency at a load",
        "dcpctl bench set --durability majority --seconds 30s -o json",
    ),
)
@click.argument("verbs", metavar="[set|get]...", nargs=-1, type=click.Choice(["set", "get"]))
@click.option(
    "--seconds",
    type=time_of,
    default="5s",
    show_default=True,
    metavar="TIME",
    help="How long each.",
)
@click.option(
    "--connections", type=click.IntRange(1, 1000), default=8, show_default=True, metavar="N"
)
@click.option(
    "--in-flight", type=click.IntRange(1, 4096), default=1, show_default=True, metavar="N",
    help="Operations that a connection sends before it waits for their answers.",
)  # fmt: skip
@click.option(
    "--keys", type=click.IntRange(1, 1_000_000), default=10_000, show_default=True, metavar="N",
    help="Different keys.",
)  # fmt: skip
@click.option(
    "--size", type=click.IntRange(0, 1 << 20), default=128, show_default=True, metavar="BYTES",
    help="Size of a value.",
)  # fmt: skip
@click.option(
    "--prefix", default="dcpctl-bench:", show_default=True, metavar="TEXT",
    help="Prefix of the keys. Documents that have it are overwritten and deleted.",
)  # fmt: skip
@click.option(
    "--durability", type=click.Choice(DURABILITY_NAMES), default="none", show_default=True,
    help="Which copies have a SET before its answer.",
)  # fmt: skip
@click.option(
    "--rate", type=click.FloatRange(0.1, 10_000_000), metavar="N",
    help="Operations a second, over all connections. Default: as fast as they are answered.",
)  # fmt: skip
@click.option("--keep", is_flag=True, help="Do not delete the keys.")
@with_target
def bench(
    *,
    target: Target,
    verbs: tuple[str, ...],
    durability: DurabilityChoice,
    keep: bool,
    seconds: float,
    rate: float | None,
    **numbers: Any,
) -> int:
    """Measure how fast the server is."""
    once = Load(
        verb="set", seconds=None, level=durability_of("none"), timeout_s=target.timeout_s, **numbers
    )
    whole = once._replace(in_flight=max(once.in_flight, 64))
    mode = target.rows_mode
    rows, shown, errors = [], [], 0
    try:
        _say(f"writing {once.keys} keys, {once.prefix}0000000000 and so on")
        _run(target, whole)
        for verb in verbs or ("set", "get"):
            level = durability_of(durability if verb == "set" else "none")
            _say(f"{verb} for {seconds:g} s over {once.connections} connections")
            measured = _run(
                target, once._replace(verb=verb, seconds=seconds, level=level, rate=rate)
            )
            rows.append(figures_of(verb, measured, once.size))
            shown.append((verb, measured))
            errors += measured.errors
    finally:
        if not keep:
            _run(target, whole._replace(verb="del"))
    if mode == "json":
        for row, (_, measured) in zip(rows, shown, strict=True):
            buckets = measured.latencies.rows(ROWS)
            write_json(
                {
                    **row, "connections": once.connections, "in_flight": once.in_flight,
                    "size": once.size, "seconds": round(measured.seconds, 3),
                    "durability": durability, "first_error": measured.first_error,
                    "rate": rate, "not_sent": measured.not_sent,
                    "histogram_us": [list(bucket) for bucket in buckets],
                }
            )  # fmt: skip
        return EXIT_FAILED if errors else EXIT_OK
    target.show_rows(_COLUMNS, [[_cell(name, row[name]) for name, _ in _COLUMNS] for row in rows])
    if mode == "table":
        for verb, measured in shown:
            write_raw(histogram_text(verb, once.in_flight, measured).encode())
    for verb, measured in shown:
        if measured.errors:
            _say(
                f"{measured.errors} of {measured.operations} {verb} failed: {measured.first_error}"
            )
        if measured.not_sent:
            _say(f"{verb}: {measured.not_sent} were due and not sent: the rate is too high")
        if measured.cpu_share > BUSY_SHARE:
            _say(f"{verb}: dcpctl itself was busy all the time, so the server may be faster")
    return EXIT_FAILED if errors else EXIT_OK


def _run(target: Target, load: Load) -> Measured:
    try:
        return run(target.address, load)
    except AnswerError as error:
        raise ConnectError(f"the server sent what is no answer: {error}") from error


def figures_of(verb: str, measured: Measured, size: int) -> dict[str, Any]:
    """Return the row of a measurement; `size` of a value, in bytes."""
    rate = measured.operations / measured.seconds
    percents = {
        name: measured.latencies.percentile(percent) / 1000 for name, percent in _PERCENTS.items()
    }
    return {
        "verb": verb, "ops_per_s": round(rate), "mib_per_s": round(rate * size / (1 << 20), 2),
        **percents, "errors": measured.errors, "generator_cpu": round(measured.cpu_share, 2),
    }  # fmt: skip


def _cell(name: str, value: Any) -> str:
    if name == "ops_per_s":
        return f"{value:,}"
    if name == "generator_cpu":
        return f"{100 * value:.0f} %"
    return f"{value:.2f}" if name.endswith("_ms") else str(value)


def histogram_text(verb: str, in_flight: int, measured: Measured) -> str:
    """Return the distribution of latencies as bars."""
    of = f"a batch of {in_flight}" if in_flight > 1 else "an operation"
    buckets = measured.latencies.rows(ROWS)
    most = max((number for _, _, number in buckets), default=1)
    total = max(1, len(measured.latencies))
    lines = [f"\n{verb}: latency of {of}, ms"]
    for begin, _, number in buckets:
        bar = "█" * round(BAR * number / most) or ("▏" if number else "")
        lines.append(f"{begin / 1000:>9.2f}  {bar:<{BAR}} {100 * number / total:6.2f} %")
    return "\n".join(lines) + "\n"


def _say(text: str) -> None:
    click.echo(f"dcpctl: {text}", err=True)
