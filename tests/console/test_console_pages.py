"""Each page of the web console in a real browser: its main act, on live data, while the server is
killed and comes back.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from support.load import Following
from support.server import DcpdProcess

pytestmark = pytest.mark.crash

VB = 92
"""The partition of key1."""


def go(page: Page, title: str) -> None:
    page.get_by_role("navigation").get_by_role("link", name=title).click()
    expect(page.get_by_role("heading", level=1, name=title)).to_be_visible()


def fact(place: Page | Locator, name: str) -> Locator:
    """The value that stands beside a name."""
    return place.locator(f'dl.facts > div:has(dt:text-is("{name}")) > dd')


def kill_and_come_back(page: Page, server: DcpdProcess) -> None:
    """SIGKILL; the page must say that the server is gone, and go on by itself when it is back."""
    boot = page.locator("main").get_attribute("data-boot")
    gone = page.get_by_text("The server cannot be reached. What you see may be old.")
    server.kill()
    expect(gone).to_be_visible()
    server.start()
    expect(gone).to_be_hidden()
    expect(page.locator(f'main:not([data-boot="{boot}"])')).to_be_visible()


def test_the_overview_shows_health_rates_and_limits(log_in, server: DcpdProcess) -> None:
    page = log_in()
    with server.connect() as kv:
        for number in range(30):
            kv.set(b"overview:%d" % number, b"x")
            kv.get(b"overview:%d" % number)
    expect(page.locator(".health")).to_contain_text("Ready. Clients can use this server.")
    expect(fact(page, "Documents")).to_have_text("30")
    rates = page.locator("figure", has_text="Per second")
    with Following(server.address, "overview"):
        expect(rates.locator(".key", has_text="events")).not_to_contain_text("highest 0")
    for key in ("sets", "gets"):
        highest = rates.locator(".key", has_text=key).locator("small")
        expect(highest).not_to_have_text("highest 0")
    assert page.locator("canvas").count() == 5
    expect(page.get_by_role("row", name="Memtable").get_by_role("meter")).to_be_visible()
    expect(page.get_by_role("row", name="in use on the disk")).to_contain_text("GiB")
    kill_and_come_back(page, server)
    with server.connect() as kv:
        kv.set(b"overview:30", b"x")
    expect(fact(page, "Documents")).to_have_text("31")


def test_partitions_and_why_a_consumer_rolls_back(log_in, server: DcpdProcess) -> None:
    with server.connect() as kv:
        for number in range(5):
            kv.set(b"key1", b"%d" % number)
    before = server.explain_rollback(VB, uuid=1, seqno=0)["failover_log"][0]["vb_uuid"]
    server.branch(VB, at=3)
    page = log_in()
    go(page, "Partitions")
    cell = page.get_by_role("gridcell", name=f"Partition {VB}, active")
    expect(page.get_by_role("gridcell")).to_have_count(1024)
    page.get_by_label("Colour by").select_option("Documents")
    expect(
        page.get_by_role("gridcell", name=f"Partition {VB}, active, 1 documents")
    ).to_be_visible()
    cell.click()
    expect(page.get_by_role("heading", name=f"Partition {VB}")).to_be_focused()
    expect(fact(page, "High seqno")).to_have_text("3")
    versions = page.get_by_role("table").get_by_role("row")
    expect(versions).to_have_count(3)  # with the head
    expect(page.get_by_role("img", name="The versions of this partition")).to_contain_text(before)
    kill_and_come_back(page, server)
    page.get_by_label("Version (vb_uuid)").fill(before)
    page.get_by_label("Seqno", exact=True).fill("5")
    page.get_by_role("button", name="Explain").click()
    expect(page.locator(".answer")).to_contain_text("ROLLBACK to seqno 3")
    assert page.locator(".tree .asked").count() == 1
    server.branch(VB, at=2)
    expect(fact(page, "High seqno")).to_have_text("2")


def test_the_map_works_with_the_keyboard(log_in) -> None:
    page = log_in()
    go(page, "Partitions")
    page.get_by_role("gridcell", name="Partition 0, active").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "End", "ArrowLeft"):
        page.keyboard.press(key)
    expect(page.get_by_role("gridcell", name="Partition 94, active")).to_be_focused()
    assert page.locator('[role=gridcell][tabindex="0"]').count() == 1
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Partition 94")).to_be_focused()


def test_consumers_are_paused_resumed_slowed_and_closed(log_in, server: DcpdProcess) -> None:
    page = log_in()
    with Following(server.address, "orders") as _, server.connect() as kv:
        go(page, "Consumers")
        card = page.get_by_role("region", name="orders")
        state = card.locator(".state")
        expect(state).to_have_text("live")
        expect(fact(page, "Streams")).to_have_text("1,024")
        card.get_by_role("button", name="Pause").click()
        expect(card.get_by_role("status")).to_contain_text("Paused: 1,024 streams of orders.")
        for number in range(7):
            kv.set(b"late:%d" % number, b"x")
        expect(state).to_have_text("paused")
        expect(fact(page, "Lag")).to_have_text("7 changes")
        card.get_by_role("button", name="Resume").click()
        expect(fact(page, "Lag")).to_have_text("0 changes")
        card.get_by_label("Bytes per second").fill("20000")
        card.get_by_role("button", name="Slow down").click()
        expect(card).to_contain_text("Slowed down to 19.5 KiB a second")
        assert {row["bytes_per_s"] for row in server.streams(name="orders")} == {20000}
        card.get_by_role("button", name="Close its streams").click()
        page.get_by_role("dialog").get_by_role("button", name="Close its streams").click()
        expect(card.get_by_role("status")).to_contain_text("Closed: 1,024 streams of orders.")
    expect(state).to_have_text("gone")


def test_a_consumer_that_is_rolled_back_while_the_server_dies(log_in, server: DcpdProcess) -> None:
    with server.connect() as kv:
        for number in range(5):
            vb_id = kv.set(b"key2", b"%d" % number).vb_id
    page = log_in()
    go(page, "Consumers")
    name = 'audit "of" <today>'
    with Following(server.address, name):
        card = page.get_by_role("region", name=name)
        expect(card.locator(".state")).to_have_text("live")
        kill_and_come_back(page, server)
        expect(card.locator(".state")).to_have_text("live")
        expect(fact(card, "Last rollback")).to_have_text("none since the server started")
        server.branch(vb_id, at=3)
        expect(fact(card, "Last rollback")).to_contain_text(f"partition {vb_id} to seqno 3")


def test_documents_are_made_changed_deleted_with_their_versions(
    log_in, server: DcpdProcess
) -> None:
    page = log_in()
    go(page, "Documents")
    page.get_by_label("Key", exact=True).fill("doc:1")
    page.get_by_role("button", name="Look up").click()
    expect(page.get_by_text("There is no such document now.")).to_be_visible()
    page.get_by_role("button", name="Create").click()
    page.get_by_label("Value", exact=True).fill('{"n": 1}')
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("status").filter(has_text="Saved as seqno")).to_be_visible()
    kill_and_come_back(page, server)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Value of n").fill("2")
    page.get_by_label("New member").fill("state")
    page.get_by_role("button", name="+ add").click()
    page.get_by_label("Value of state").fill("paid")
    page.get_by_role("button", name="Save").click()
    history = page.locator("table.history tbody tr")
    expect(history).to_have_count(2)
    history.first.get_by_text("What changed").click()
    expect(history.first.locator(".minus")).to_contain_text('"n": 1')
    expect(history.first.locator(".plus").first).to_contain_text('"n": 2')
    with server.connect() as kv:
        assert kv.get(b"doc:1").value == b'{"n":2,"state":"paid"}'
        page.get_by_role("button", name="Edit").click()
        page.get_by_role("radio", name="Text").check(force=True)
        kv.set(b"doc:1", b"of somebody else")
        page.get_by_label("Value", exact=True).fill("too late")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_role("alert")).to_contain_text("the document has changed")
        assert kv.get(b"doc:1").value == b"of somebody else"
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Look up").click()
    expect(history).to_have_count(3)
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete it").click()
    expect(history).to_have_count(4)
    expect(history.first).to_contain_text("deleted")


def test_documents_by_key_and_a_partition_as_of_a_seqno(log_in, server: DcpdProcess) -> None:
    with server.connect() as kv:
        for number in range(120):
            kv.set(b"list:%d" % number, b"x")
        for number in range(4):
            high_seqno = kv.set(b"key1", b"value %d" % number).seqno
    page = log_in()
    go(page, "Documents")
    page.get_by_label("Key begins with").fill("list:")
    page.keyboard.press("Enter")
    rows = page.get_by_role("table", name="Documents by key").locator("tbody tr")
    expect(rows).to_have_count(100)
    keys = sorted(f"list:{number}" for number in range(120))
    expect(rows.get_by_role("button")).to_have_text(keys[:100])
    page.get_by_role("button", name="Next 100").click()
    expect(rows.get_by_role("button")).to_have_text(keys)
    expect(page.get_by_text("120 documents, sorted by key.")).to_be_visible()
    rows.get_by_role("button", name="list:7", exact=True).click()
    expect(page.get_by_role("heading", name="list:7")).to_be_visible()
    as_of = page.get_by_role("region", name="A partition as of a seqno")
    as_of.get_by_label("Partition").fill(str(VB))
    as_of.get_by_label("As of seqno").fill(str(high_seqno - 2))
    as_of.get_by_role("button", name="Show").click()
    expect(as_of.get_by_role("table")).to_contain_text("value 1")


def test_the_test_bench_does_what_its_buttons_say(log_in, server: DcpdProcess) -> None:
    with server.connect() as kv:
        for number in range(6):
            vb_id = kv.set(b"bench", b"%d" % number).vb_id
    page = log_in()
    expect(page.get_by_text("This server is in test mode.")).to_be_visible()
    go(page, "Test bench")
    expect(page.get_by_role("note")).to_contain_text("Test mode.")
    high_seqno = server.ask("GET", f"/api/v1/vbuckets/{vb_id}")["high_seqno"]
    acts = (
        ("Branch", {"At seqno": high_seqno - 2}, "2 changes undone"),
        ("Fail over", {"Changes that are lost": 1}, "1 change lost"),
        ("Purge deletions", {"Up to seqno": 1}, "Purged up to seqno 1."),
    )
    for title, fields, result in acts:
        card = page.get_by_role("region", name=title, exact=True)
        card.get_by_label(f"{title}: partition").fill(str(vb_id))
        for label, value in fields.items():
            card.get_by_label(label).fill(str(value))
        card.get_by_role("button", name=title).click()
        page.get_by_role("dialog").get_by_role("button", name=title).click()
        expect(card.get_by_role("status")).to_contain_text(result)
    detail = server.ask("GET", f"/api/v1/vbuckets/{vb_id}")
    assert (detail["high_seqno"], detail["purge_seqno"]) == (high_seqno - 3, 1)
    assert detail["failover_log"][0]["seqno"] == high_seqno - 3
    faults = page.get_by_role("region", name="Faults")
    faults.get_by_label("Command").select_option("GET")
    faults.get_by_label("Answer").select_option("ETMPFAIL")
    faults.get_by_role("button", name="Set the fault").click()
    expect(faults.get_by_role("table")).to_contain_text("answers ETMPFAIL")
    assert [rule["opcode"] for rule in server.faults()] == ["GET"]
    kill_and_come_back(page, server)  # faults are not stored
    expect(faults.get_by_text("No rule is set.")).to_be_visible()
    faults.get_by_role("button", name="Set the fault").click()
    faults.get_by_role("button", name="Clear all").click()
    expect(faults.get_by_text("No rule is set.")).to_be_visible()
    assert server.faults() == []


def test_changes_are_shown_live_and_a_rollback_as_such(log_in, server: DcpdProcess) -> None:
    page = log_in()
    go(page, "Changes")
    rows = page.locator("table.tail tbody tr")
    expect(page.get_by_text("Live.")).to_be_visible()
    with server.connect() as kv:
        for number in range(4):
            high_seqno = kv.set(b"tail:1", b'{"n": %d}' % number).seqno
        expect(rows).to_have_count(4)
        expect(rows.first).to_contain_text('{"n": 3}')
        kv.delete(b"tail:1")
        expect(rows.first).to_contain_text("deleted")
        vb_id = kv.set(b"tail:1", b"x").vb_id
        expect(rows).to_have_count(6)
        server.branch(vb_id, at=high_seqno)
        expect(rows.first).to_contain_text(f"Partition {vb_id} went back to seqno {high_seqno}: 2")
        with page.expect_request(lambda request: "kind=deleted" in request.url):
            page.get_by_role("radio", name="Deletions").check(force=True)
        expect(rows).to_have_count(0)
        page.get_by_label("Key begins with").fill("tail:")
        with page.expect_request(lambda request: "prefix=tail" in request.url):
            page.keyboard.press("Enter")
        expect(page.get_by_text("Live.")).to_be_visible()
        kv.set(b"tail:1", b"y")
        kv.set(b"other", b"z")
        kv.delete(b"other")
        kv.delete(b"tail:1")
        expect(rows).to_have_count(1)
        page.get_by_role("button", name="Pause").click()
        kv.set(b"tail:1", b"y")
        kv.delete(b"tail:1")
        expect(page.get_by_text("Paused. 1 change passed meanwhile.")).to_be_visible()
        expect(rows).to_have_count(1)
    rows.get_by_role("link", name="tail:1").click()
    expect(page.locator("table.history")).to_be_visible()


def test_collections_users_settings_and_log(log_in, server: DcpdProcess) -> None:
    page = log_in()
    go(page, "Collections")
    page.get_by_label("New collection").fill("shop.orders")
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_text("Collection shop.orders is there.")).to_be_visible()
    page.get_by_role("button", name="Drop shop.orders").click()
    page.get_by_role("button", name="Drop it").click()
    expect(page.get_by_text("Collection shop.orders is dropped.")).to_be_visible()
    go(page, "Users")
    page.get_by_label("New user").fill("ada")
    page.get_by_label("Password").fill("long enough")
    page.get_by_role("button", name="Add").click()
    box = page.get_by_role("checkbox", name="ada: stream")
    expect(page.get_by_role("checkbox", name="ada: read")).to_be_checked()
    box.click()
    expect(box).to_be_checked()
    expect(page.get_by_text("ada has the role stream.")).to_be_visible()
    assert "stream" in server.ask("GET", "/api/v1/users")["roles"]["ada"]
    page.get_by_role("button", name="Remove ada").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.get_by_text("User ada is removed.")).to_be_visible()
    go(page, "Settings")
    page.get_by_role("radio", name="Not the default").check(force=True)
    expect(page.get_by_role("row", name="test_mode")).to_contain_text("on")
    expect(page.get_by_role("row", name="history_window")).to_have_count(0)
    page.get_by_role("radio", name="All").check(force=True)
    page.get_by_label("log_level").fill("loud")
    page.keyboard.press("Tab")
    expect(page.get_by_role("alert")).to_contain_text("log_level")
    page.get_by_label("log_level").fill("debug")
    page.keyboard.press("Tab")
    expect(page.get_by_text("Changed, until the server ends.")).to_be_visible()
    go(page, "Log")
    page.get_by_label("Contains").fill("setting changed")
    expect(page.locator("table.log tbody tr")).to_contain_text("key=log_level")


def test_the_pages_of_a_node_with_64_partitions(log_in, tmp_path: Path) -> None:
    """The map has as many cells, and no form asks for a partition beyond."""
    with DcpdProcess(tmp_path / "data", "--partitions", "64", "--test-mode") as few:
        page = log_in(on=few)
        go(page, "Partitions")
        expect(page.get_by_role("gridcell")).to_have_count(64)
        expect(page.get_by_text("64 partitions.")).to_be_visible()
        for title in ("Partitions", "Documents", "Test bench"):
            go(page, title)
            fields = page.locator("input[name=vb]")
            expect(fields.first).to_have_attribute("max", "63")
            assert {field.get_attribute("max") for field in fields.all()} == {"63"}
        go(page, "Partitions")
        page.get_by_label("Partition", exact=True).fill("63")
        page.get_by_role("button", name="Show").click()
        expect(page.get_by_role("heading", name="Partition 63")).to_be_visible()
