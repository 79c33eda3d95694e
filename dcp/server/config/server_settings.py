"""The settings of any server; `dcp.server.config.settings` adds those of clusters, and says how the
table is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from dcp.server.config.setting_values import (
    Option,
    read_bucket,
    read_choice,
    read_choice_or_auto,
    read_count,
    read_duration,
    read_file,
    read_host,
    read_name_or_off,
    read_names,
    read_path,
    read_size,
    read_size_or_auto,
)
from dcp.wire.frame import MAX_VALUE_BYTES
from vbucket.model.ids import CAS_DRIFT_NS

BUFFERED_VALUES_MIN: Final = 2
"""The buffers of all connections hold at least this many values of the longest size."""
ADMIN_CONNECTIONS_MIN: Final = 16
"""With fewer, one address could not even log in: it gets half of an eighth of them."""


SLOW_AFTER_S: Final = 0.1
"""Fifty times what a commit takes on an SSD. It is a bound of the histograms
(dcp.server.observe.meter)."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. Sizes are bytes, durations seconds."""

    host: Annotated[
        str,
        Option(
            "Address to listen on. Anything but loopback needs a user first.", read_host, "ADDRESS"
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, Option("Key-value port; 0 picks a free one.", read_count, "PORT", 0, 65535)
    ] = 11210
    admin_port: Annotated[
        int,
        Option(
            "Port of the admin interface (HTTP); 0 picks a free one, and so does the default if it "
            "is taken.",
            read_count,
            "PORT",
            0,
            65535,
        ),
    ] = 8091
    admin_hosts: Annotated[
        tuple[str, ...],
        Option(
            "Host names that clients of the admin interface may use for this server, separated by "
            "commas; .example.com includes all names below it, * allows any. localhost and IP "
            "addresses always work, and any name over TLS.",
            read_names,
            "NAMES",
        ),
    ] = ()
    tls_port: Annotated[
        int,
        Option(
            "Key-value port with TLS, if --tls-cert is given; 0 picks a free one.",
            read_count,
            "PORT",
            0,
            65535,
        ),
    ] = 11207
    admin_tls_port: Annotated[
        int,
        Option(
            "Port of the admin interface with TLS (HTTPS), if --tls-cert is given; 0 picks a free "
            "one.",
            read_count,
            "PORT",
            0,
            65535,
        ),
    ] = 18091
    tls_cert: Annotated[
        Path | None,
        Option(
            "Certificate (PEM, followed by those up to its CA). Opens the TLS ports. Read again "
            "when it changes, or at SIGHUP.",
            read_file,
            "FILE",
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        Option(
            "Key of --tls-cert (PEM, unencrypted), unless that file contains it.", read_file, "FILE"
        ),
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        Option(
            "CA (PEM). Clients of the TLS ports need a certificate from it; they still log in.",
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
    bucket: Annotated[
        str,
        Option("Name of the only bucket, which Couchbase clients select.", read_bucket, "NAME"),
    ] = "default"
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
    admin_password_file: Annotated[
        Path | None,
        Option(
            "File with the password of the first user, admin, who is added if there is no user "
            "yet. For containers, whose --host is reachable from the start.",
            read_file,
            "FILE",
        ),
    ] = None
    metrics_token: Annotated[
        Path | None,
        Option(
            "File with a token that may read /metrics without a login: Authorization: Bearer "
            "TOKEN. It has 16 characters or more. Read again when it changes.",
            read_file,
            "FILE",
        ),
    ] = None
    test_mode: Annotated[
        Literal["on", "off"],
        Option(
            "Shows the test bench in the web console, and allows faults on an address that other "
            "machines can reach. --test-mode alone means on.",
            read_choice,
            "on|off",
            choices=("on", "off"),
            flag_value="on",
        ),
    ] = "off"
    audit: Annotated[
        str,
        Option(
            "Audit log file, relative to the data folder unless absolute; off disables it.",
            read_name_or_off,
            "FILE",
        ),
    ] = "audit.log"
    audit_bytes_max: Annotated[
        int,
        Option(
            "Size at which the audit log starts a new file; five old ones are kept.",
            read_size,
            "SIZE",
            4 << 10,
            1 << 40,
        ),
    ] = 16 << 20
    data: Annotated[
        Path,
        Option("Data folder; created if missing.", read_path, "DIR"),
    ] = Path("dcpd-data")
    partitions: Annotated[
        int | None,
        Option(
            "Partitions of a new data folder. It keeps its number, and all nodes of a cluster have "
            "the same. auto: that of the folder, 1024 in a new one.",
            read_choice_or_auto,
            "NUMBER|auto",
            choices=("64", "128", "256", "512", "1024"),
        ),
    ] = None
    durability: Annotated[
        Literal["commit", "interval", "none"],
        Option(
            "When a write is answered. commit: when it is on disk. interval: at once, with a sync "
            "every --sync-interval. none: at once; the operating system decides when to write.",
            read_choice,
            "WHEN",
            choices=("commit", "interval", "none"),
        ),
    ] = "commit"
    sync_interval_s: Annotated[
        float,
        Option("Time between syncs with durability interval.", read_duration, "TIME", 0.001, 3600),
    ] = 1.0
    memtable_bytes: Annotated[
        int,
        Option(
            "Size of changes in memory at which they are merged into the store.",
            read_size,
            "SIZE",
            1 << 20,
            64 << 30,
        ),
    ] = 64 << 20
    item_cache_bytes: Annotated[
        int | None,
        Option(
            "Memory for documents of the store that were read or written recently. A document of "
            "128 bytes takes 365. 0: no cache. auto: an eighth of the memory that the process may "
            "use, limits of its cgroup included; at most 384MiB.",
            read_size_or_auto,
            "SIZE|auto",
            1 << 20,
            16 << 30,
            zero_means="none",
        ),
    ] = None
    expiry_interval_s: Annotated[
        float,
        Option(
            "Time between searches for expired documents; 0: they expire only when they are "
            "accessed.",
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
            "How long a replaced version is kept, for rollbacks and history streams. 0 keeps none.",
            read_duration,
            "TIME",
            0,
            100 * 365 * 86400,
        ),
    ] = 3600.0
    history_bytes: Annotated[
        int,
        Option(
            "Maximum disk space of replaced versions, of all partitions together, including those "
            "that wait for compaction. The smaller of --history-window and this counts. 0 keeps "
            "none.",
            read_size,
            "SIZE",
            0,
            1 << 60,
        ),
    ] = 1 << 30
    purge_age_s: Annotated[
        float,
        Option(
            "Age at which a deletion is forgotten. A consumer that was away for longer starts "
            "again at seqno 0. 0: forget it with the next compaction.",
            read_duration,
            "TIME",
            0,
            100 * 365 * 86400,
        ),
    ] = 3 * 86400.0
    cas_drift_max_s: Annotated[
        float,
        Option(
            "How far a CAS from elsewhere (SET_WITH_META and related commands) may be ahead of "
            "this machine's clock. A larger CAS is refused.",
            read_duration,
            "TIME",
            1,
            86400,
        ),
    ] = CAS_DRIFT_NS / 1e9
    compact_interval_s: Annotated[
        float,
        Option(
            "Time between searches for partitions worth compacting, in addition to one after each "
            "merge; 0: only `dcpctl compact` compacts.",
            read_duration,
            "TIME",
            0.05,
            86400,
            zero_means="never",
        ),
    ] = 10.0
    scrub_period_s: Annotated[
        float,
        Option(
            "In what time all that is stored is read once, to find damage before a client meets "
            "it. It takes at most a twentieth of a processor core, so much data may take longer. "
            "0: only `dcpctl scrub start` reads.",
            read_duration,
            "TIME",
            1,
            365 * 86400,
            zero_means="never",
        ),
    ] = 7 * 86400.0
    write_wait_s: Annotated[
        float,
        Option(
            "How long writes wait while the store is behind the log. Then they are refused "
            "(ETMPFAIL) until it has caught up. Reads and streams do not wait.",
            read_duration,
            "TIME",
            0.0,
            3600,
        ),
    ] = 2.0
    slow_after_s: Annotated[
        float,
        Option(
            "Commands, with what was sent along with them, and syncs of the log are slow from this "
            "time on. The web console shows the last 50.",
            read_duration,
            "TIME",
            0.001,
            3600,
        ),
    ] = SLOW_AFTER_S
    store_silence_s: Annotated[
        float,
        Option(
            "How long the store process may be silent during a task before it is killed and "
            "replaced.",
            read_duration,
            "TIME",
            2,
            86400,
        ),
    ] = 30.0
    map_size_bytes: Annotated[
        int,
        Option(
            "Initial address space of the store. It takes no disk or memory until used, and grows "
            "by itself while the disk has room.",
            read_size,
            "SIZE",
            64 << 20,
            1 << 46,
        ),
    ] = 1 << 40
    value_bytes_max: Annotated[
        int, Option("Maximum size of a value.", read_size, "SIZE", 1 << 10, MAX_VALUE_BYTES)
    ] = MAX_VALUE_BYTES
    oversized_set: Annotated[
        Literal["keep", "remove"],
        Option(
            "What a SET over --value-bytes-max does to the document that is there. remove: it is "
            "deleted, as in memcached.",
            read_choice,
            "WHAT",
            choices=("keep", "remove"),
        ),
    ] = "keep"
    connections_max: Annotated[
        int,
        Option(
            "Maximum open connections. One more replaces the oldest without a login, and is "
            "refused if there is none.",
            read_count,
            "COUNT",
            1,
            1_000_000,
        ),
    ] = 10_000
    admin_connections_max: Annotated[
        int,
        Option(
            "Maximum open connections to the admin interface, at most half of them from one "
            "address. One more replaces one that waits. At most half are streams and dumps.",
            read_count,
            "COUNT",
            ADMIN_CONNECTIONS_MIN,
            100_000,
        ),
    ] = 256
    connections_per_user_max: Annotated[
        int,
        Option(
            "Maximum key-value connections of one user; 0 is no limit.",
            read_count,
            "COUNT",
            0,
            1_000_000,
        ),
    ] = 0
    streams_max: Annotated[
        int, Option("Maximum streams of one DCP connection.", read_count, "COUNT", 1, 1_000_000)
    ] = 1024
    receive_buffers_bytes_max: Annotated[
        int,
        Option(
            "Memory for incomplete packets and handshakes of all connections. When it is full, the "
            "connection that has stood still the longest is closed.",
            read_size,
            "SIZE",
            1 << 20,
            1 << 40,
        ),
    ] = 256 << 20
    send_buffers_bytes_max: Annotated[
        int,
        Option(
            "Memory for data that clients have not read, of all connections. When it is full, the "
            "connection that has read nothing for the longest time is closed.",
            read_size,
            "SIZE",
            1 << 20,
            1 << 40,
        ),
    ] = 512 << 20
    login_body_bytes_max: Annotated[
        int,
        Option(
            "Maximum packet body before a client has logged in.",
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
            "Wrong logins allowed per minute for one user from one address, and ten times as many "
            "for one address. More logins are refused until the minute is over. Each node of a "
            "cluster counts for itself.",
            read_count,
            "COUNT",
            1,
            1_000_000,
        ),
    ] = 20
    handshake_timeout_s: Annotated[
        float,
        Option(
            "Time after which a connection without a login is closed. On the admin port: maximum "
            "time for each of TLS handshake, header and body.",
            read_duration,
            "TIME",
            0.1,
            3600,
        ),
    ] = 10.0
    idle_timeout_s: Annotated[
        float,
        Option(
            "Time after which a connection that sends nothing is closed; 0 keeps it.",
            read_duration,
            "TIME",
            1,
            30 * 86400,
            zero_means="never",
        ),
    ] = 0.0
