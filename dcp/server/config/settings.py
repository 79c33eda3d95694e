"""The table of settings: name, type, default, and with `Option` what it means and what is allowed.

The command line, the environment, the TOML file, `dcpd --help` and the messages are generated from
it (`dcp.server.config.sources`). A key is the field's name. A field that ends in `_s` is a
duration; its key drops the `_s` because the value carries the unit (`sync_interval = "250ms"`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from dcp.server.config.server_settings import ServerSettings
from dcp.server.config.setting_values import (
    Option,
    read_choice,
    read_count,
    read_duration,
    read_file,
    read_host_or_none,
    read_size,
    read_store_url,
)


class Settings(ServerSettings, frozen=True, kw_only=True):
    """All settings of one server. Sizes are bytes, durations seconds."""

    cluster: Annotated[
        Literal["none", "init", "join"],
        Option(
            "How a node becomes a member of a cluster at its start. init: the first one of a new "
            "cluster, on this machine. join: one more, by --cluster-token-file, with an empty "
            "--data folder. A member stays one, whatever this says.",
            read_choice,
            "none|init|join",
            choices=("none", "init", "join"),
        ),
    ] = "none"
    cluster_token_file: Annotated[
        Path | None,
        Option(
            "File with the token of the cluster. --cluster join reads it, --cluster init writes "
            "it.",
            read_file,
            "FILE",
        ),
    ] = None
    cluster_meta: Annotated[
        str,
        Option(
            "Metadata store of a cluster that --cluster init makes: embedded in this node, or the "
            "URL of etcd (docs/clusters.md).",
            read_store_url,
            "URL",
        ),
    ] = "embedded"
    cluster_copies: Annotated[
        int,
        Option(
            "Copies of each partition in a cluster that --cluster init makes.",
            read_count,
            "COUNT",
            1,
            4,
        ),
    ] = 3
    cluster_nodes: Annotated[
        int,
        Option(
            "Nodes that a cluster which --cluster init makes waits for. Its partitions then have "
            "copies and masters on all of them from the start. All of their folders are empty.",
            read_count,
            "COUNT",
            1,
            64,
        ),
    ] = 1
    node_name: Annotated[
        str | None,
        Option("Name of this node when it becomes a member.", read_host_or_none, "NAME"),
    ] = None
    rack: Annotated[
        str | None,
        Option(
            "Rack of this node when it becomes a member. Copies are placed on different racks.",
            read_host_or_none,
            "NAME",
        ),
    ] = None
    advertise_host: Annotated[
        str | None,
        Option(
            "Host that clients and other nodes of a cluster use for this node, if it is not "
            "--host.",
            read_host_or_none,
            "ADDRESS",
        ),
    ] = None
    cluster_tls: Annotated[
        Literal["off", "on", "mutual"],
        Option(
            "TLS between the nodes of a cluster, the same on all nodes. on: nodes use the TLS port "
            "of others, and log in with the cluster's secret. mutual: they log in with --tls-cert "
            "instead. Both need --tls-cert and --cluster-ca.",
            read_choice,
            "off|on|mutual",
            choices=("off", "on", "mutual"),
        ),
    ] = "off"
    cluster_ca: Annotated[
        Path | None,
        Option(
            "CA of the certificates of the cluster's nodes (PEM). With --cluster-tls mutual it "
            "should issue certificates to nodes only.",
            read_file,
            "FILE",
        ),
    ] = None
    acknowledge: Annotated[
        Literal["committed", "master"],
        Option(
            "In a cluster: when a write without a durability level is answered. committed: when "
            "all copies in sync have it on disk. master: when this node has; a failover may lose "
            "it.",
            read_choice,
            "WHEN",
            choices=("committed", "master"),
        ),
    ] = "committed"
    commit_timeout_s: Annotated[
        float,
        Option(
            "In a cluster: how long an answer waits for the other copies. Then it is ambiguous.",
            read_duration,
            "TIME",
            0.1,
            3600,
        ),
    ] = 10.0
    replica_lag_max_s: Annotated[
        float,
        Option(
            "In a cluster: how long a copy may be behind, or silent, before writes go on without "
            "it.",
            read_duration,
            "TIME",
            0.5,
            3600,
        ),
    ] = 1.0
    rebalance_rate: Annotated[
        int,
        Option(
            "In a cluster: bytes a second with which this node fills new copies on other nodes, at "
            "most. It fills them slower while that delays writes. 0: without a limit of its own.",
            read_size,
            "SIZE",
            64 << 10,
            1 << 40,
            zero_means="no limit",
        ),
    ] = 32 << 20
    heartbeat_s: Annotated[
        float,
        Option(
            "In a cluster: time between two signs of life of a node to the others. The same on all "
            "nodes.",
            read_duration,
            "TIME",
            0.05,
            0.15,
        ),
    ] = 0.1
    suspect_after_s: Annotated[
        float,
        Option(
            "In a cluster: how long a node may be silent before another one is elected for its "
            "partitions. At least four heartbeats.",
            read_duration,
            "TIME",
            0.2,
            60,
        ),
    ] = 0.6
    lease_s: Annotated[
        float,
        Option(
            "In a cluster: how long the metadata store takes a node for alive without a word of "
            "it, in whole seconds. At least twice --suspect-after.",
            read_duration,
            "TIME",
            2,
            600,
        ),
    ] = 3.0
    otel: Annotated[
        Literal["off", "on"],
        Option(
            "Send spans to OpenTelemetry: slow commands, stream requests, and requests of the "
            "admin interface. The variables OTEL_EXPORTER_OTLP_ENDPOINT and others say where. "
            "Needs the extra otel.",
            read_choice,
            "on|off",
            choices=("off", "on"),
        ),
    ] = "off"
    otel_slow_s: Annotated[
        float,
        Option(
            "Commands that take so long, with what was sent along with them, get a span; 0: all.",
            read_duration,
            "TIME",
            0,
            3600,
        ),
    ] = 0.1
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Option(
            "Lowest level of events to log.",
            read_choice,
            "LEVEL",
            choices=("debug", "info", "warning", "error"),
        ),
    ] = "info"
    log_format: Annotated[
        Literal["auto", "text", "json"],
        Option(
            "Format of the log on stderr; auto is text on a terminal and JSON otherwise.",
            read_choice,
            "FORM",
            choices=("auto", "text", "json"),
        ),
    ] = "auto"
