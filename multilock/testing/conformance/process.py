"""Tests of holders in other processes that are killed, frozen or forked, or exit. They need a backend that processes
can share."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from multilock import Client, LossReason, now
from multilock.testing.conformance.base import NAME, SOON, Conformance, Pulse, eventually
from multilock.testing.conformance.faces import FACES, Face
from multilock.testing.conformance.places import Place
from multilock.testing.conformance.rest import GRAIN
from multilock.testing.process import Helper

__all__ = ["ProcessConformance"]

PROCESSES = "multilock.testing.conformance_processes"
START = 20.0  # seconds that a process may take to start, even on a busy machine


class ProcessConformance(Conformance):
    """Tests with holders in other processes."""

    @pytest.fixture(params=["blocking"])
    def face(self, request: pytest.FixtureRequest) -> Face:
        """The blocking face only."""
        return FACES[request.param]()

    @pytest.fixture
    def helper(self, place: Place) -> Iterator[Callable[..., Helper]]:
        """A function that starts helper processes."""
        helpers: list[Helper] = []

        def start(function: str, *arguments: object) -> Helper:
            helper = Helper(
                f"{PROCESSES}:perform",
                *(place.registered_in or PROCESSES, function, place.clean_url, place.prefix, *arguments),
            )
            helpers.append(helper)
            return helper

        yield start
        for helper in helpers:
            helper.close()

    def test_processes_exclude_each_other(self, client: Client, helper: Callable[..., Helper]) -> None:
        holder = helper("hold", 30)
        holder.wait_for("held", START)
        assert client.lock(NAME).try_acquire() is None
        holder.tell("release")
        assert client.lock(NAME).try_acquire(timeout=SOON) is not None

    def test_the_lock_of_a_killed_holder_is_free_within_the_published_bound(
        self, client: Client, place: Place, helper: Callable[..., Helper], pulse: Pulse
    ) -> None:
        holder = helper("hold", place.quick_ttl)
        holder.wait_for("held", START)
        assert client.lock(NAME).try_acquire() is None
        holder.kill()
        killed_at = now()
        assert client.lock(NAME).try_acquire(timeout=client.capabilities.takeover_bound + START) is not None
        assert now() - killed_at <= place.quick_ttl + client.capabilities.takeover_bound + 1.0 + pulse.stopped()

    def test_a_frozen_holder_notices_the_loss_when_it_runs_again(
        self, client: Client, place: Place, helper: Callable[..., Helper]
    ) -> None:
        holder = helper("hold", place.quick_ttl)
        holder.wait_for("held", START)
        with holder.paused():
            next_one = client.lock(NAME).acquire(timeout=START)
            time.sleep(0.3 * place.quick_ttl)
        holder.tell("report")
        assert holder.wait_for("report", SOON)[1] == "False"
        assert holder.wait_for("lost", SOON)[1] == LossReason.PAUSED.value
        assert next_one.is_held()
        holder.tell("release")
        assert holder.wait_for("released", SOON)[1] == "False"
        assert next_one.is_held()

    def test_a_process_that_ends_releases_its_locks(self, client: Client, helper: Callable[..., Helper]) -> None:
        holder = helper("hold_and_exit", 30)
        holder.wait_for("held", START)
        assert holder.wait(SOON) == 0
        assert client.lock(NAME).try_acquire(timeout=SOON) is not None
        assert not any(line.startswith("lost") for line in holder.lines)

    def test_an_exiting_process_never_passes_its_locks_to_its_own_waiters(
        self, client: Client, helper: Callable[..., Helper]
    ) -> None:
        holder = helper("exit_with_waiters_of_its_own", 30)
        holder.wait_for("waiting", START)
        assert holder.wait(SOON) == 0
        assert client.lock(NAME).try_acquire(timeout=SOON) is not None

    @pytest.mark.parametrize("end", ["killed", "exited"])
    def test_a_name_rests_after_an_early_release_even_if_the_process_ends(
        self, client: Client, place: Place, helper: Callable[..., Helper], end: str
    ) -> None:
        if not client.capabilities.hold_at_least:
            pytest.skip("declared: the client would have to live for it")
        holder = helper("rest" if end == "killed" else "hold_resting_and_exit", place.quick_ttl, place.rest)
        until = float(holder.wait_for("rests", START)[1]) - GRAIN
        if end == "killed":
            holder.kill()
        assert client.lock(NAME).try_acquire() is None or now() >= until
        assert holder.wait(SOON) is not None
        assert client.lock(NAME).try_acquire(timeout=2 * place.rest_at_most + SOON) is not None
        assert now() >= until

    def test_no_thread_of_multilock_keeps_a_process_alive(self, client: Client, helper: Callable[..., Helper]) -> None:
        with client.lock(NAME):
            waiting = helper("exit_with_a_waiter", 30)
            waiting.wait_for("waiting", START)
            assert waiting.wait(SOON) == 0

    def test_no_signal_handler_is_installed(self, helper: Callable[..., Helper]) -> None:
        holder = helper("hold", 30)
        holder.wait_for("held", START)
        holder.signal(signal.SIGTERM)
        assert holder.wait(SOON) == -signal.SIGTERM

    def test_a_forked_child_holds_no_lock_and_opens_its_own_connections(
        self, client: Client, helper: Callable[..., Helper]
    ) -> None:
        parent = helper("fork", 30)
        parent.wait_for("held", START)
        said = parent.wait_for("child", START)
        assert said[1:] == ["released", "NotHeld", "False", "NotHeld", "refused", "free", "no-callback"]
        assert parent.wait_for("parent", SOON)[1:] == ["True"]

    @pytest.mark.parametrize("how", ["serve", "serve_async"])
    def test_the_next_leader_begins_after_the_former_leader_has_ended_its_work(
        self, client: Client, helper: Callable[..., Helper], how: str
    ) -> None:
        first = helper(how, 30)
        first.wait_for("begins", START)
        second = helper(how, 30)
        second.wait_for("ready", START)
        eventually(lambda: (info := client.inspect(NAME)) and info.waiting != 0)
        first.signal(signal.SIGTERM)
        began = float(second.wait_for("begins", START)[1])
        assert float(first.wait_for("ends", SOON)[1]) <= began
        assert first.wait(SOON) == 0
        second.signal(signal.SIGTERM)
        second.wait_for("ends", SOON)
        assert second.wait(SOON) == 0
        assert client.inspect(NAME) is None

    def test_holders_never_overlap_while_processes_are_stopped_and_killed(
        self, client: Client, place: Place, helper: Callable[..., Helper]
    ) -> None:
        holders = [helper("believe", place.quick_ttl) for _ in range(3)]
        for holder in holders:
            holder.wait_for("ready", START)
        until = now() + 6 * place.quick_ttl
        turn = 0
        while now() < until:
            holder = holders[turn % 3]
            turn += 1
            with holder.paused():
                time.sleep(place.quick_ttl * (0.3, 1.4)[turn % 2])
        beliefs = []
        for holder in holders:
            holder.tell("end")
            holder.wait_for("ended", START)
            beliefs += [tuple(map(float, line.split()[1:])) for line in holder.lines if line.startswith("belief")]
        beliefs.sort()
        assert len(beliefs) >= 3
        overlaps = [(first, second) for first, second in itertools.pairwise(beliefs) if second[0] < first[1]]
        assert overlaps == []
