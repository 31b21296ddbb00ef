"""Tests of a backend that does not answer: how long a wait continues, and which error it then raises."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from multilock import BackendUnavailable, Client, Lease, LockTimeout, MultilockError, now
from multilock.testing.conformance.base import NAME, SOON, Conformance, Pulse, eventually, refused
from multilock.testing.conformance.faces import background
from multilock.testing.conformance.places import Place

__all__ = ["OutageConformance"]


class OutageConformance(Conformance):
    """Tests of waits during an outage."""

    @pytest.fixture
    def client(self, make: Callable[..., Client]) -> Client:
        """A client with short timeouts."""
        return make(request_timeout=0.15, outage_timeout=1.0)

    def test_a_wait_continues_through_an_outage_shorter_than_the_outage_timeout(
        self, make: Callable[..., Client], place: Place
    ) -> None:
        client = make(request_timeout=0.3, outage_timeout=10)
        with place.silence():
            waiting = background(lambda: client.lock(NAME).acquire(timeout=20))
            time.sleep(0.4)
            assert not waiting.done()
        assert waiting.result(SOON).is_held()

    def test_a_wait_raises_after_the_outage_timeout(self, client: Client, place: Place, pulse: Pulse) -> None:
        with place.silence():
            begun = now()
            with pytest.raises(BackendUnavailable) as caught:
                client.lock(NAME).acquire()
            assert 1.0 <= now() - begun < 3.0 + pulse.stopped()
        assert isinstance(caught.value, ConnectionError)
        assert caught.value.name == NAME
        assert caught.value.backend

    def test_at_the_timeout_a_silent_server_raises_backend_unavailable(
        self, make: Callable[..., Client], place: Place, pulse: Pulse
    ) -> None:
        client = make(request_timeout=0.15, outage_timeout=10)
        with place.silence():
            begun = now()
            with pytest.raises(BackendUnavailable):
                client.lock(NAME).acquire(timeout=0.4)
            assert 0.4 <= now() - begun < 1.5 + pulse.stopped()
            with pytest.raises(BackendUnavailable):
                client.lock(NAME).try_acquire(timeout=0.2)

    def test_a_single_try_raises_at_the_first_request_without_a_reply(
        self, client: Client, place: Place, pulse: Pulse
    ) -> None:
        with place.silence():
            begun = now()
            with pytest.raises(BackendUnavailable):
                client.lock(NAME).acquire(timeout=0)
            assert now() - begun < 0.9 + pulse.stopped()
        with place.down(), pytest.raises(BackendUnavailable):
            client.lock(NAME).try_acquire()

    def test_the_reply_that_a_lock_is_taken_never_counts_as_silence(
        self, make: Callable[..., Client], other: Client, place: Place
    ) -> None:
        client = make(request_timeout=0.3, outage_timeout=10)
        other.lock(NAME).acquire()

        def wait(seconds: float) -> Lease:
            with place.silence():
                waiting = background(lambda: client.lock(NAME).acquire(timeout=seconds))
                time.sleep(0.4)
            return waiting.result(seconds + SOON)

        with pytest.raises(LockTimeout):
            refused(wait, 2.0)

    def test_all_waiters_of_one_client_notice_the_outage_in_time(
        self, client: Client, place: Place, pulse: Pulse
    ) -> None:
        with place.silence():
            begun = now()
            waiting = [background(lambda: client.lock(NAME).acquire()) for _ in range(4)]
            for each in waiting:
                with pytest.raises(BackendUnavailable):
                    each.result(SOON)
            assert now() - begun < 3.0 + pulse.stopped()

    def test_a_waiter_behind_an_unanswered_request_never_raises_lock_timeout(
        self, make: Callable[..., Client], place: Place
    ) -> None:
        client = make(request_timeout=1.0, outage_timeout=10)
        with place.silence():
            first = background(lambda: client.lock(NAME).acquire(timeout=20).release())
            time.sleep(0.1)
            with pytest.raises(BackendUnavailable):
                client.lock(NAME).acquire(timeout=0.6)  # this call ends before its request is sent
        assert first.result(SOON)

    def test_a_client_starts_while_its_backend_is_down(self, make: Callable[..., Client], place: Place) -> None:
        with place.down():
            client = make(outage_timeout=None)
            waiting = background(lambda: client.lock(NAME).acquire(timeout=20))
            time.sleep(0.3)
            assert not waiting.done()
        assert waiting.result(SOON).is_held()

    def test_each_call_that_asks_the_backend_raises_backend_unavailable_in_an_outage(
        self, client: Client, place: Place
    ) -> None:
        lock = client.lock(NAME)
        with place.down():
            for ask in (
                client.ping,
                lambda: client.inspect(NAME),
                lambda: list(client.inspect_all()),
                lambda: client.force_release(NAME),
                client.diagnose,
                lock.is_locked,
            ):
                with pytest.raises(BackendUnavailable) as caught:
                    ask()
                assert caught.value.__cause__ is None or not isinstance(caught.value.__cause__, MultilockError)

    def test_is_healthy_sends_no_request(self, client: Client, place: Place) -> None:
        client.lock(NAME).acquire()
        with place.silence():
            eventually(client.is_healthy)

    def test_a_lock_that_a_failed_wait_may_have_acquired_is_released(
        self, client: Client, other: Client, place: Place
    ) -> None:
        with place.silence(), pytest.raises(BackendUnavailable):
            client.lock(NAME, ttl=30).acquire(timeout=0.3)
        with other.lock(NAME).acquire(timeout=SOON):
            pass
        time.sleep(0.2)
        assert other.inspect(NAME) is None
