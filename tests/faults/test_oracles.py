"""Each oracle of the chaos harness reports its violation, but no case that only resembles it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from multilock import now
from multilock.testing.beliefs import FaultPeriod, LedgerServer, Record
from tests.faults import contender
from tests.faults.chaos import Report, overstays
from tests.faults.majority import Standstills

TTL = 0.75
Ask = Callable[[Record], Iterable[str]]


def record(*lines: str) -> Record:
    """Feed lines of the form ``PID line``, and return the record."""
    one = Record()
    for line in lines:
        pid, _, rest = line.partition(" ")
        one.feed(int(pid), rest)
    return one


def callbacks(one: Record) -> Iterable[str]:
    return one.miscounted_callbacks({1})


def takeovers(one: Record) -> Iterable[str]:
    return one.slow_takeovers([], bound=1.0, ttl=TTL, until=100.0)


@pytest.mark.parametrize(
    ("ask", "lines", "number"),
    [
        (Record.overlaps, ["1 got 1 n a 1 1", "1 held 3 a", "2 got 2 n b 2 1"], 1),
        (Record.overlaps, ["1 got 1 n a 1 1", "1 held 2 a", "2 got 3 n b 2 1"], 0),
        (Record.overlaps, ["1 got 1 n a 1 1", "1 held 3 a", "2 got 2 other b 2 1"], 0),
        (Record.overlaps, ["1 got 1 n a 1 1", "1 held 3 a", "2 got 2 n b 2 0"], 0),
        (Record.overlaps, ["1 got 1 n a 1 1", "1 held 9 a", "2 got 2 n b 2 1", "3 got 5 n c 3 1"], 2),
        (Record.token_regressions, ["1 got 1 n a 7 1", "2 got 2 n b 7 1"], 1),
        (Record.token_regressions, ["1 got 1 n a 7 1", "2 got 2 n b 8 1"], 0),
        (Record.late_callbacks, ["1 got 1 n a 1 1", "1 lost 2.04 a expired 2"], 0),
        (Record.late_callbacks, ["1 got 1 n a 1 1", "1 lost 2.2 a expired 2"], 1),
        (Record.late_callbacks, ["1 got 1 n a 1 1", "1 lost 2.2 a paused 2", "1 stall 1.9 2.19"], 0),
        (Record.late_callbacks, ["1 got 1 n a 1 1", "1 lost 2.03 a expired 2", "2 got 2.02 n b 2 1"], 1),
        (callbacks, ["1 got 1 n a 1 1", "1 release 2 a", "1 released 2 a 1"], 0),
        (callbacks, ["1 got 1 n a 1 1", "1 release 2 a", "1 released 2 a 1", "1 lost 2 a taken 3"], 1),
        (callbacks, ["1 got 1 n a 1 1", "1 over 2 a", "1 released 2 a 0"], 1),
        (callbacks, ["1 lost 1 a taken 3", "1 got 1 n a 1 0", "1 released 2 a 0"], 0),
        (callbacks, ["1 got 1 n a 1 1", "1 released 2 a 0", "1 lost 2 a taken 3", "1 lost 2 a taken 3"], 1),
        (callbacks, ["2 got 1 n a 1 1", "2 over 2 a"], 0),
        (takeovers, ["1 got 1 n a 1 1", "1 release 2 a", "1 released 2 a 1", "2 got 2.9 n b 2 1"], 0),
        (takeovers, ["1 got 1 n a 1 1", "1 release 2 a", "1 released 2 a 1", "2 got 3.1 n b 2 1"], 1),
        (takeovers, ["1 got 1 n a 1 1", "1 held 2 a", "2 got 3.7 n b 2 1"], 0),
        (takeovers, ["1 got 1 n a 1 1", "1 held 2 a", "2 got 3.8 n b 2 1"], 1),
        # Readers, and holders of two permits, may hold together.
        (Record.overlaps, ["1 got 1 n a 1 1 r", "1 held 9 a", "2 got 2 n b 2 1 r", "2 held 9 b"], 0),
        (Record.overlaps, ["1 got 1 n a 1 1 r", "1 held 9 a", "2 got 2 n b 2 1 r", "3 got 3 n c 3 1"], 1),
        (Record.overlaps, ["1 got 1 n a 1 1", "1 held 3 a", "2 got 2 n b 2 1 r"], 1),
        (Record.overlaps, ["1 got 1 n a 1 1 r", "1 held 3 a", "2 got 2 n b 2 1 p2"], 1),
        (Record.overlaps, ["1 got 1 n a 1 1 p2", "1 held 9 a", "2 got 2 n b 2 1 p2", "3 got 3 n c 3 1 p2"], 0),
        (
            Record.overlaps,
            ["1 got 1 n a 1 1 p2", "1 held 9 a", "2 got 2 n b 2 1 p2", "2 held 9 b", "3 got 3 n c 3 1 p2"],
            1,
        ),
        (Record.token_regressions, ["1 got 1 n a 7 1 r", "2 got 2 n b 6 1 r", "3 got 3 n c 8 1"], 0),
        (Record.token_regressions, ["1 got 1 n a 7 1 r", "2 got 2 n b 5 1 r", "3 got 3 n c 6 1"], 1),
        (Record.token_regressions, ["1 got 1 n a 7 1", "2 got 2 n b 8 1 r", "3 got 3 n c 7 1 r"], 1),
        (Record.late_callbacks, ["1 got 1 n a 1 1 r", "1 lost 2.03 a expired 2", "2 got 2.02 n b 2 1 r"], 0),
        (Record.late_callbacks, ["1 got 1 n a 1 1 r", "1 lost 2.03 a expired 2", "2 got 2.02 n b 2 1"], 1),
        (
            takeovers,
            ["1 got 1 n a 1 1 r", "1 held 9 a", "2 got 2 n b 2 1 r", "2 released 3 b 1", "3 got 10.7 n c 3 1"],
            0,
        ),
        (
            takeovers,
            ["1 got 1 n a 1 1 r", "1 held 9 a", "2 got 2 n b 2 1 r", "2 released 3 b 1", "3 got 10.8 n c 3 1"],
            1,
        ),
    ],
)
def test_an_oracle_counts_violations(ask: Ask, lines: list[str], number: int) -> None:
    assert len(list(ask(record(*lines)))) == number


@pytest.mark.parametrize(
    ("key", "left", "too_long"),
    [
        ("{multilock/red}:gone:a", 60_000, False),
        ("{multilock/red}:gone:a", 0, False),
        ("{multilock/red}:gone:a", -2, False),
        ("{multilock/red}:gone:a", -1, True),
        ("{multilock/red}:gone:a", 60_001, True),
        ("multilock/red", -2, False),
        ("multilock/red", 0, True),
    ],
)
def test_a_key_that_expires_soon_is_not_reported_as_left_behind(key: str, left: int, too_long: bool) -> None:
    assert overstays(key, left) is too_long


@pytest.mark.parametrize(
    ("faults", "stalls", "number"),
    [
        ([], [], 1),
        # The process was killed before it could record its stall.
        ([FaultPeriod("process stopped", 1, 1.5, 2.4, stops=True)], [], 0),
        ([FaultPeriod("process stopped", 2, 1.5, 2.4, stops=True)], [], 1),
        ([FaultPeriod("partition", 1, 1.5, 2.4)], [], 1),
        ([], ["2 stall 1.9 2.41"], 0),  # the machine stopped another process
        # The harness stopped the process.
        ([FaultPeriod("process stopped", 2, 1.5, 2.4, stops=True)], ["2 stall 1.5 2.41"], 1),
    ],
)
def test_a_late_callback_is_excused_if_the_machine_stood_still(
    faults: list[FaultPeriod], stalls: list[str], number: int
) -> None:
    late = record("1 got 1 n a 1 1", "1 lost 2.45 a expired 2", *stalls)
    assert len(list(late.late_callbacks(faults=faults))) == number


def test_a_report_that_the_machine_excuses_is_still_recorded() -> None:
    late = record(
        "1 got 1 n a 1 1", "1 lost 2.45 a expired 2", "2 stall 1.9 2.41", "2 got 4.5 n b 2 1", "3 stall 3 4.3"
    )
    assert [*late.late_callbacks(), *late.slow_takeovers([], 1.0, TTL, 100.0)] == []
    assert [each[:2] for each in late.excused] == ["O4", "O5"]


def test_a_slow_reply_of_the_ledger_is_recorded_as_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[object, ...]] = []
    monkeypatch.setattr(contender, "note", lambda *words: noted.append(words))
    assert contender._of_ledger(lambda *_: 7, "n", 1) == 7
    assert noted == []
    monkeypatch.setattr(contender, "STALLED", -1.0)
    assert contender._of_ledger(lambda *_: 7, "n", 1) == 7
    assert [words[0] for words in noted] == ["stall"]


def test_a_holder_that_could_not_be_notified_of_a_force_release_is_not_blamed() -> None:
    lines = ["1 session a s", "1 got 1 n a 1 1", "1 held 3 a", "2 got {} n b 2 1", "1 lost 3.5 a expired 3.5"]
    taken = Record({"s": 2.0})
    early = Record({"s": 2.0})
    for line in lines:
        taken.feed(int(line[0]), line[2:].format(2.1))
        early.feed(int(line[0]), line[2:].format(1.9))
    assert [*taken.overlaps(), *taken.late_callbacks()] == []
    assert [said[:2] for said in early.overlaps()] == ["O1"]


def test_a_grant_received_after_a_force_release_is_not_blamed() -> None:
    lines = ["2 got 2 n b 9 1", "2 held 3 b", "1 session a s", "1 got 2.5 n a 7 1"]
    taken, blamed = Record({"s": 1.9}), Record({})
    for line in lines:
        taken.feed(int(line[0]), line[2:])
        blamed.feed(int(line[0]), line[2:])
    assert [*taken.overlaps(), *taken.token_regressions()] == []
    assert [said[:2] for said in (*blamed.overlaps(), *blamed.token_regressions())] == ["O1", "O3"]


@pytest.mark.parametrize(
    ("faults", "stalls", "until", "number"),
    [
        ([], [], 100.0, 1),
        ([FaultPeriod("partition", 2, 3.0, 4.5)], [], 100.0, 0),
        # The fault counts until its end, even if the run has no more faults by then.
        ([FaultPeriod("server away for long", None, 1.5, 4.5)], [], 100.0, 0),
        ([FaultPeriod("server away for long", None, 1.5, 3.5)], [], 100.0, 1),
        ([FaultPeriod("partition", 2, 1.5)], [], 100.0, 1),  # the partition has not ended
        ([], ["2 stall 0.5 1.5", "2 stall 2.8 3.2", "2 stall 3.5 4.6"], 100.0, 0),
        ([], ["2 stall 0.5 2.7", "2 stall 3.5 4.4", "2 stall 5 6"], 100.0, 1),
        ([], ["1 stall 2 5"], 100.0, 1),  # the process of the former holder stalled
        ([], ["3 stall 3 4.3"], 100.0, 0),  # the machine stopped a process that may have been first in the queue
        ([], ["3 stall 3 3.5", "4 stall 3.2 3.8"], 100.0, 1),  # time in which two processes stall at once counts once
        ([FaultPeriod("process stopped", 3, 1.0, 2.7)], ["3 stall 1 4.3"], 100.0, 1),  # the harness stopped the process
        ([], [], 3.7, 0),  # the run ended, so no contender waited for the name any longer
        ([], [], 3.8, 1),
    ],
)
def test_a_late_takeover_is_excused_after_a_fault_or_while_its_process_did_not_run(
    faults: list[FaultPeriod], stalls: list[str], until: float, number: int
) -> None:
    late = record("1 got 1 n a 1 1", "1 held 2 a", "2 got 5 n b 2 1", *stalls)
    assert len(list(late.slow_takeovers(faults, 1.0, TTL, until))) == number


def test_a_network_is_considered_frozen_while_its_process_did_not_run() -> None:
    network = Standstills()
    network.close()
    start = now()
    network.beat(start)
    network.those.clear()
    for passed in (0.01, 0.05, 0.3, 0.34):
        network.beat(start + passed)
    assert network.those == [(start + 0.05, start + 0.3)]


def test_the_ledger_refuses_an_old_token_and_notices_a_lost_update(tmp_path_factory: pytest.TempPathFactory) -> None:
    ledger = LedgerServer(tmp_path_factory.mktemp("ledger") / "socket")
    try:
        assert ledger.answer("read", "n", 1) == "0"
        assert ledger.answer("read", "n", 2) == "0"
        assert ledger.answer("write", "n", 1, 1) == "refused"
        assert ledger.answer("write", "n", 2, 1) == "1"
        assert ledger.lost == []
        ledger.answer("write", "n", 2, 1)
        assert len(ledger.lost) == 1
    finally:
        ledger.close()


def test_a_failed_run_prints_everything_needed_to_repeat_it(capsys: pytest.CaptureFixture[str]) -> None:
    one = record("1 got 1 n a 1 1", "1 held 3 a")
    faults = [FaultPeriod("partition", 1, 1.0, 2.5)]
    Report(30.0, one, faults, violations=[f"O5 {n}" for n in range(30)], told=["[key]"], again="seed 7, 30 s").show()
    said = capsys.readouterr().out
    for told in ("again: seed 7, 30 s", "O5 29", "[key]", "0.000 to    1.500 partition, process 1; then held: n"):
        assert told in said
    Report(30.0, one, faults, again="seed 7").show()
    assert "seed 7" not in capsys.readouterr().out
