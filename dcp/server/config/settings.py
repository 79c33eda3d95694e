"""The table of settings: name, type, default, and with `Option` what it means and what is allowed.

The command line, the environment, the TOML file, `dcpd --help` and the messages are all made from
it (`dcp.server.config.sources`). A key is a field's name; a field that ends in `_s` is a duration,
its key has no `_s` because its value carries the unit (`sync_interval = "250ms"`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from dcp.server.config.setting_values import (
    Option,
    read_choice,
    read_count,
    read_duration,
    read_file,
    read_host,
    read_name_or_off,
    read_names,
    read_path,
    read_size,
)
from dcp.wire.frame import MAX_VALUE_BYTES
from vbucket.model.ids import CAS_DRIFT_NS

BUFFERED_VALUES_MIN: Final = 2
"""Longest values that the buffers of all connections hold at least."""
ADMIN_CONNECTIONS_MIN: Final = 16
"""With fewer, one address could not even log in: it gets half of an eighth."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one server. Sizes are bytes, durations seconds."""

    host: Annotated[
        str,
        Option(
            "Address to listen on. Other than loopback only once a user was added.",
            read_host,
            "ADDRESS",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, Option("Key-value port; 0 picks a free one.", read_count, "PORT", 0, 65535)
    ] = 11210
    admin_port: Annotated[
        int,
        Option(
            "Port of the admin interface (HTTP); 0 picks a free one, and so does the default where "
            "it is taken.",
            read_count,
            "PORT",
            0,
            65535,
        ),
    ] = 8091
    admin_hosts: Annotated[
        tuple[str, ...],
        Option(
            "Names that clients of the admin interface may use for this server, separated by "
            "commas; .example.com: all below it too, *: any. localhost and IP addresses always "
            "work, and over TLS any name.",
            read_names,
            "NAMES",
        ),
    ] = ()
    tls_port: Annotated[
        int,
        Option(
            "Key-value port with TLS, where --tls-cert is given; 0 picks a free one.",
            read_count,
            "PORT",
            0,
            65535,
        ),
    ] = 11207
    admin_tls_port: Annotated[
        int,
        Option(
            "Port of the admin interface with TLS (HTTPS), where --tls-cert is given; 0 picks a "
            "free one.",
            read_count,
            "PORT",
            0,
            65535,
        ),
    ] = 18091
    tls_cert: Annotated[
        Path | None,
        Option(
            "Certificate (PEM, then those up to its CA): opens the TLS ports. Read again when it "
            "changes, or at SIGHUP.",
            read_file,
            "FILE",
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        Option("Key of --tls-cert (PEM, unencrypted), unless it is in there.", read_file, "FILE"),
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        Option(
            "CA (PEM) that clients of the TLS ports need a certificate of; they still log in.",
            read_file,
            "FILE",
        ),
    ] = None
    tls_only: Annotated[
        Literal["on", "off"],
        Option(
            "on: the ports without TLS listen on loopback only, whatever --host says.",
            read_choice,
            "on|off",
            choices=("on", "off"),
        ),
    ] = "off"
    guest: Annotated[
        Literal["on", "off"],
        Option(
            "Whether guest/guest may log in from this machine.",
            read_choice,
            "on|off",
            choices=("on", "off"),
        ),
    ] = "on"
    anonymous: Annotated[
        Literal["on", "off"],
        Option(
            "Whether key-value clients of this machine need no login at all.",
            read_choice,
            "on|off",
            choices=("on", "off"),
        ),
    ] = "on"
    audit: Annotated[
        str,
        Option(
            "File of the audit log, in the data folder unless absolute; off writes none.",
            read_name_or_off,
            "FILE",
        ),
    ] = "audit.log"
    audit_bytes_max: Annotated[
        int,
        Option(
            "Size at which the audit log begins a new file; five full ones are kept.",
            read_size,
            "SIZE",
            4 << 10,
            1 << 40,
        ),
    ] = 16 << 20
    data: Annotated[
        Path,
        Option("Folder of the data; made when missing.", read_path, "DIR"),
    ] = Path("dcpd-data")
    durability: Annotated[
        Literal["commit", "interval", "none"],
        Option(
            "When an answer says 'stored': commit, after it is on disk; interval, at once, with a "
            "sync every --sync-interval; none, at once, the operating system writes when it likes.",
            read_choice,
            "WHEN",
            choices=("commit", "interval", "none"),
        ),
    ] = "commit"
    sync_interval_s: Annotated[
        float,
        Option("Time between syncs (durability interval).", read_duration, "TIME", 0.001, 3600),
    ] = 1.0
    memtable_bytes: Annotated[
        int,
        Option(
            "Changes held in memory before they are merged into the store.",
            read_size,
            "SIZE",
            1 << 20,
            64 << 30,
        ),
    ] = 64 << 20
    item_cache_bytes: Annotated[
        int,
        Option(
            "Memory for documents of the store, so that reading them again does not go there: 365 "
            "bytes for one of 128, for instance; 0: none.",
            read_size,
            "SIZE",
            1 << 20,
            16 << 30,
            zero_means="none",
        ),
    ] = 64 << 20
    expiry_interval_s: Annotated[
        float,
        Option(
            "Time between looks for documents whose time is over; 0: they expire when somebody "
            "asks for them.",
            read_duration,
            "TIME",
            0.01,
            3600,
            zero_means="none",
        ),
    ] = 1.0
    history_window_s: Annotated[
        float,
        Option(
            "How long a version can still be read after it was replaced: for rollbacks and history "
            "streams. 0 keeps none.",
            read_duration,
            "TIME",
            0,
            100 * 365 * 86400,
        ),
    ] = 3600.0
    history_bytes: Annotated[
        int,
        Option(
            "And how much of the disk they take at most, of all partitions together, those that "
            "wait for compaction included; the smaller of the two counts. 0 keeps none.",
            read_size,
            "SIZE",
            0,
            1 << 60,
        ),
    ] = 1 << 30
    purge_age_s: Annotated[
        float,
        Option(
            "Age at which a deletion is forgotten; a consumer that was away for longer starts "
            "anew. 0 forgets it with the next compaction.",
            read_duration,
            "TIME",
            0,
            100 * 365 * 86400,
        ),
    ] = 3 * 86400.0
    cas_drift_max_s: Annotated[
        float,
        Option(
            "How far ahead of this machine's clock a CAS from elsewhere may be (SET_WITH_META and "
            "its kin); one that is further is refused.",
            read_duration,
            "TIME",
            1,
            86400,
        ),
    ] = CAS_DRIFT_NS / 1e9
    compact_interval_s: Annotated[
        float,
        Option(
            "Time between looks for partitions that are worth compacting, besides those after each "
            "merge; 0: only `dcpctl compact` does it.",
            read_duration,
            "TIME",
            0.05,
            86400,
            zero_means="never",
        ),
    ] = 10.0
    write_wait_s: Annotated[
        float,
        Option(
            "How long writes wait while the store is behind the log; then they are refused "
            "(ETMPFAIL) until it has caught up. Reads and streams never wait for it.",
            read_duration,
            "TIME",
            0.0,
            3600,
        ),
    ] = 2.0
    store_silence_s: Annotated[
        float,
        Option(
            "How long the store process may say nothing while it has something to do, before it is "
            "killed and replaced.",
            read_duration,
            "TIME",
            2,
            86400,
        ),
    ] = 30.0
    map_size_bytes: Annotated[
        int,
        Option(
            "Address space that the store begins with; it takes no disk or memory before. It grows "
            "by itself where the disk has room.",
            read_size,
            "SIZE",
            64 << 20,
            1 << 46,
        ),
    ] = 1 << 40
    value_bytes_max: Annotated[
        int, Option("Longest value.", read_size, "SIZE", 1 << 10, MAX_VALUE_BYTES)
    ] = MAX_VALUE_BYTES
    connections_max: Annotated[
        int,
        Option(
            "Connections at a time; one more takes the place of the oldest without a login, and is "
            "refused where there is none.",
            read_count,
            "COUNT",
            1,
            1_000_000,
        ),
    ] = 10_000
    admin_connections_max: Annotated[
        int,
        Option(
            "Connections of the admin interface at a time, half of them from one address; beyond, "
            "one that waits is closed for the next. Half of them can be streams and dumps.",
            read_count,
            "COUNT",
            ADMIN_CONNECTIONS_MIN,
            100_000,
        ),
    ] = 256
    connections_per_user_max: Annotated[
        int,
        Option(
            "Key-value connections that one user may have; 0 is no limit.",
            read_count,
            "COUNT",
            0,
            1_000_000,
        ),
    ] = 0
    streams_max: Annotated[
        int, Option("Streams of one DCP connection.", read_count, "COUNT", 1, 1_000_000)
    ] = 1024
    receive_buffers_bytes_max: Annotated[
        int,
        Option(
            "Memory for incomplete packets and handshakes of all connections; where it is full, "
            "the one that has stood still for the longest time is closed.",
            read_size,
            "SIZE",
            1 << 20,
            1 << 40,
        ),
    ] = 256 << 20
    send_buffers_bytes_max: Annotated[
        int,
        Option(
            "Memory for what clients do not read, of all connections; where it is full, the one "
            "that has read nothing for the longest time is closed.",
            read_size,
            "SIZE",
            1 << 20,
            1 << 40,
        ),
    ] = 512 << 20
    login_body_bytes_max: Annotated[
        int,
        Option(
            "Largest packet body of a client that has not logged in.",
            read_size,
            "SIZE",
            1 << 10,
            MAX_VALUE_BYTES,
        ),
    ] = 64 << 10
    login_failures_max: Annotated[
        int,
        Option(
            "Wrong logins after which a connection is closed.", read_count, "COUNT", 1, 1_000_000
        ),
    ] = 5
    login_failures_per_minute: Annotated[
        int,
        Option(
            "Wrong logins of one user from one address within a minute; after them, and after ten "
            "times as many of one address, logins are refused until the minute is over.",
            read_count,
            "COUNT",
            1,
            1_000_000,
        ),
    ] = 20
    handshake_timeout_s: Annotated[
        float,
        Option(
            "A connection that has not logged in by then is closed; on the admin port, one whose "
            "TLS handshake, header or body takes longer.",
            read_duration,
            "TIME",
            0.1,
            3600,
        ),
    ] = 10.0
    idle_timeout_s: Annotated[
        float,
        Option(
            "A connection that sends nothing for so long is closed; 0 keeps it.",
            read_duration,
            "TIME",
            1,
            30 * 86400,
            zero_means="never",
        ),
    ] = 0.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Option(
            "Least important events that are logged.",
            read_choice,
            "LEVEL",
            choices=("debug", "info", "warning", "error"),
        ),
    ] = "info"
    log_format: Annotated[
        Literal["auto", "text", "json"],
        Option(
            "Form of the log on stderr; auto is text on a terminal and JSON otherwise.",
            read_choice,
            "FORM",
            choices=("auto", "text", "json"),
        ),
    ] = "auto"
