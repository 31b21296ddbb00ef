"""Oracles: the checks after each test, and the conformance tests whose failures `tests.again` never runs again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from multilock import now, system
from multilock.kernel import worker

__all__ = ["CONFORMANCE", "is_of_conformance", "no_thread_is_missing_or_dead", "threads_may_die"]

# Tests of `multilock.testing.conformance` that check for an overlap, a token, a callback, or leftovers. The list is
# here because the suites are public: another project's pytest may not know the marker.
CONFORMANCE = frozenset(
    {
        "test_a_blocked_loop_delays_the_callback_and_never_is_held",
        "test_a_callback_set_after_the_loss_is_called_at_once",
        "test_a_callback_that_raises_harms_nothing_else",
        "test_a_cancelled_run_ends_after_its_work_and_on_lost_and_gives_the_lease_back_then",
        "test_a_cancelled_wait_leaves_nothing_behind",
        "test_a_closed_client_leaves_no_thread",
        "test_a_grant_and_a_renewal_count_from_before_their_answers_came_late",
        "test_a_grant_is_a_proof_that_counts_from_the_sending",
        "test_a_hanging_on_lost_keeps_the_lease_for_one_ttl_at_most",
        "test_a_hanging_renewal_never_delays_the_callback",
        "test_a_leader_that_is_stopped_leaves_no_rest",
        "test_a_lease_ends_before_anybody_else_gets_in_when_the_backend_is_silent",
        "test_a_lease_that_was_lost_leaves_no_rest",
        "test_a_lost_leadership_is_reported_before_anybody_else_leads",
        "test_a_lost_lease_is_never_held_again",
        "test_a_lost_reply_leaves_no_reader_behind",
        "test_a_lost_reply_to_a_single_try_raises_and_leaves_nothing",
        "test_a_refused_attempt_that_does_not_join_leaves_nothing",
        "test_a_request_executed_after_its_cancel_takes_nothing",
        "test_a_running_on_elected_never_delays_on_lost_and_the_node_waits_for_both",
        "test_a_waiter_that_gave_up_leaves_nothing_behind",
        "test_an_acknowledgement_that_comes_too_late_revives_nothing",
        "test_an_on_elected_that_raises_gives_the_lease_back_after_the_work",
        "test_another_number_is_refused_at_once_and_leaves_nothing",
        "test_beliefs_never_overlap_while_holders_are_stopped_and_killed",
        "test_callbacks_of_a_campaign_come_in_a_pair",
        "test_holders_never_overlap_under_contention",
        "test_is_leader_is_false_as_soon_as_the_clock_says_so",
        "test_contention_never_exceeds_the_permits_nor_forgets_a_waiter",
        "test_nothing_is_left_behind",
        "test_on_lost_comes_before_the_lease_is_given_back",
        "test_processes_exclude_each_other",
        "test_readers_and_writers_never_overlap_under_contention",
        "test_renew_never_takes_a_name_back",
        "test_stop_never_leaves_a_leader_behind_also_when_the_grant_is_on_its_way",
        "test_terms_always_grow",
        "test_the_callback_comes_exactly_once_however_many_look",
        "test_the_callback_never_runs_on_the_renewing_thread",
        "test_the_next_leader_begins_after_the_last_line_of_one_that_was_told_to_end",
        "test_the_next_leaders_work_begins_after_the_last_line_of_the_old_ones",
        "test_there_is_never_a_callback_after_a_release",
        "test_tokens_always_grow",
        "test_tokens_grow_with_every_grant",
        "test_tokens_order_writers_and_readers",
        "test_a_lock_that_a_failed_wait_may_have_taken_is_released",
        "test_what_the_next_on_elected_does_begins_after_the_last_line_of_the_old_one",
        "test_a_waiter_of_a_closed_loop_blocks_nobody_and_leaves_nothing",
    }
)

WITHIN = 10.0  # seconds within which every refused thread must start


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
    """Check that no thread of multilock died of a defect, and that every refused thread has started since.

    The worker remembers both for the whole process, so the clients of all later tests would report them as findings.
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
