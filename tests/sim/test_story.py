"""A failing seed is told so that somebody who does not know the code finds the mistake, and made
smaller. Nothing of that changes the run.
"""

from __future__ import annotations

import re

import pytest

from dcp.wire.frame import pack_request, pack_response
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.replication.messages import pack_ack, pack_group, share
from failover.rules.replication_record import (
    BranchUnderWay,
    HandedOver,
    create,
    elect,
    expand,
    finish_branch,
    hand_over,
    shrink,
    start_branch,
    unclean_elect,
    want,
)
from sim import story
from sim.checks import DURING, RULES
from sim.cluster_bugs import CLUSTER_BUGS
from sim.command import main
from sim.decoded import Decoder
from sim.moments import of_record
from sim.network import Network, Side
from sim.plan import changed, drawn
from sim.run import Options, Simulation, run_seed
from sim.scenario import Scenario
from sim.seed_range import reports
from sim.shrink import shrink as make_smaller
from sim.world import MS, Host, Trace, World
from support.stored_bytes import pack_mutation

NODES = 3


def told(bug: str, seed: int) -> str:
    options = Options(nodes=NODES, bug=bug, act=CLUSTER_BUGS[bug].act)
    return story.tell(run_seed(seed, options), options)


def flat(page: str) -> str:
    """Return a page without its line breaks."""
    return re.sub(r"\s+", " ", page)


@pytest.mark.parametrize(
    ("bug", "seed", "sentence"),
    [
        ("hw-counts-received", 1, "on the disk of every member of the in-sync set"),
        ("shrink-counts-early", 1, "DOES NOT WAIT for n2, which its record has"),
        ("promoted-at-once", 45, "it must not answer for"),
        ("applied-not-mine", 17, "NOT_MY_VBUCKET promises that nothing was done there"),
        ("deposed-keeps-streams", 7, "ends its streams"),
    ],
)  # fmt: skip
def test_a_story_names_the_mistake(bug: str, seed: int, sentence: str) -> None:
    page = told(bug, seed)
    assert sentence in flat(page)
    assert max(map(len, page.splitlines())) <= story.WIDTH + 8, "a page is not wide"
    assert len(page.splitlines()) < 200, "it is a page"
    for part in ("What went wrong", "Who is who", "Faults until then", "What happened to vb",
                 "How far each node had come", "What clients asked", "Each node at that moment",
                 "Each message of this run"):  # fmt: skip
        assert part in page


def test_a_story_stops_at_the_first_violation() -> None:
    options = Options(nodes=NODES, bug="hw-counts-received")
    report = run_seed(1, options)
    page = story.tell(report, options)
    at_ms = float(re.findall(r"went wrong, at ([\d.]+) ms", page)[0])
    assert at_ms < 700 < report.virtual_ns / MS
    assert page == story.tell(report, options)


def test_whoever_looks_the_run_is_the_same() -> None:
    options = Options(nodes=NODES)
    plain, watched = Trace(), Trace([].append, Decoder())
    assert run_seed(5, options, plain).violations == []
    simulation = Simulation(5, options, watched)
    simulation.world.observer = story.Observer(simulation, DURING, b"k1", None)
    assert simulation.run().violations == []
    assert plain.digest == watched.digest


def test_every_check_has_its_rule() -> None:
    report = run_seed(0, Options(nodes=NODES, bug="streams-show-synced"))
    assert set(report.checks) | DURING.keys() <= RULES.keys()
    assert len(report.checks) == len(report.violations)


def test_a_story_says_on_whom_a_partition_waits() -> None:
    cluster = Scenario()
    master, dead, alone = cluster.master(), *cluster.replicas()
    assert cluster._why_unserved() == ""
    cluster.machine(master).kill()
    cluster.machine(dead).kill()
    cluster.run_for(1.5)
    why = cluster._why_unserved()
    assert f"vb 0 (epoch {cluster.record().epoch}, in-sync set n1, n2, n3)" in why
    assert f"{master} does not run; {alone} reported that" in why
    assert f"waits for {dead}" in why
    cluster.machine(master).start()
    cluster.machine(dead).start()
    cluster.until(cluster.is_served)
    cluster.passes()


def test_changes_of_records_have_their_kinds() -> None:
    record = create(("n1-1", "n2-1", "n3-1"))
    branched = start_branch(record, BranchUnderWay(7, 0))
    smaller = shrink(record, ("n3-1",))
    wanted = want(record, "n2-1")
    cases = {
        "election": elect(record, "n2-1", ("n1-1",)),
        "election of the same master": elect(record, "n1-1"),
        "unclean election": unclean_elect(record, "n3-1"),
        "in-sync set shrinks": smaller,
        "wanted master": wanted,
        "branch": branched,
    }
    for kind, after in cases.items():
        assert of_record(record, after)[0] == kind
    assert of_record(wanted, hand_over(wanted, HandedOver(7, 1)))[0] == "handover"
    assert of_record(smaller, expand(smaller, ("n3-1",)))[0] == "in-sync set grows"
    assert of_record(branched, finish_branch(branched))[0] == "branch done"
    assert "in-sync set n2, n3 (without n1)" in of_record(record, cases["election"])[1]


class TestDecoder:
    def sides(self) -> tuple[Side, Side]:
        world = World(1)
        network, host = Network(world, 1, 2), Host(world, "n1")
        link = network.link("n1", "n2")
        return Side(network, host, link, "n2<n1#1"), Side(network, host, link, "n1>n2#1")

    def test_a_message_in_pieces_is_told_with_the_last_one(self) -> None:
        decode, (side, _) = Decoder(), self.sides()
        data = pack_request(Opcode.SET, vb_id=3, key=b"k1", value=b"v", extras=bytes(8))
        assert decode(side._arrive, (data[:30],)) == "n2<n1#1 gets 30 bytes of a message"
        assert decode(side._arrive, (data[30:],)) == "n2<n1#1 gets SET vb 3 b'k1' b'v'"

    def test_messages_of_replication(self) -> None:
        decode, (there, back) = Decoder(), self.sides()
        entry = pack_mutation(
            vb_id=3, seqno=9, cas=5, rev_seqno=1, key=b"\x00k1", value=b"v"
        )  # fmt: skip
        group = pack_group(4, 2, 1, (1, 3), share(entry))
        text = decode(back._arrive, (b"".join(group),))
        assert "X_REPLICA_GROUP 4, question 2, groups 1 to 3 are committed" in text
        assert "vb 3 seqno 9 sets b'k1'" in text
        text = decode(there._arrive, (pack_ack(4, 2),))
        assert "X_REPLICA_ACK up to message 4 is on disk, confirms question 2" in text

    def test_answers(self) -> None:
        decode, (side, _) = Decoder(), self.sides()
        refused = pack_response(Opcode.GET, Status.NOT_MY_VBUCKET)
        assert decode(side._arrive, (refused,)).endswith("answer to GET: NOT_MY_VBUCKET")
        back = pack_response(Opcode.DCP_STREAM_REQ, Status.ROLLBACK, value=bytes(7) + b"\x05")
        assert decode(side._arrive, (back,)).endswith("ROLLBACK to 5")
        assert "no frames" in decode(side._arrive, (bytes(24),))


class TestShrinking:
    def test_what_is_left_still_fails_and_is_smaller(self) -> None:
        options = Options(nodes=NODES, bug="streams-show-synced")
        small = make_smaller(0, options, "committed first", tries_max=14, seconds_max=1e9)
        assert {each.check for each in small.found} == {"committed first"}
        before, after = Simulation(0, options).plan, Simulation(0, small.options).plan
        assert len(after.faults) < len(before.faults)
        assert after.load_ns < before.load_ns
        assert "committed first" in run_seed(0, small.options).checks

    def test_the_command_repeats_the_small_one(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = "--nodes 3 --seed 0 --bug streams-show-synced --set faults= --set clients=1"
        assert main(words.split()) == 1
        out = capsys.readouterr().out
        assert "STORY OF SEED 0" in out
        assert "clients: c1; consumers" in out
        assert "made smaller" not in out, "it is small"

    def test_fields_that_cannot_be_set_are_named(self) -> None:
        plan = drawn(World(1).draw, nodes=NODES)
        assert changed(plan, [("clients", "7"), ("faults", "kill,stop")]).clients == 7
        assert changed(plan, [("faults", "")]).faults == ()
        assert changed(plan, [("keys", "2")]).keys == plan.keys[:2]
        for name, value in (("nodes", "2"), ("clients", "few"), ("weather", "1")):
            with pytest.raises(ValueError, match=f"--set {name}={value}"):
                changed(plan, [(name, value)])


def test_seeds_at_once_are_the_same_and_in_order() -> None:
    options = Options(nodes=1, seconds=0.3)
    one = list(reports(range(6), lambda _seed: options, 1))
    two = list(reports(range(6), lambda _seed: options, 2))
    assert one == two
    assert [report.seed for _, report in two] == list(range(6))
