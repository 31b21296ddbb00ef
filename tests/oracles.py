"""Oracles: the checks after each test, and the conformance tests whose failures `tests.again` never runs again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from multilock import now, system
from multilock.kernel import worker

__all__ = ["CONFORMANCE", "is_of_conformance", "no_thread_is_missing_or_dead", "threads_may_die"]

# Tests of `multilock.testing.conformance` that check for an overlap, a token, a callback, or leftovers. The suites are
# public and another project's pytest may not know the marker, so these tests have none.
CONFORMANCE = frozenset(
    {
        "test_a_blocked_loop_delays_the_callback_but_is_held_stays_correct",
        "test_a_callback_set_after_the_loss_is_called_at_once",
        "test_a_callback_that_raises_affects_nothing_else",
        "test_a_cancelled_run_releases_the_lease_after_its_work_and_on_lost",
        "test_a_cancelled_wait_leaves_nothing_behind",
        "test_a_closed_client_leaves_no_thread_behind",
        "test_the_validity_counts_from_the_sending_even_if_replies_are_late",
        "test_the_validity_of_a_grant_counts_from_the_sending_of_its_request",
        "test_an_on_lost_that_hangs_delays_the_release_by_one_ttl_at_most",
        "test_a_hanging_renewal_never_delays_the_callback",
        "test_a_stopped_leader_leaves_no_rest",
        "test_during_a_silence_the_lease_ends_before_another_client_gets_the_lock",
        "test_a_lost_lease_leaves_no_rest",
        "test_a_lost_leadership_is_reported_before_another_candidate_leads",
        "test_a_lost_lease_is_never_held_again",
        "test_a_lost_reply_leaves_no_reader_behind",
        "test_a_lost_reply_to_a_single_try_raises_and_leaves_nothing",
        "test_a_refused_attempt_that_does_not_join_the_queue_leaves_nothing",
        "test_a_request_executed_after_its_cancel_acquires_nothing",
        "test_a_running_on_elected_never_delays_on_lost_and_the_node_waits_for_both",
        "test_a_waiter_that_gave_up_leaves_nothing_behind",
        "test_an_acknowledgement_that_arrives_too_late_does_not_revive_the_lease",
        "test_if_on_elected_raises_the_lease_is_released_after_the_work_has_ended",
        "test_a_different_number_of_permits_is_refused_at_once_and_leaves_nothing",
        "test_holders_never_overlap_while_processes_are_stopped_and_killed",
        "test_each_on_elected_of_a_campaign_is_followed_by_one_on_lost",
        "test_holders_never_overlap_under_contention",
        "test_is_leader_is_false_as_soon_as_the_deadline_has_passed",
        "test_under_contention_permits_are_never_exceeded_and_no_waiter_starves",
        "test_readers_and_writers_leave_nothing_at_the_server",
        "test_on_lost_is_called_before_the_lease_is_released",
        "test_processes_exclude_each_other",
        "test_readers_and_writers_never_overlap_under_contention",
        "test_renew_never_acquires_a_lost_name",
        "test_stop_leaves_no_leader_behind_even_if_it_meets_the_grant",
        "test_each_later_term_is_greater",
        "test_the_callback_is_called_once_however_many_threads_notice_the_loss",
        "test_the_callback_never_runs_on_the_renewing_thread",
        "test_the_next_leader_begins_after_the_former_leader_has_ended_its_work",
        "test_new_work_begins_after_the_work_of_the_former_leader_has_ended",
        "test_there_is_never_a_callback_after_a_release",
        "test_each_later_token_is_greater",
        "test_tokens_grow_with_every_grant",
        "test_writers_have_greater_tokens_than_the_readers_before_them",
        "test_a_lock_that_a_failed_wait_may_have_acquired_is_released",
        "test_a_new_on_elected_begins_after_that_of_the_former_leader_has_ended",
        "test_a_waiter_of_a_closed_loop_blocks_no_other_waiter_and_leaves_nothing",
    }
)

WITHIN = 10.0  # seconds within which every thread that could not start must start


def is_of_conformance(item: pytest.Item) -> bool:
    """Return whether the item runs a conformance test that is listed as an oracle."""
    suites = getattr(item, "cls", None)
    return (
        suites is not None
        and any(suite.__module__.startswith("multilock.testing.conformance") for suite in suites.__mro__)
        and getattr(item, "originalname", None) in CONFORMANCE
    )


@pytest.fixture(autouse=True)
def no_thread_is_missing_or_dead() -> Iterator[None]:
    """Check that no thread of multilock died of a defect, and that every thread that once could not start has started
    since.

    `multilock.kernel.worker` remembers these threads for the whole process, and the clients of later tests would report
    them.
    """
    yield
    until = now() + WITHIN
    while worker.try_again() and now() < until:
        system.sleep(0.05)
    troubles = worker.troubles()
    worker._deaths.clear()
    assert troubles == []


@pytest.fixture
def threads_may_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a thread of multilock die of a defect in this test."""
    monkeypatch.setattr(worker, "_deaths", {})
