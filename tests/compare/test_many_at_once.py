"""Cycles that run at the same time, the faults that they share, and the limit of their number."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from multilock import ConfigurationError
from multilock.testing.compare import worker
from multilock.testing.compare.columns import Column, columns_for
from multilock.testing.compare.contestants import BLOCKING
from multilock.testing.compare.cycle import Plan, play
from multilock.testing.compare.plan import Options, Plans
from multilock.testing.compare.pool import Limit, RunEnded, WorkerProcess
from multilock.testing.compare.scenarios import SCENARIOS
from multilock.testing.compare.servers import ServerFault, ServerProcess, Together

ENDS = {"what": "end", "at": 10.0}
CONTROLS = "multilock.testing.compare.controls"


class Server:
    """A stand-in for a server that can be stopped."""

    def __init__(self, fails: str = "") -> None:
        self.stops = 0
        self.down = False
        self._fails = fails

    @contextmanager
    def stopped(self, within: float) -> Iterator[None]:
        if self._fails:
            raise ServerFault(self._fails)
        self.stops += 1
        self.down = True
        yield
        self.down = False


class Said:
    """A stand-in for a worker that has printed these lines."""

    pid = 7
    returncode = None

    def __init__(self, *lines: str) -> None:
        self.lines = [*lines]
        self.told: list[str] = []

    def _take(self, within: float) -> list[str]:
        taken, self.lines = self.lines, []
        return taken

    def tell(self, line: str) -> None:
        self.told.append(line)

    def resume(self) -> None:
        pass

    def kill(self) -> None:
        pass


def worker_that_said(*lines: str, stop: threading.Event | None = None) -> WorkerProcess:
    its_worker = WorkerProcess.__new__(WorkerProcess)
    its_worker._stop, its_worker.fit, its_worker.helper = stop or threading.Event(), True, cast("Any", Said(*lines))
    its_worker._events, its_worker._first = [], {}
    return its_worker


def play_together(together: Together, server: Server, cycles: int, also: Any = None) -> list[Any]:
    """Play the cycles together. Return for each cycle whether it found the server down, or the error that it raised."""
    saw: list[Any] = []
    stop = threading.Event()
    all_in = threading.Barrier(cycles)  # a real fault, too, lasts until every cycle has seen it

    def one() -> None:
        try:
            together.gather(stop)
            with together.stopped(cast("ServerProcess", server), 9.0, lambda: None, stop):
                saw.append(server.down)
                all_in.wait(20)
        except (ServerFault, RunEnded) as error:
            saw.append(str(error))
        finally:
            together.leave()

    crew = [threading.Thread(target=one) for _ in range(cycles)]
    for each in crew:
        each.start()
    if also is not None:
        also(stop)
    for each in crew:
        each.join()
    return saw


def test_a_server_is_stopped_once_for_all_cells_that_wait_for_it() -> None:
    server, together = Server(), Together(5)
    together.leave()
    assert play_together(together, server, 4) == [True] * 4
    assert server.stops == 1


def test_a_failed_attempt_to_stop_a_server_does_not_count_as_a_fault() -> None:
    saw = play_together(Together(3), Server("it is gone"), 3)
    assert [("it is gone" in each) for each in saw] == [True] * 3


def test_a_cell_that_waits_for_others_is_notified_of_the_end_of_the_run() -> None:
    saw = play_together(Together(3), Server(), 2, also=lambda stop: stop.set())
    assert saw == ["the run was interrupted"] * 2


@pytest.mark.parametrize(
    ("stalls", "becomes"),
    [
        ([], 11),
        ([(7, 1.0, 1.05)], 11),
        ([(7, 1.0, 1.3)], 9),
        ([(8, 5.1, 7.9)], 11),  # a stall during the process's own fault
        ([(7, 5.1, 7.9)], 9),  # a stall at the same time in a process without a fault
    ],
)
def test_more_cells_run_at_once_while_they_find_processor_time(
    stalls: list[tuple[int, float, float]], becomes: int
) -> None:
    said = [{"what": "stall", "pid": pid, "at": at, "until": until} for pid, at, until in stalls]
    limit = Limit(6, 40)
    limit.now = 10
    limit.learn([{"what": "cycle", "at": 0.0}, {"what": "fault", "pid": 8, "at": 5.0, "until": 8.0}, *said, ENDS])
    assert limit.now == becomes


def test_the_requested_number_of_cells_runs_at_once() -> None:
    limit = Limit(6, 7)
    busy = {"what": "stall", "pid": 1, "at": 0.0, "until": 9.0}
    seen = []
    for events in ([], [], [busy], [busy]):
        limit.learn([{"what": "cycle", "at": 0.0}, *events, ENDS])
        seen.append(limit.now)
    assert seen == [7, 7, 6, 6]


def test_controls_run_the_requested_number_of_cycles_from_first_to_last(tmp_path: Path) -> None:
    columns = columns_for([f"sqlite://{tmp_path}/locks.db"], [], 2.0)
    options = Options(scenarios=["kill", "pause"], cycles=30, control_cycles=3)
    plans = Plans(columns, options, 1, "", 1)
    cycles = Counter((plan.contestant, plan.scenario.name) for _, plan in plans.cycles)
    assert cycles == {
        ("sqlite", "kill"): 30, ("sqlite", "pause"): 30, ("sqlite-flag", "kill"): 3, ("sqlite-flag", "pause"): 3,
    }  # fmt: skip
    rounds = [plan.number for _, plan in plans.cycles if plan.contestant == "sqlite-flag"]
    assert [sum(low < number <= low + 22 for number in rounds) for low in (0, 22, 44)] == [2, 2, 2]
    blocking = Counter(plan.adapter.rpartition(":")[2] for _, plan in plans.cycles if plan.contestant == "sqlite")
    assert blocking == {"Blocking": 30, "Asyncio": 30}
    with pytest.raises(ConfigurationError, match="0 for controls"):
        Options(control_cycles=0)


def planned(columns: list[Column], scenarios: list[str], **more: Any) -> Plans:
    options = Options(scenarios=scenarios, **{"cycles": 2, "all_of_controls": False, **more})
    return Plans(columns, options, 1, "", 1)


@pytest.mark.parametrize(
    ("scenarios", "of_controls"),
    [
        (["kill"], {("naive", "pause"): 1, ("sqlite-flag", "pause"): 1}),
        # Without a scenario, the cost of a lock is measured.
        ([], {("naive", "pause"): 1, ("sqlite-flag", "pause"): 1}),
        (["partition"], {("naive", "partition"): 2, ("sqlite-flag", "pause"): 1}),
        (["pause"], {("naive", "pause"): 2, ("sqlite-flag", "pause"): 2}),
    ],
)
def test_each_url_has_a_control_that_must_fail(scenarios: list[str], of_controls: dict[tuple[str, str], int]) -> None:
    urls = {"redis://127.0.0.1:1": ["redis", "naive", "redis-py"], "sqlite:////nowhere/x.db": ["sqlite", "sqlite-flag"]}
    must_fail = frozenset({"pause", "partition", "taken"})
    columns = [
        Column(
            name, url, [f"{CONTROLS}:Naive" if name in ("naive", "redis-py") else BLOCKING], 2.0, 3.0,
            control=name not in ("redis", "sqlite"),
            must_fail=frozenset() if name in ("redis", "sqlite", "redis-py")
            else must_fail - ({"partition"} if name == "sqlite-flag" else set()),
        )
        for url, names in urls.items()
        for name in names
    ]  # fmt: skip
    plans = planned(columns, scenarios)
    cycles = Counter(plan.cell for column, plan in plans.cycles if column.control)
    assert cycles == of_controls
    assert plans.scenarios == [*dict.fromkeys([*scenarios, "pause"])] or scenarios == ["pause"]
    assert plans.planned == len(plans.cycles)


def test_an_undecided_cell_is_repeated_but_not_forever(tmp_path: Path) -> None:
    plans = planned(columns_for([f"sqlite://{tmp_path}/locks.db"], [], 2.0), ["kill", "pause"])
    run = Counter[tuple[str, str]]()
    while plans.cycles:
        _, plan = plans.cycles.popleft()
        run[plan.cell] += 1
        if plan.cell == ("sqlite", "pause"):
            plans.settle(plan.cell)
        plans.cycles.extend(plans.once_more(plans.cycles, plan))
    assert run == {("sqlite", "kill"): 4, ("sqlite", "pause"): 2, ("sqlite-flag", "pause"): 4}


def test_each_cell_gets_one_decided_cycle_however_short_the_time(tmp_path: Path) -> None:
    columns = columns_for([f"sqlite://{tmp_path}/locks.db"], [], 2.0)
    plans = planned(columns, ["kill", "pause"], cycles=9, within=0.001)
    run = Counter[tuple[str, str]]()
    while (following := plans.take(plans.cycles, 0.0)) is not None:
        _, plan = following
        run[plan.cell] += 1
        if plan.cell == ("sqlite", "pause"):
            plans.settle(plan.cell)
        plans.ended(plan)
    assert run == {("sqlite", "kill"): 3, ("sqlite", "pause"): 1, ("sqlite-flag", "pause"): 3}


def test_output_of_a_worker_is_dropped_after_its_cycle() -> None:
    its_worker = worker_that_said("opened 1.0 A", 'wrong A "it hangs"', "held 2.0 A")
    assert [event["what"] for event in its_worker.forget()] == ["opened", "wrong", "held"]
    assert its_worker.said("opened", "A") is None
    assert (its_worker.helper.lines, its_worker.forget()) == ([], [])


def test_late_output_of_a_worker_does_not_count_for_the_next_cycle() -> None:
    stop = threading.Event()
    stop.set()
    adapter = "multilock.testing.compare.controls:Kazoo"  # with the memory backend no operator can clean up
    plan = Plan(3, "x", adapter, "memory://", SCENARIOS["kill"], "n", 2.0, 2.0, "1")
    a, b = worker_that_said("lost 1.0 A lost 1.0", stop=stop), worker_that_said("lost 1.0 B lost 1.0", stop=stop)
    events = play(plan, a, b, stop)
    assert [event["what"] for event in events] == ["cycle", "end"]
    assert events[-1]["stopped"]


def test_a_callback_after_its_client_was_closed_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(worker, "note", lambda what, *_: told.append(what))
    role = worker._Role("A", "adapter", "memory://", 2.0, "name")
    role._tell_loss()
    role.close()
    role._tell_loss()
    assert told == ["lost", "closed"]
