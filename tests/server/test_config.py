"""Settings: sources and their order, units, and refusals that say what to do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.server.config.setting_values import duration_text, size_text
from dcp.server.config.settings import Settings
from dcp.server.config.sources import (
    OPTIONS,
    ConfigError,
    ConfigFile,
    default_text,
    flag_of,
    is_loopback,
    plain_host_of,
    read_config_file,
    resolve,
    shown,
)


def refusal(flags=None, environ=None, document=None) -> str:
    file = None if document is None else ConfigFile("dcpd.toml", document)
    with pytest.raises(ConfigError) as caught:
        resolve(flags or {}, environ or {}, file)
    return str(caught.value)


def test_no_source_gives_the_defaults():
    assert resolve({}, {"PATH": "/bin"}) == (Settings(), {})


def test_flags_win_over_variables_and_variables_over_the_file():
    file = ConfigFile("dcpd.toml", {"port": 1001, "admin_port": 1002, "durability": "none"})
    settings, origins = resolve(
        {"port": "3001"}, {"DCPD_PORT": "2001", "DCPD_ADMIN_PORT": "2002"}, file
    )
    assert (settings.port, settings.admin_port, settings.durability) == (3001, 2002, "none")
    assert origins == {
        "port": "--port",
        "admin_port": "environment variable DCPD_ADMIN_PORT",
        "durability": "dcpd.toml: durability",
    }


def test_defaults_pass_their_own_checks():
    """Every default, written as a user would, is read back as itself."""
    settings, _ = resolve({key: default_text(key) for key in OPTIONS}, {})
    assert settings == Settings()


def test_shown_settings_can_be_given_again():
    asked = {"sync_interval": "250ms", "memtable_bytes": "16MB", "idle_timeout": "5m", "port": "0"}
    settings, _ = resolve(asked, {})
    again, _ = resolve({}, {}, ConfigFile("copy.toml", shown(settings)))
    assert again == settings
    assert settings.memtable_bytes == 16_000_000
    assert settings.sync_interval_s == 0.25


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1048576", 1 << 20),
        (1 << 20, 1 << 20),
        ("16MB", 16_000_000),
        ("16MiB", 16 << 20),
        ("16 mib", 16 << 20),
        ("1.5GiB", 3 << 29),
    ],
)
def test_sizes(text, size_bytes):
    assert resolve({"memtable_bytes": text}, {}).settings.memtable_bytes == size_bytes


@pytest.mark.parametrize(
    ("text", "duration_s"), [("250ms", 0.25), ("1s", 1.0), ("5m", 300.0), ("1500us", 0.0015)]
)
def test_durations(text, duration_s):
    found = resolve({"sync_interval": text}, {}).settings.sync_interval_s
    assert found == pytest.approx(duration_s)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("db.example", ("db.example",)),
        ("db.example, .corp.example,10.0.0.1", ("db.example", ".corp.example", "10.0.0.1")),
        (["a", "b"], ("a", "b")),
        ("*", ("*",)),
        ("none", ()),
        ("", ()),
    ],
)
def test_names(value, names):
    assert resolve({"admin_hosts": value}, {}).settings.admin_hosts == names
    assert shown(Settings(admin_hosts=names))["admin_hosts"] == (",".join(names) or "none")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"suspect_after": "300ms"},
            "--suspect-after: suspect_after must be at least 400ms, 4 times heartbeat (100ms)",
        ),
        (
            {"heartbeat": "150ms", "suspect_after": "500ms"},
            "--suspect-after: suspect_after must be at least 600ms, 4 times heartbeat (150ms)",
        ),
        (
            {"suspect_after": "2s"},
            "--suspect-after: lease must be at least 4s, 2 times suspect_after (2s); it is 3s",
        ),
        (
            {"heartbeat": "150ms", "replica_lag_max": "500ms"},
            "--replica-lag-max: replica_lag_max must be at least 600ms, 4 times heartbeat (150ms)",
        ),
        (
            {"commit_timeout": "500ms"},
            "--commit-timeout: commit_timeout must be at least 1s, as long as replica_lag_max (1s)",
        ),
        ({"lease": "2500ms"}, "--lease: 2500ms is not possible; metadata stores have leases of"),
        ({"heartbeat": "1s"}, "must be from 50ms to 150ms"),
    ],
)
def test_times_of_clusters_fit_to_each_other(given, reason):
    assert reason in refusal(given)


def test_times_of_clusters_at_their_limits():
    times = {
        "heartbeat": "50ms",
        "suspect_after": "200ms",
        "lease": "2s",
        "replica_lag_max": "500ms",
    }
    settings = resolve({**times, "commit_timeout": "500ms"}, {}).settings
    assert (settings.suspect_after_s, settings.lease_s) == (0.2, 2)


@given(st.integers(1, 1 << 50))
def test_size_texts_read_back(size_bytes):
    text = size_text(size_bytes)
    if not 1 << 20 <= size_bytes <= 64 << 30:
        assert "must be from 1MiB to 64GiB" in refusal({"memtable_bytes": text})
    else:
        assert resolve({"memtable_bytes": text}, {}).settings.memtable_bytes == size_bytes


@given(st.integers(1000, 3_600_000_000))
def test_duration_texts_read_back(duration_us):
    text = duration_text(duration_us / 1e6)
    found = resolve({"sync_interval": text}, {}).settings.sync_interval_s
    assert found == pytest.approx(duration_us / 1e6, abs=1e-6)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("port", "x", "must be a whole number from 0 to 65535"),
        ("port", "65536", "must be a whole number from 0 to 65535"),
        ("port", "-1", "must be a whole number from 0 to 65535"),
        ("port", "9" * 5000, "must be a whole number from 0 to 65535"),
        ("port", "0" * 20 + "99999", "must be a whole number from 0 to 65535"),
        ("host", "", "must be an address"),
        ("host", "*", "0.0.0.0"),
        ("advertise_host", "pod-0..svc.local", "must be an address or a host name"),
        ("data", "", "must be the path of a folder"),
        ("durability", "comit", "did you mean commit?"),
        ("durability", "yes", "must be one of commit, interval, none"),
        ("memtable_bytes", "16XB", '"16MB"'),
        ("memtable_bytes", "64k", "must be a size"),
        ("memtable_bytes", "1KB", "must be from 1MiB to 64GiB"),
        ("sync_interval", "5", 'with its unit, such as "250ms"'),
        ("sync_interval", "0", "must be from 1ms to 1h"),
        ("idle_timeout", "1ms", "must be from 1s to 30d, or 0 for never"),
        ("admin_hosts", "db.example:8091", "without a port"),
        ("admin_hosts", "db.example,,x", "not ''"),
        ("admin_hosts", "*.example", ".example.com stands for example.com and all names below it"),
        ("admin_hosts", "http://x", "not 'http://x'"),
        ("admin_hosts", 7, "must be host names, separated by commas"),
        ("admin_hosts", [7], "must be host names, separated by commas"),
        ("admin_connections_max", "15", "must be a whole number from 16 to 100000"),
    ],
)
def test_refused_values_name_source_value_and_what_is_allowed(key, value, reason):
    text = refusal({key: value})
    assert text.startswith(f"{flag_of(key)}: {value!r} ")
    assert reason in text


def test_refused_values_of_the_file_and_the_environment_name_it():
    assert refusal(document={"port": True}).startswith("dcpd.toml: port: True must be")
    assert refusal(document={"port": [1]}).startswith("dcpd.toml: port: [1] must be")
    assert refusal(document={"memtable_bytes": True}).startswith("dcpd.toml: memtable_bytes: True")
    assert refusal(environ={"DCPD_PORT": "x"}).startswith("environment variable DCPD_PORT: 'x'")


def test_unknown_names_are_refused_with_a_suggestion():
    assert refusal(document={"prot": 1}) == "dcpd.toml: unknown key 'prot'; did you mean port?"
    assert "did you mean admin_port?" in refusal(document={"admin-port": 1})
    assert refusal(environ={"DCPD_PROT": "1"}).endswith("did you mean DCPD_PORT?")
    assert "known are acknowledge, admin_connections_max, " in refusal(document={"zzz": 1})


def test_variables_that_kubernetes_sets_are_explained():
    assert "enableServiceLinks" in refusal(environ={"DCPD_PORT": "tcp://10.0.0.1:11210"})
    assert "enableServiceLinks" in refusal(environ={"DCPD_SERVICE_HOST": "10.0.0.1"})


def test_the_name_of_the_file_is_no_setting():
    assert resolve({}, {"DCPD_CONFIG": "dcpd.toml"}).settings == Settings()


def test_both_ports_must_differ_unless_free_ones_are_picked():
    assert "are both 8091" in refusal({"port": "8091"})
    assert resolve({"port": "0", "admin_port": "0"}, {}).settings.port == 0


def test_config_files_that_cannot_be_used_are_named(tmp_path):
    path = tmp_path / "dcpd.toml"
    with pytest.raises(ConfigError, match=r"dcpd\.toml: cannot be read: No such file"):
        read_config_file(str(path))
    path.write_text("port = ")
    with pytest.raises(ConfigError, match=r"dcpd\.toml: is not TOML"):
        read_config_file(str(path))
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"dcpd\.toml: is not TOML"):
        read_config_file(str(path))
    path.write_text('port = 0\nsync_interval = "2s"\n')
    assert resolve({}, {}, read_config_file(str(path))).settings.sync_interval_s == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "localhost", "::1", "::ffff:127.0.0.1"])
def test_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "::ffff:8.8.8.8"])
def test_not_loopback(host):
    assert not is_loopback(host)


def test_buffers_hold_the_longest_value_and_something_beside():
    assert refusal({"receive_buffers_bytes_max": "39MiB"}) == (
        "--receive-buffers-bytes-max: receive_buffers_bytes_max must be at least 40MiB, 2 times "
        "value_bytes_max (20MiB)"
    )
    assert refusal({"send_buffers_bytes_max": "1MiB"}).startswith("--send-buffers-bytes-max: ")
    small = {"receive_buffers_bytes_max": "1MiB", "send_buffers_bytes_max": "1MiB"}
    assert resolve(small | {"value_bytes_max": "512KiB"}, {}).settings.value_bytes_max == 512 << 10


def test_ports_that_are_open_must_differ():
    assert resolve({"port": "18091"}, {}).settings.port == 18091, "there is no TLS port"
    assert refusal({"port": "11207", "tls_cert": "c.pem"}) == (
        "--port: the key-value port and the key-value TLS port are both 11207; they must differ"
    )
    both = {"tls_port": "5", "admin_tls_port": "5", "tls_cert": "c.pem"}
    assert "TLS port are both 5" in refusal(both)
    resolve({"tls_port": "0", "admin_tls_port": "0", "tls_cert": "c.pem"}, {})


@pytest.mark.parametrize(
    ("key", "value"), [("tls_key", "k.pem"), ("tls_client_ca", "ca.pem"), ("tls_only", "on")]
)
def test_what_needs_a_certificate_says_so(key, value):
    assert refusal({key: value}).endswith(": TLS needs --tls-cert")
    resolve({key: value, "tls_cert": "c.pem"}, {})


def test_with_tls_only_the_plain_ports_stay_on_loopback():
    exposed = {"host": "0.0.0.0", "tls_cert": "c.pem"}
    assert plain_host_of(resolve(exposed, {}).settings) == "0.0.0.0"
    assert plain_host_of(resolve({**exposed, "tls_only": "on"}, {}).settings) == "127.0.0.1"
    assert (
        plain_host_of(resolve({**exposed, "host": "::1", "tls_only": "on"}, {}).settings) == "::1"
    )
