"""A cycle is judged only by its events. If the events do not show enough, the outcome is undecided."""

from __future__ import annotations

from typing import Any

import pytest

from multilock.testing.compare.history import Event, event_of, record_of
from multilock.testing.compare.loads import rows_of
from multilock.testing.compare.report import conclude
from multilock.testing.compare.verdicts import cells_of, judge_cycle

A, B = 1, 2
HELD = ["1 got 10 n A 1 1", "1 held 11.9 A", "1 over 12 A 12.001", "1 lost 12 A lost 12"]
LATE = ["1 lost 12.4 A lost 12.4"]
NEXT = ["2 got 12.3 n B 2 1", "2 held 12.9 B", "2 release 13 B", "2 released 13.1 B 1"]
LAST = ["2 got 13.1 n C 3 1", "2 release 13.2 C", "2 released 13.3 C 1"]


def cycle(
    scenario: str, *lines: str, took_place: bool = True, reached: bool = True, fault: float = 10.5
) -> list[Event]:
    events: list[Event] = [
        {"what": "cycle", "contestant": "x", "scenario": scenario, "ttl": 2.0, "bound": 3.0},
        {"what": "fault", "kind": scenario, "pid": A, "at": fault, "until": 12.6},
    ]
    for line in lines:
        event = event_of(int(line[0]), line[2:])
        assert event is not None
        events.append(event)
    events.append({"what": "end", "reached": reached, "took_place": took_place, "why": "" if reached else "late"})
    return [{"cycle": 7, **event} for event in events]


@pytest.mark.parametrize(
    ("scenario", "lines", "outcome", "why"),
    [
        ("partition", [*HELD, *NEXT, *LAST], "kept", ""),
        ("partition", [*HELD[:1], "1 held 12.5 A", "1 over 12.6 A 12.6", *NEXT, *LAST], "broken", "same time"),
        ("partition", [*HELD[:2], *NEXT, *LAST], "undecided", "end"),
        ("partition", [*HELD, "2 stall 11.5 12.4", *NEXT, *LAST], "undecided", "stood still"),
        ("partition", [*HELD[:3], *LATE, *NEXT, *LAST], "broken", "notified of its loss"),
        (
            "partition",
            [*HELD[:3], "1 lost 12.4 A lost 12.4", "1 stall 10.2 10.3", *NEXT, *LAST],
            "undecided",
            "callback",
        ),
        ("partition", [*HELD, "1 lost 12.1 A lost 12.1", *NEXT, *LAST], "broken", "2 times"),
        ("partition", [*HELD, *NEXT, *LAST, "2 lost 13.2 B lost 13.2"], "broken", "also notified of a loss"),
        ("partition", [*HELD, "2 got 12.3 n B 1 1", *NEXT[1:], *LAST], "broken", "token 1 of B"),
        ("partition", [*HELD, NEXT[0], "2 over 12.7 B 12.7", *LAST], "undecided", "no fault was meant for it"),
        ("partition", HELD, "undecided", "fewer than two"),
        ("pause", ["1 got 10 n A 1 1", "1 held 10.5 A", "1 over 12.6 A 12.6", *NEXT, *LAST], "kept", ""),
        ("pause", ["1 got 10 n A 1 1", "1 held 12.61 A", "1 release 12.7 A", *NEXT, *LAST], "broken", "same time"),
        ("kill", ["1 got 10 n A 1 1", "1 held 10.5 A", "2 got 12.7 n B 2 1", *NEXT[1:], *LAST], "kept", ""),
        ("taken", ["1 got 10 n A 1 1", "1 held 12.5 A", "1 over 12.6 A 12.6", *NEXT, *LAST], "kept", ""),
        ("taken", ["1 got 10 n A 1 1", "1 held 12.5 A", *NEXT, *LAST], "undecided", "was notified of it"),
        ("taken", ["1 got 10 n A 1 1", "1 held 17 A", "1 over 17 A 17", *NEXT, *LAST], "broken", "last moment"),
    ],
)
def test_a_cycle_is_kept_broken_or_undecided(scenario: str, lines: list[str], outcome: str, why: str) -> None:
    verdict = judge_cycle(cycle(scenario, *lines))
    assert (verdict.outcome, why in " ".join(verdict.why)) == (outcome, True)


SILENT = [*HELD[:3], "1 listens 10 A"]  # the holder had a callback, which was not called
LATER = ["1 release 13.2 A", "1 released 13.2 A 0", "1 closed 14 A"]


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        ([*SILENT, *LATER], "broken"),
        ([*HELD[:3], *LATER], "kept"),  # the holder had registered no callback
        ([*SILENT, HELD[3], *LATER], "kept"),
        # The holder released before the callback could be called.
        ([*SILENT, "1 release 12.02 A", "1 closed 14 A"], "undecided"),
        ([*SILENT, "1 release 13 A", "1 closed 14 A", "1 stall 12.02 13"], "undecided"),
        # A closed its client before the callback was due
        ([*SILENT, "1 release 12.1 A", "1 closed 12.2 A"], "undecided"),
        ([*SILENT, "1 release 12.1 A", "1 closed 13 A", "1 stall 12.1 12.9"], "undecided"),
        # There was enough time for the callback.
        ([*SILENT, "1 release 12.9 A", "1 closed 14 A", "1 stall 12.1 12.6"], "broken"),
        ([*SILENT, "1 release 13 A"], "undecided"),
        # A did not hold at all.
        (["1 got 10 n A 1 0", "1 over 10 A 10", "1 listens 10 A", *LATER], "no-fault"),
    ],
)
def test_an_unreported_loss_is_broken_if_there_was_time_to_report_it(lines: list[str], outcome: str) -> None:
    verdict = judge_cycle(cycle("partition", *lines, *NEXT, *LAST))
    assert verdict.outcome == outcome, verdict.why
    assert ("never notified" in " ".join(verdict.why)) == (outcome == "broken")


def test_a_fault_that_did_not_happen_proves_nothing() -> None:
    assert judge_cycle(cycle("partition", *HELD, *NEXT, *LAST, took_place=False)).outcome == "no-fault"
    assert judge_cycle(cycle("partition", *HELD, *NEXT, *LAST, fault=12.2)).outcome == "no-fault"
    assert judge_cycle(cycle("taken", *HELD, *NEXT, *LAST, fault=12.2)).outcome == "no-fault"


def test_an_aborted_cycle_proves_only_what_is_certain() -> None:
    assert judge_cycle(cycle("partition", *HELD, reached=False)).outcome == "undecided"
    late = [HELD[0], "1 held 12.5 A", *NEXT]
    assert judge_cycle(cycle("partition", *late, reached=False)).outcome == "broken"


def test_the_history_contains_the_same_as_the_output_lines() -> None:
    events = cycle("partition", *HELD, "2 stall 1 2", '1 refused 3 A "a b"', "1 got 4 n D - 0")
    record = record_of(events)
    assert record.beliefs["A"].over_by == 12.001
    assert record.beliefs["D"].token is None
    assert record.stalls == {B: [(1.0, 2.0)]}
    assert [event["why"] for event in events if event["what"] == "refused"] == ["a b"]
    assert event_of(1, "ready") is None


LINES = {"kept": [*HELD, *NEXT, *LAST], "undecided": HELD, "broken": [HELD[0], "1 held 12.5 A", *NEXT]}


def column(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "url": "u", "control": False, "must_fail": [], "gone": None, "leftovers": [], **more}


def concluded(*rows: tuple[str, str, str], **columns: Any) -> int:
    cells = []
    for contestant, scenario, outcome in rows:
        lines = (
            [*HELD, *NEXT, *LAST]
            if outcome == "kept"
            else HELD
            if outcome == "undecided"
            else [HELD[0], "1 held 12.5 A", *NEXT]
        )
        events = cycle(scenario, *lines)
        events[0]["contestant"] = contestant
        cells += cells_of([(events[0], judge_cycle(events))])
    found = conclude([column(name, **more) for name, more in columns.items()], cells)
    return int(found["exit_code"])


CONTROL = {"control": True, "must_fail": ["partition"]}


def test_the_exit_code_states_the_verdict() -> None:
    kept, red = ("ours", "partition", "kept"), ("weak", "partition", "broken")
    assert concluded(kept, red, ours={}, weak=CONTROL) == 0
    assert concluded(("ours", "partition", "broken"), red, ours={}, weak=CONTROL) == 1
    assert concluded(kept, red, ours={"leftovers": ["key"]}, weak=CONTROL) == 1
    assert concluded(kept, red, ours={}, weak={**CONTROL, "leftovers": ["key"]}) == 1
    assert concluded(kept, ("weak", "partition", "kept"), ours={}, weak=CONTROL) == 3
    assert concluded(kept, ("weak", "partition", "undecided"), ours={}, weak=CONTROL) == 3
    assert concluded(("ours", "partition", "undecided"), red, ours={}, weak=CONTROL) == 3
    assert concluded(kept, ("ours", "pause", "undecided"), red, ours={}, weak=CONTROL) == 3
    assert concluded(kept, red, ("weak", "pause", "undecided"), ours={}, weak=CONTROL) == 0
    assert concluded(kept, ours={}, weak={**CONTROL, "gone": "it raised"}) == 3
    assert concluded(ours={"gone": "away"}, weak={**CONTROL, "gone": "away"}) == 69
    assert concluded(ours={}) == 3


def test_a_result_of_none_is_printed_with_the_number_of_tries_and_its_meaning() -> None:
    events = cycle("partition", *HELD, *NEXT, *LAST)
    [cell] = cells_of([(events[0], judge_cycle(events))] * 300)
    assert cell["decided"] == 300
    assert cell["below"] == pytest.approx(0.00994, abs=1e-5)
    assert cell["overlap_worst"] == pytest.approx(-0.1)  # C acquired 0.1 s after B's call of release()
    assert cell["takeover"]["most"] == pytest.approx((12.3 - 10.5) / 2)


def load(kind: str, *lines: str, contenders: int = 3, **more: Any) -> list[Event]:
    head = {"kind": kind, "contestant": "x", "adapter": "m:N", "contenders": contenders, "processes": 1, "hold": 0.0}
    said = [event_of(A, line) for line in lines]
    events = [{"what": "load", "seconds": 2.0, **head, **more}, *filter(None, said), {"what": "end", "why": ""}]
    return [{"cycle": 9, **event} for event in events]


def test_contention_is_described_by_grants_waits_and_handovers() -> None:
    lines = ["grant 1 P.0 0.5 2 1 1", "grant 2.1 P.1 0.6 3 1 2", "grant 3.5 P.0 3.2 4 1 3"]
    [row] = rows_of([load("contention", *lines)])
    assert (row["grants"], row["per_second"], row["starved"], row["most"], row["least"]) == (3, 1.5, 1, 2, 0)
    assert row["wait"]["most"] == pytest.approx(1.5)
    assert (row["hand_over"]["n"], row["hand_over"]["most"]) == (1, pytest.approx(0.1))
    assert row["violations"] == []


@pytest.mark.parametrize(
    ("second", "wrong"),
    [
        ("grant 1.9 P.1 0 3 1 2", "at the same time"),
        ("grant 2.1 P.1 0 3 1 1", "came after"),
        # the second holder no longer believed that it held the lock, so no violation is certain
        ("grant 1.9 P.1 0 3 0 2", ""),
        ("grant 2.1 P.1 0 3 1 -", ""),
    ],
)
def test_two_holders_under_load_are_a_violation(second: str, wrong: str) -> None:
    [row] = rows_of([load("contention", "grant 1 P.0 0.5 2 1 1", second)])
    assert [wrong in each for each in row["violations"]] == ([True] if wrong else [])
    assert conclude([column("x")], [], [row])["exit_code"] == bool(wrong)


@pytest.mark.parametrize(
    ("lines", "deadlocks"),
    [
        (["grant 1 P.0 0.5 2 1 1", "grant 2.1 P.1 0.6 3 1 2", "served 5.5 P.2 0.7 6 1 3"], 0),
        (["grant 1 P.0 0.5 2 1 1", "served 5.1 P.1 0.6 6 1 2"], 1),
        (["grant 1 P.0 0.5 2 1 1", "served 5.1 P.1 2.6 6 1 2"], 0),  # the waiter began to wait after the release
        (["grant 1 P.0 0.5 2 1 1", "unserved 5.1 P.1 0.6"], 1),
        (["grant 1 P.0 0.5 4 1 1", "unserved 5.1 P.1 0.6"], 0),  # meanwhile P.0 held the lock
        (["unserved 5.1 P.1 0.6", "unserved 5.1 P.0 0.6"], 1),
        (["grant 1 P.0 0.5 2 1 1", "served 5.1 P.1 0.6 6 1 2", "stall 2 3.5"], 0),
        ([], 0),
    ],
)
def test_a_free_lock_that_no_waiter_gets_is_a_deadlock(lines: list[str], deadlocks: int) -> None:
    [row] = rows_of([load("contention", *lines, bound=3.0)])
    assert row["deadlocks"] == len(row["violations"]) == deadlocks
    assert row["grants"] == sum(line.startswith("grant") for line in lines)


def test_requests_are_counted_apart_from_the_timings() -> None:
    events = load(
        "contention", "grant 1 P0.0 0.5 2 1 1", "grant 3 Q0.0 2.9 3 1 2", "served 3 Q0.1 2 3.1 1 3", bound=3.0
    )
    assert rows_of([events])[0]["sends_per_grant"] is None
    events[1:1] = [{"cycle": 9, "what": "sent", "pieces": pieces, "bytes": 1, "at": 1.0} for pieces in (10, 17)]
    [row] = rows_of([events])
    assert (row["sends_per_grant"], row["grants"], row["starved"]) == (3.5, 1, 2)


def test_the_cost_of_a_lock_is_shown_beside_its_own_ping() -> None:
    lines = ["spent 1 P 0.002 0.001 0.001", "spent 2 P 0.004 0.002 -"]
    [row] = rows_of([load("cost", *lines)])
    assert (row["acquire_release"]["p50"], row["acquire_release"]["most"]) == (0.003, 0.006)
    assert (row["ping"]["n"], row["times_ping"]) == (1, 3.0)


def test_two_writes_accepted_in_the_wrong_order_are_a_violation() -> None:
    """A refused write is not a violation: its token has protected the resource."""
    sound = ["1 wrote 10.1 A 1 1 1", "2 wrote 12.4 B 2 2 1", "1 wrote 12.6 A 1 2 0"]
    verdict = judge_cycle(cycle("partition", *HELD, *NEXT, *LAST, *sound))
    assert (verdict.outcome, verdict.writes, verdict.refused) == ("kept", 2, 1)
    lost = judge_cycle(cycle("partition", *HELD, *NEXT, *LAST, *sound[:2], "1 wrote 12.6 A 1 2 1"))
    assert lost.outcome == "broken"
    assert "B and A both wrote 2" in lost.why[0]
