"""In `HandRuntime` time moves only when the test moves it, and every step runs at its exact time."""

from __future__ import annotations

import math
import re
import textwrap
import threading

import pytest

from multilock.testing import HandRuntime, hand


class Stepper:
    """A ticker that steps every ``period`` seconds and records the times."""

    def __init__(self, runtime: HandRuntime, period: float) -> None:
        self.runtime = runtime
        self.period = period
        self.times: list[float] = []
        self.deaths: list[BaseException] = []
        self.ticker = runtime.ticker(self.step, self.deaths.append, "stepper")
        self.ticker.start()

    def step(self) -> float:
        self.times.append(self.runtime.now())
        return self.runtime.now() + self.period


@pytest.fixture
def runtime() -> HandRuntime:
    return HandRuntime(start=100.0)


def test_steps_run_at_their_exact_times_and_in_order(runtime: HandRuntime) -> None:
    slow, fast = Stepper(runtime, 3.0), Stepper(runtime, 2.0)
    runtime.advance(6.5)
    assert slow.times == [100, 103, 106]
    assert fast.times == [100, 102, 104, 106]
    assert runtime.now() == 106.5


def test_nothing_runs_while_time_jumps_and_the_ticker_is_late(runtime: HandRuntime) -> None:
    stepper = Stepper(runtime, 1.0)
    runtime.settle()
    runtime.jump(10)
    assert stepper.times == [100]
    assert stepper.ticker.late() == 9.0
    runtime.settle()
    assert stepper.times == [100, 110]


def test_a_poke_brings_the_next_step_forward_and_never_delays_it(runtime: HandRuntime) -> None:
    stepper = Stepper(runtime, 10.0)
    runtime.settle()
    stepper.ticker.poke(105.0)
    stepper.ticker.poke(107.0)
    runtime.advance(8)
    assert stepper.times == [100, 105]


def test_a_ticker_that_raises_is_dead_and_reports_it_once(runtime: HandRuntime) -> None:
    deaths: list[BaseException] = []

    def step() -> float:
        raise MemoryError

    ticker = runtime.ticker(step, deaths.append, "dying")
    ticker.start()
    runtime.advance(5)
    assert [type(death) for death in deaths] == [MemoryError]
    assert ticker.late() == math.inf


def test_a_closed_ticker_steps_no_more(runtime: HandRuntime) -> None:
    stepper = Stepper(runtime, 1.0)
    stepper.ticker.close()
    runtime.advance(5)
    assert stepper.times == []


def test_a_spinning_ticker_raises_an_error_instead_of_hanging(runtime: HandRuntime) -> None:
    runtime.ticker(runtime.now, lambda death: None, "spinning").start()
    with pytest.raises(RuntimeError, match="spins"):
        runtime.advance(1)


def test_waiting_moves_the_clock_to_the_moment_the_event_is_set(runtime: HandRuntime) -> None:
    event = runtime.event()

    def step() -> float:
        if runtime.now() >= 102:
            event.set()
        return runtime.now() + 1

    runtime.ticker(step, lambda death: None, "setter").start()
    assert event.wait(5.0)
    assert runtime.now() == 102


def test_a_wait_that_times_out_has_moved_the_clock(runtime: HandRuntime) -> None:
    assert not runtime.event().wait(2.5)
    assert runtime.now() == 102.5


def test_a_wait_that_could_never_end_raises(runtime: HandRuntime) -> None:
    with pytest.raises(RuntimeError, match="never end"):
        runtime.event().wait()


def test_jobs_run_at_once_or_when_released(runtime: HandRuntime) -> None:
    workers = runtime.workers("w", 2)
    done: list[int] = []
    workers.submit(lambda: done.append(1))
    runtime.hold_jobs()
    for number in (2, 3, 4):
        workers.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    assert (done, runtime.held_jobs) == ([1], 3)
    runtime.release_jobs(1)
    assert done == [1, 2]
    runtime.release_jobs()
    workers.submit(lambda: done.append(5))
    assert done == [1, 2, 3, 4, 5]


def test_a_job_submitted_by_a_step_runs_after_it_at_the_same_time(runtime: HandRuntime) -> None:
    workers = runtime.workers("w", 1)
    order: list[str] = []

    def step() -> float:
        workers.submit(lambda: order.append(f"job at {runtime.now():g}"))
        order.append("step")
        return math.inf

    runtime.ticker(step, lambda death: None, "t").start()
    runtime.advance(1)
    assert order == ["step", "job at 100"]


def test_the_same_seed_gives_the_same_jitter() -> None:
    first, second = HandRuntime(seed=7), HandRuntime(seed=7)
    assert [first.uniform(0, 1) for _ in range(5)] == [second.uniform(0, 1) for _ in range(5)]


def test_a_real_thread_waits_for_virtual_time_to_move() -> None:
    runtime = HandRuntime(threads=True)
    waiting, woken = threading.Event(), threading.Event()
    answers: list[bool] = []

    def wait() -> None:
        waiting.set()
        answers.append(runtime.event().wait(5.0))
        woken.set()

    runtime.spawn(wait, "waiter")
    assert waiting.wait(5)
    assert not woken.wait(0.05)
    runtime.advance(6)
    while not woken.wait(0.05):  # the waiter may have begun to wait after the clock moved
        runtime.advance(6)
    assert answers == [False]


@pytest.mark.parametrize(
    ("timeout", "message"),
    [
        (1000.0, r"set the event within 0.1 real seconds, and its wait ends in 9\d\d\S* s of the test's clock: set it"),
        (None, r"set the event within 0.1 real seconds: set it, or call advance"),
    ],
)
def test_a_wait_of_a_real_thread_tells_how_much_time_is_left(
    timeout: float | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand, "REAL_LIMIT", 0.1)
    runtime = HandRuntime(threads=True)
    ended = threading.Event()
    errors: list[str] = []

    def wait() -> None:
        try:
            runtime.event().wait(timeout)
        except RuntimeError as error:
            errors.append(str(error))
        ended.set()

    runtime.spawn(wait, "waiter")
    while not ended.wait(0.02):
        runtime.advance(0.01)
    assert re.search(message, errors[0])


def test_the_example_of_the_module_runs() -> None:
    assert hand.__doc__
    exec(textwrap.dedent(hand.__doc__.partition("::\n")[2]), {})
