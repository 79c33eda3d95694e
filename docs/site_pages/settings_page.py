"""docs/settings.md, from the table of settings."""

from __future__ import annotations

from dcp.server.config.setting_values import (
    AUTO,
    Option,
    duration_text,
    read_count,
    read_duration,
    read_size,
    read_size_or_auto,
    size_text,
)
from dcp.server.config.sources import OPTIONS, default_text

HEAD = """# Settings

Generated from `dcp/server/config/settings.py` by `scripts/pages`; do not edit.

Each setting is an option of `dcpd`, an environment variable and a key of a TOML file
(`--config FILE`). An option wins over the variable, and the variable wins over the file:

| where | how `admin_port` is written |
|---|---|
| command line | `--admin-port 8091` |
| environment | `DCPD_ADMIN_PORT=8091` |
| TOML file | `admin_port = 8091` |

Sizes take a unit: `64MiB`, `1GB`. Durations too: `250ms`, `10s`, `30m`, `3d`. A value that is not
allowed is refused at start, with the reason.

| setting | default | allowed | meaning |
|---|---|---|---|
"""


def allowed(option: Option) -> str:
    """Return what a setting may be, in words."""
    if option.choices:
        return ", ".join(option.choices)
    text = {
        read_size: size_text,
        read_size_or_auto: size_text,
        read_duration: duration_text,
        read_count: "{:.0f}".format,
    }.get(
        option.parse  # type: ignore[call-overload]
    )
    if text is None:
        return option.metavar
    spread = f"{text(option.minimum)} to {text(option.maximum)}"
    if option.parse is read_size_or_auto:
        spread = f"{AUTO}, {spread}"
    return f"{spread}, or 0 ({option.zero_means})" if option.zero_means else spread


def markdown() -> str:
    """Return the page."""
    rows = []
    for key, (_, option) in OPTIONS.items():
        meaning = option.doc.replace("|", "\\|")
        rows.append(f"| `{key}` | {default_text(key)} | {allowed(option)} | {meaning} |\n")
    return HEAD + "".join(rows)
