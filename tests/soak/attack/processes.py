"""The kinds `kill` and `stall`: signals to the server's processes.

`kill` is the kill loop (`tests.soak.kill`) with a probe: SIGKILL of the server under load, in
merges, in starts; of the store process alone, repeatedly, while the server continues.

`stall`: the store process is stopped by SIGSTOP while writes fill the memtable. Only writes may
wait, for at most write_wait; then they are refused with the reason. One of these ends the stall:

    continued    SIGCONT before store_silence is over
    replaced     no SIGCONT: the server replaces the process
    stopped      the server gets SIGTERM meanwhile, and ends within STOP_S
    killed       the server gets SIGKILL meanwhile, and starts again on the folder
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Final

from dcp.wire.message import StreamRequest, pack_buffer_ack, pack_open, pack_stream_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import Answer, RawClient
from tests.soak.attack.case import AttackedServer, AttackError, Case, Fault
from tests.soak.attack.commands import dcpctl
from tests.soak.attack.load import Load
from tests.soak.attack.probe import Watched
from tests.soak.attack.streams import PRODUCER
from tests.soak.attack.truth import Ledger, check_holds, keys_in, receive, set_packet, words_of
from tests.soak.kill import Life
from vbucket.model.ids import NUM_VBUCKETS, vbucket_of

PROBE_KEY: Final = b"probe"
PROBE_VALUE: Final = b"what the probe reads"
STOP_S: Final = 10.0
"""A stop takes at most ten seconds (README.md)."""
ANSWER_SLACK_S: Final = 6.0
"""How much later than the setting says an answer may come on a busy machine."""
BACK_S: Final = 40.0
"""Time for the store to catch up, and for writes to be accepted again."""


def some_partitions(draw: random.Random, count: int) -> list[int]:
    """Draw partitions other than that of the probe's document."""
    own = vbucket_of(PROBE_KEY)
    return draw.sample([vb_id for vb_id in range(NUM_VBUCKETS) if vb_id != own], count)


def put_probe_key(port: int) -> None:
    with RawClient(port) as client:
        client.send(set_packet(PROBE_KEY, PROBE_VALUE))
        frame = receive(client)
        if frame.status:
            raise AttackError(Fault.BROKEN, f"a first SET was refused: {words_of(frame)}")


def watched(server: AttackedServer) -> Watched:
    return Watched(server.port, server.admin_port, PROBE_KEY.decode(), PROBE_VALUE.decode())


# -- kill ------------------------------------------------------------------------------------------


class ProbedLife(Life):
    """A life of the kill loop, in which the probe measures the server whenever it is up."""

    def __init__(self, case: Case) -> None:
        self._case = case
        super().__init__(case.folder / "data", case.seed)
        put_probe_key(self.server.port)
        self.others[PROBE_KEY] = PROBE_VALUE
        self._watch()

    def _watch(self) -> None:
        server = self.server
        self._case.watch(
            Watched(server.port, server.admin_port, PROBE_KEY.decode(), PROBE_VALUE.decode())
        )

    def _kill_server(self) -> None:
        self._case.rest()
        super()._kill_server()

    def _connect(self) -> None:
        super()._connect()
        if self.others:
            self._watch()

    def lose_store_processes(self, times: int) -> None:
        """Kill the store process repeatedly under load; the server continues."""
        for _ in range(times):
            self._merge()
            for pid in self.server.children():
                os.kill(pid, signal.SIGKILL)
            self._load(self._draw.uniform(0.02, 0.3))
        merges = self.server.status()["merges"]
        give_up_at_s = time.monotonic() + BACK_S
        while self.server.status()["merges"] <= merges:
            if time.monotonic() > give_up_at_s:
                text = f"no merge {BACK_S:g} s after the store process was killed"
                raise AttackError(Fault.BROKEN, text)
            self._load(0.1)
        for writer in self.writers:
            writer.settle()
            writer.check()

    def finish(self) -> None:
        self._case.rest()
        super().finish()


def kill(case: Case) -> None:
    rounds = 2 if case.is_short else case.draw.randint(3, 6)
    store_kills = case.draw.choice((0, 1, 3))
    case.note(f"{rounds} kills of the server, {store_kills} of its store process")
    life = ProbedLife(case)
    try:
        for _ in range(rounds):
            life.round()
        if store_kills:
            life.lose_store_processes(store_kills)
        case.note(f"{life.answers} answers")
        life.finish()
    finally:
        case.rest()
        life.abandon()


# -- stall -----------------------------------------------------------------------------------------


class OpenStream:
    """A stream with a small window: it continues only if acknowledgements are processed."""

    WINDOW = 2000

    def __init__(self, port: int, vb_id: int) -> None:
        self._client = client = RawClient(port)
        assert not client.ask(Opcode.SELECT_BUCKET, key=b"default").status
        client.send(pack_open(b"steady", PRODUCER))
        assert not receive(client).status
        window = b"%d" % self.WINDOW
        assert not client.ask(
            Opcode.DCP_CONTROL, key=b"connection_buffer_size", value=window
        ).status
        request = StreamRequest(0, 0, 2**64 - 1, 0, 0, 0)
        client.send(pack_stream_request(vb_id, request, opaque=7))
        assert not receive(client).status

    def __enter__(self) -> OpenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.__exit__(None, None, None)

    def read(self, changes: int) -> int:
        """Read up to `changes` changes, acknowledge each, and return how many came."""
        taken = 0
        give_up_at_s = time.monotonic() + 3.0
        while taken < changes and time.monotonic() < give_up_at_s:
            if not self._client.has_answer():
                time.sleep(0.01)
                continue
            frame = receive(self._client)
            taken += frame.opcode in {Opcode.DCP_MUTATION, Opcode.DCP_DELETION}
            self._client.send(pack_buffer_ack(frame.wire_bytes))
        return taken


class Stall:
    """One case of `stall`."""

    def __init__(self, case: Case) -> None:
        self.case = case
        draw = case.draw
        self.silence_s = draw.choice((2, 3)) if case.is_short else draw.choice((2, 3, 5))
        self.write_wait_s = draw.choice((0.05, 0.3, 1.0))
        self.ending = draw.choice(("continued", "replaced", "stopped", "killed"))
        case.note(f"silence {self.silence_s} s, write_wait {self.write_wait_s} s, {self.ending}")
        self.server = AttackedServer(
            case.folder / "data", "--memtable-bytes", "1MiB",
            "--store-silence", f"{self.silence_s}s", "--write-wait", f"{self.write_wait_s}s",
        )  # fmt: skip
        self.ledger = Ledger()
        self.keys = keys_in(some_partitions(draw, 20), 400)

    def run(self) -> None:
        self.server.start()
        pids: list[int] = []
        try:
            put_probe_key(self.server.port)
            self.case.watch(watched(self.server))
            load = Load(self.server.port, self.ledger, self.keys, self.case.draw, value_bytes=1500)
            load.start()
            time.sleep(self.case.seconds(0.1, 1.0))
            pids = self.server.children()
            stopped = pids[0]
            os.kill(stopped, signal.SIGSTOP)
            began_s = time.monotonic()
            self.while_standing(load, began_s)
            getattr(self, self.ending)(load, stopped, began_s)
            self.finish()
        finally:
            self.case.rest()
            self.server.close()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def while_standing(self, load: Load, began_s: float) -> None:
        """Check that everything but writes works until the store process runs again."""
        limit_s = began_s + self.silence_s + BACK_S
        while not load.is_refused and time.monotonic() < limit_s:
            if load.failure or load.is_cut_off or not self.is_silent(began_s):
                break
            time.sleep(0.01)
        if not load.is_refused:
            self.case.note("nothing was refused")
            return
        self.case.note(f"refused after {time.monotonic() - began_s:.1f} s")
        self.check_ready()
        self.check_what_goes_on()
        words = next(iter(load.refusals))
        is_told = "refused until the store has caught up: " in words
        self.case.demand(is_told, Fault.UNNAMED, f"a refusal says {words!r}")
        longest_s = self.write_wait_s + ANSWER_SLACK_S
        text = f"a write was answered after {load.worst_s:.1f} s, write_wait {self.write_wait_s}"
        self.case.demand(load.worst_s < longest_s, Fault.BROKEN, text)

    def is_silent(self, began_s: float) -> bool:
        return time.monotonic() - began_s < self.silence_s

    def check_ready(self) -> None:
        """Check that /readyz gives the reason while writes are refused."""
        for _ in range(50):
            why = self.server.status()["write_refusal"]
            answer = http_get(self.server.admin_port, "/readyz")
            if not why or not self.server.status()["write_refusal"]:
                return
            if (answer.status, answer.body.get("why")) == (503, "store_behind"):
                return
        self.case.demand(False, Fault.UNNAMED, f"/readyz says {answer} while writes are refused")

    def check_what_goes_on(self) -> None:
        """Check logins, NOOPs, GETs on a new connection, and a stream with acknowledgements."""
        known = [key for key, item in list(self.ledger.known.items()) if item.answered]
        with RawClient(self.server.port, "guest", "guest") as client:
            self.expect(client.ask(Opcode.NOOP).status == Status.OK, "a NOOP")
            frame = client.ask(Opcode.GET, key=PROBE_KEY, vb_id=vbucket_of(PROBE_KEY))
            self.expect(frame.value == PROBE_VALUE, "a GET")
        by_vb = [vbucket_of(key) for key in known]
        vb_id = max(set(by_vb), key=by_vb.count)
        with OpenStream(self.server.port, vb_id) as stream:
            taken = stream.read(5)
            self.expect(taken == 5 or taken >= by_vb.count(vb_id), f"a stream ({taken} changes)")

    def expect(self, is_so: bool, what: str) -> None:
        self.case.demand(is_so, Fault.BROKEN, f"{what} did not go on while the store stood still")

    # -- endings -------------------------------------------------------------------------------

    def continued(self, load: Load, stopped: int, _began_s: float) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have been replaced already
            os.kill(stopped, signal.SIGCONT)
        self.wait_until_taken(load)

    def replaced(self, load: Load, stopped: int, began_s: float) -> None:
        self.wait_for(
            lambda: stopped not in self.server.children(),
            began_s + self.silence_s + BACK_S - time.monotonic(),
            f"the store process {stopped} stands still and is not replaced",
        )
        self.wait_until_taken(load)
        told = "sent nothing for" in self.server.log_path.read_text()
        self.case.demand(told, Fault.UNNAMED, "the log does not say why it was replaced")

    def stopped(self, load: Load, _stopped: int, _began_s: float) -> None:
        self.case.rest()
        process = self.server._process
        assert process is not None
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_S + ANSWER_SLACK_S)
        finally:
            load.stop()
        spent_s = time.monotonic() - began_s
        self.case.note(f"stopped in {spent_s:.1f} s")
        text = f"SIGTERM took {spent_s:.1f} s, exit code {code}"
        self.case.demand(spent_s < STOP_S + 1.0 and code == 0, Fault.BROKEN, text)
        self.again()

    def killed(self, load: Load, _stopped: int, _began_s: float) -> None:
        self.case.rest()
        self.server.kill()
        load.stop()
        self.again()

    def again(self) -> None:
        """Start on the folder again."""
        self.server.close()
        self.server.start()
        self.case.watch(watched(self.server))

    # -- the end -------------------------------------------------------------------------------

    def wait_until_taken(self, load: Load) -> None:
        self.wait_for(
            lambda: not self.server.status()["write_refusal"], BACK_S, "writes are still refused"
        )
        load.stop()
        self.case.demand(not load.is_cut_off, Fault.BROKEN, "the server cut a writer off")

    def wait_for(self, is_so: Callable[[], bool], seconds: float, text: str) -> None:
        give_up_at_s = time.monotonic() + seconds
        while not is_so():
            self.case.demand(time.monotonic() < give_up_at_s, Fault.BROKEN, text)
            time.sleep(0.05)

    def finish(self) -> None:
        with RawClient(self.server.port) as client:
            check_holds(self.case, client, self.ledger)
            write_again(self.case, client)
        self.server.check(self.case)
        self.case.rest()
        began_s = time.monotonic()
        code = self.server.stop()
        spent_s = time.monotonic() - began_s
        text = f"the last stop took {spent_s:.1f} s, exit code {code}"
        self.case.demand(code == 0 and spent_s < STOP_S + 1, Fault.BROKEN, text)
        told = dcpctl("verify", "-o", "json", self.server.data)
        self.case.demand(not told.code, Fault.WRONG, f"verify: {told.text[-500:]}")


def write_again(case: Case, client: RawClient, wait_s: float = BACK_S) -> None:
    """Require that a write succeeds within `wait_s`; the store may have to catch up first."""
    give_up_at_s = time.monotonic() + wait_s
    while True:
        client.send(set_packet(b"again", b"v"))
        frame = receive(client)
        if not frame.status:
            return
        is_late = time.monotonic() > give_up_at_s
        case.demand(not is_late, Fault.BROKEN, f"writes are still {words_of(frame)}")
        time.sleep(0.1)


def stall(case: Case) -> None:
    Stall(case).run()


def http_get(port: int, path: str) -> Answer:
    """Send a request to the admin port without a login."""
    import asyncio

    from support.raw_client import ask

    return asyncio.run(ask(port, "GET", path))
