"""The pure functions that compute the validity of one lease."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilock import LossReason
from multilock.kernel import validity

ttls = st.floats(0.1, 1e6)
times = st.floats(0, 1e9)


def test_validity_counts_from_the_sending_and_leaves_room_for_drift() -> None:
    assert validity.valid_until(100.0, 30.0, 30.0) == pytest.approx(100 + 30 - 0.3 - 0.002)


def test_a_backend_may_shorten_the_validity_to_a_share_of_the_ttl() -> None:
    assert validity.valid_until(100.0, 20.0, 30.0) == pytest.approx(100 + 20 - 0.3 - 0.002)


def test_the_last_tenth_of_the_validity_belongs_to_the_callback() -> None:
    assert validity.lost_at(129.0, 30.0) == pytest.approx(126.0)


@given(times, ttls)
def test_the_lease_is_lost_before_the_server_can_have_forgotten_it(sent_at: float, ttl: float) -> None:
    until = validity.valid_until(sent_at, ttl, ttl)
    assert validity.lost_at(until, ttl) < until < sent_at + ttl


@given(times, ttls, st.floats(0.9, 1.1), st.floats(0, 1))
def test_a_renewal_is_planned_near_its_period_and_well_before_the_end(
    sent_at: float, ttl: float, jitter: float, phase: float
) -> None:
    at = validity.renew_at(sent_at, ttl / 3, ttl, jitter, phase)
    rounding = 1e-6 * max(1.0, sent_at)
    assert sent_at <= at <= sent_at + ttl / 3 * 1.1 + rounding
    assert at >= sent_at + ttl / 3 * 0.9 - ttl / 30 - rounding
    assert at < validity.late_at(sent_at, ttl / 3)


def test_renewals_of_one_client_are_aligned_so_that_thousands_are_due_together() -> None:
    planned = {round(validity.renew_at(1000 + i / 1000, 10.0, 30.0, 1.0, 0.25), 9) for i in range(1000)}
    assert len(planned) <= 2


def test_a_lease_without_a_new_proof_for_two_periods_is_late() -> None:
    assert validity.late_at(100.0, 10.0) == 120.0


def test_tries_to_renew_slow_down_but_stay_frequent() -> None:
    pauses = [validity.retry_in(failures, 3.0, 1.0) for failures in range(1, 9)]
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(0.2)
    assert pauses[-1] == 1.0
    assert validity.retry_in(8, 0.3, 1.0) == pytest.approx(0.16)


@pytest.mark.parametrize(
    ("left", "expected"), [(5.0, 0), (1.0, 0), (0.99, 1), (0.51, 1), (0.5, 2), (0.25, 3), (0.0, 10), (-3.0, 10)]
)
def test_retries_become_more_frequent_with_each_halving_of_the_remaining_time(left: float, expected: int) -> None:
    assert validity.urgency(left, 1.0) == expected


def test_a_request_may_take_a_fifth_of_the_ttl_and_at_most_five_seconds() -> None:
    assert validity.request_timeout(None, 10.0) == 2.0
    assert validity.request_timeout(None, 300.0) == 5.0
    assert validity.request_timeout(0.7, 300.0) == 0.7


def test_a_grant_is_renewed_first_when_half_of_its_time_is_gone() -> None:
    assert not validity.half_over(114.9, 100.0, 30.0)
    assert validity.half_over(115.1, 100.0, 30.0)


def test_a_deadline_noticed_late_means_that_the_process_did_not_run() -> None:
    assert validity.loss_reason(100.0, 100.0, 30.0) is LossReason.EXPIRED
    assert validity.loss_reason(103.0, 100.0, 30.0) is LossReason.EXPIRED
    assert validity.loss_reason(103.01, 100.0, 30.0) is LossReason.PAUSED


def test_the_module_for_validity_reads_no_clock() -> None:
    assert not {"time", "now", "runtime"} & set(vars(validity)), "`now` is an argument"
    assert math.isclose(validity.arm_at(5.0), 5.25)
