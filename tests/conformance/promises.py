"""Every promise of multilock, one sentence each, with the tests that show it.

The keys of the table are the public members, or ``kernel: …`` for the rules that hold for every backend. A test is
``Suite.test`` of the conformance suite, which runs on every backend, or ``path::test`` of this repository.
`tests/conformance/test_complete.py` checks that every test exists, that every conformance test is named, and that every
public member and every rule has a row.
"""

from __future__ import annotations

__all__ = ["PROMISES", "RULES"]

RULES = [
    "validity",
    "clock",
    "pull first",
    "states",
    "callback",
    "one watchdog",
    "identity",
    "unknown is not no",
    "a cancel must be final",
    "outages",
    "cancellation",
    "waiting",
    "local gate",
    "fork and exit",
    "token",
    "values",
    "names",
]

PROMISES: dict[str, dict[str, tuple[str, ...]]] = {
    "Client.lock": {
        "Making a lock does no I/O; options and names are checked there, before any": (
            "OptionConformance.test_making_a_lock_sends_no_request",
            "OptionConformance.test_a_bad_name_raises_value_error",
            "OptionConformance.test_a_name_that_is_not_text_raises_type_error",
            "OptionConformance.test_a_bad_ttl_raises",
            "OptionConformance.test_an_option_that_is_true_or_false_takes_nothing_else",
            "OptionConformance.test_a_callback_that_cannot_be_called_raises",
            "OptionConformance.test_an_unknown_option_raises",
        ),
        "One holder at a time, among threads, clients and processes": (
            "LockConformance.test_two_locks_of_one_client_exclude_each_other",
            "LockConformance.test_holders_never_overlap_under_contention",
            "ProcessConformance.test_processes_exclude_each_other",
            "ProcessConformance.test_holders_never_overlap_while_processes_are_stopped_and_killed",
        ),
        "A requested ttl is rounded up, never down; one beyond the limit raises an error with the limit": (
            "LeaseConformance.test_the_granted_ttl_is_at_least_the_requested_one",
            "OptionConformance.test_a_ttl_beyond_the_limit_raises_an_error_that_names_the_limit",
        ),
        "renew=True keeps the lease until it is released, even if no reference to it is left": (
            "LeaseConformance.test_a_lease_is_renewed_until_released",
            "LeaseConformance.test_a_lease_is_renewed_even_if_no_reference_to_it_is_left",
        ),
        "max_hold: at that time the lease is lost, and the name is free when its holder releases it": (
            "LossConformance.test_a_lease_held_beyond_max_hold_is_lost_and_its_release_frees_the_name",
            "tests/unit/test_max_hold.py::test_a_lease_is_renewed_until_its_max_hold_and_then_lost",
            "tests/unit/test_max_hold.py::test_after_max_hold_the_name_is_kept_while_its_holder_still_works",
            "tests/unit/test_max_hold.py::test_after_max_hold_the_name_is_free_once_its_holder_releases_it",
        ),
        "hold_at_least: a release before that time leaves the name taken until then, even if the process ends": (
            "RestConformance.test_an_early_release_leaves_the_name_taken_until_hold_at_least_is_over",
            "RestConformance.test_hold_at_least_may_be_longer_than_the_ttl",
            "RestConformance.test_a_release_after_hold_at_least_frees_the_name_at_once",
            "RestConformance.test_a_waiter_gets_the_lock_when_hold_at_least_is_over",
            "RestConformance.test_a_released_name_rests_even_if_its_client_ends",
            "RestConformance.test_closing_the_client_of_a_held_lock_lets_the_name_rest",
            "RestConformance.test_a_force_release_ends_a_rest_and_reports_no_loss",
            "RestConformance.test_a_release_whose_reply_is_lost_still_lets_the_name_rest",
            "RestConformance.test_a_release_that_arrives_late_counts_the_rest_from_its_arrival",
            "RestConformance.test_a_lost_lease_leaves_no_rest",
            "BackendConformance.test_a_resting_name_is_neither_revived_nor_extended",
            "BackendConformance.test_a_claim_that_is_no_longer_held_does_not_rest",
            "RestConformance.test_no_candidate_is_elected_while_the_name_of_the_last_leader_rests",
            "RestConformance.test_a_stopped_leader_leaves_no_rest",
            "RestConformance.test_a_wrong_hold_at_least_raises_before_any_request",
            "ProcessConformance.test_a_name_rests_after_an_early_release_even_if_the_process_ends",
        ),
        "renew=False lets the lease end at its ttl, even if the process lives": (
            "LeaseConformance.test_a_lease_that_is_not_renewed_ends_at_its_ttl",
            "LeaseConformance.test_a_lease_that_is_not_renewed_counts_from_its_grant_however_long_the_wait_was",
            "BackendConformance.test_a_claim_that_is_not_renewed_ends_by_itself",
        ),
        "fair=True is served in order of arrival, or raises CapabilityMissing": (
            "LockConformance.test_fair_waiters_get_the_lock_in_order_of_arrival",
            "BackendConformance.test_fair_waiters_are_served_in_order_of_arrival",
        ),
        "A client may send the attempts of many waiters together; each gets its own answer": (
            "BackendConformance.test_attempts_that_are_sent_together_are_answered_one_by_one",
        ),
        "reentrant=True returns the same lease in the same thread; the last release ends it": (
            "LockConformance.test_a_reentrant_lock_returns_the_same_lease_and_counts_the_acquires",
            "LockConformance.test_a_reentrant_lock_excludes_other_threads",
            "LockConformance.test_a_lock_that_is_not_reentrant_refuses_its_own_thread",
        ),
        "A loss inside with raises LockLost at a normal end; an exception of the body gets a note": (
            "WithConformance.test_after_a_loss_the_normal_end_of_a_with_block_raises_lock_lost",
            "WithConformance.test_after_a_loss_a_return_in_a_with_block_raises_lock_lost",
            "WithConformance.test_after_a_loss_an_exception_of_the_body_is_raised_with_a_note",
            "WithConformance.test_a_release_in_a_with_block_is_not_a_loss",
            "WithConformance.test_a_decorated_function_reports_a_loss_as_a_with_block_does",
        ),
        "A with ends the lease that it began, in any thread or task, and never the lease of another": (
            "WithConformance.test_a_with_block_that_ends_elsewhere_never_releases_the_lease_of_a_third",
            "tests/unit/test_locks.py::test_a_with_block_of_a_generator_ends_its_own_lease_in_any_thread",
            "tests/unit/test_aio.py::test_an_async_with_block_of_a_generator_ends_its_own_lease_in_any_task",
        ),
        "async with cancels its body at the moment of the loss, and raises LockLost": (
            "CancelConformance.test_an_async_with_block_is_cancelled_when_the_lease_is_lost",
            "CancelConformance.test_a_cancellation_from_outside_is_not_replaced_by_lock_lost",
        ),
        "Locks work in a process with many open descriptors": (
            "DescriptorConformance.test_locks_work_in_a_process_with_two_thousand_open_files",
        ),
        "Two locks of different ttl on one client each keep their own": (
            "LeaseConformance.test_two_locks_of_one_client_with_different_ttls_each_keep_their_own",
        ),
    },
    "DistributedLock.name": {"As given": ("OptionConformance.test_making_a_lock_sends_no_request",)},
    "DistributedLock.ttl": {
        "As given, or the client's default": ("OptionConformance.test_making_a_lock_sends_no_request",)
    },
    "DistributedLock.acquire": {
        "Raises LockTimeout if the lock is still taken when the whole wait is over": (
            "LockConformance.test_timeout_limits_the_whole_wait_and_raises_lock_timeout",
            "LockConformance.test_a_second_caller_is_refused_while_the_first_holds_the_lock",
        ),
        "None and inf wait without a limit": (
            "LockConformance.test_acquire_without_a_timeout_waits_until_the_lock_is_free",
        ),
        "A negative timeout or NaN raises ValueError, a bool TypeError": (
            "OptionConformance.test_a_bad_timeout_raises",
        ),
        "Raises BackendUnavailable after outage_timeout seconds of silence, never past timeout": (
            "OutageConformance.test_a_wait_raises_after_the_outage_timeout",
            "OutageConformance.test_at_the_timeout_a_silent_server_raises_backend_unavailable",
            "OutageConformance.test_a_waiter_behind_an_unanswered_request_never_raises_lock_timeout",
            "OutageConformance.test_all_waiters_of_one_client_notice_the_outage_in_time",
        ),
        "timeout=0 raises at the first request without a reply": (
            "OutageConformance.test_a_single_try_raises_at_the_first_request_without_a_reply",
        ),
        "LockTimeout always means that the backend replied": (
            "OutageConformance.test_the_reply_that_a_lock_is_taken_never_counts_as_silence",
        ),
        "The wait ends when the holder releases": ("LockConformance.test_a_waiter_gets_the_lock_after_the_release",),
        "Under asyncio it is a coroutine that may also be entered": (
            "CancelConformance.test_acquire_returns_a_coroutine_that_is_also_an_async_context_manager",
        ),
    },
    "DistributedLock.try_acquire": {
        "Returns a lease or None, at once or after timeout": (
            "LockConformance.test_try_acquire_waits_for_its_timeout_and_returns_none",
            "LockConformance.test_a_second_caller_is_refused_while_the_first_holds_the_lock",
        ),
        "A refused try leaves nothing behind": (
            "LockConformance.test_a_refused_try_joins_no_queue",
            "BackendConformance.test_a_refused_attempt_that_does_not_join_the_queue_leaves_nothing",
        ),
    },
    "DistributedLock.release": {
        "Releases the newest lease of this thread, then raises NotHeld": (
            "LockConformance.test_release_gives_back_the_newest_lease_of_this_thread",
        ),
        "Raises NotHeld after a release by hand": (
            "LockConformance.test_release_after_the_lease_was_released_by_hand_raises_not_held",
        ),
        "False after a loss": ("LossConformance.test_releasing_a_lost_lease_returns_false_once_then_raises_not_held",),
        "Never another thread's lease": ("LockConformance.test_release_never_ends_the_lease_of_another_thread",),
    },
    "DistributedLock.is_locked": {
        "Asks the backend whether the lock has a holder": (
            "LockConformance.test_is_locked_asks_the_backend_and_counts_every_holder",
        )
    },
    "DistributedLock.is_held": {
        "Local, in whatever thread": (
            "LockConformance.test_is_held_sends_no_request_and_counts_the_leases_of_all_threads",
        )
    },
    "DistributedLock.as_threading_lock": {
        "Can replace threading.Lock and RLock, also under a Condition": (
            "ThreadingConformance.test_a_lock_can_replace_a_threading_lock",
            "ThreadingConformance.test_a_reentrant_lock_can_replace_an_rlock",
            "ThreadingConformance.test_a_condition_works_over_a_lock",
        ),
        "lock() returns a DistributedLock, acquire() a Lease": (
            "ThreadingConformance.test_a_lock_implements_the_protocol_distributed_lock",
        ),
    },
    "Lease.name": {"As asked": ("LeaseConformance.test_a_lease_shows_its_name_ttl_state_and_owner",)},
    "Lease.ttl": {
        "What was granted": (
            "LeaseConformance.test_a_lease_shows_its_name_ttl_state_and_owner",
            "LeaseConformance.test_the_granted_ttl_is_at_least_the_requested_one",
        )
    },
    "Lease.owner": {"Fresh for each acquisition": ("LeaseConformance.test_each_acquisition_has_an_owner_of_its_own",)},
    "Lease.leases": {
        "A single lock contains only itself": ("LeaseConformance.test_a_lease_shows_its_name_ttl_state_and_owner",)
    },
    "Lease.token": {
        "Greater for each later holder; None if the backend has no tokens": (
            "LeaseConformance.test_each_later_token_is_greater",
            "BackendConformance.test_tokens_grow_with_every_grant",
        )
    },
    "Lease.is_held": {
        "Computed from the clock at every call": (
            "tests/unit/test_holding.py::test_is_held_turns_false_by_the_clock_alone",
        ),
        "False right after a pause that outlived the lease": (
            "ProcessConformance.test_a_frozen_holder_notices_the_loss_when_it_runs_again",
        ),
        "False in a forked child": (
            "ProcessConformance.test_a_forked_child_holds_no_lock_and_opens_its_own_connections",
        ),
        "Never true again after a release or a loss": (
            "LeaseConformance.test_a_released_lease_is_never_held_again",
            "LossConformance.test_a_lost_lease_is_never_held_again",
        ),
        "A blocked event loop delays the callback, never is_held()": (
            "CancelConformance.test_a_blocked_loop_delays_the_callback_but_is_held_stays_correct",
        ),
    },
    "Lease.remaining": {
        "Seconds left, or 0.0": (
            "LeaseConformance.test_remaining_decreases_between_two_renewals",
            "LeaseConformance.test_a_released_lease_is_never_held_again",
        )
    },
    "Lease.check": {
        "Raises LockLost after a loss, NotHeld after a release, else nothing": (
            "LeaseConformance.test_check_and_fence_do_not_raise_while_the_lease_is_held",
            "LeaseConformance.test_a_released_lease_is_never_held_again",
            "LossConformance.test_a_lost_lease_is_never_held_again",
        )
    },
    "Lease.fence": {
        "Returns the token, or raises LockLost, NotHeld, CapabilityMissing": (
            "LeaseConformance.test_check_and_fence_do_not_raise_while_the_lease_is_held",
            "LeaseConformance.test_each_later_token_is_greater",
            "LossConformance.test_a_lost_lease_is_never_held_again",
        )
    },
    "Lease.guard": {
        "Nobody else gets the lock until the user's transaction ends; a guard that comes too late fails": (
            "tests/backends/postgresql/test_guard.py::test_nobody_gets_the_name_until_the_guarded_transaction_ends",
            "tests/backends/postgresql/test_guard.py::test_a_guard_after_the_lease_was_lost_in_any_way_fails",
            "tests/backends/postgresql/test_guard.py::test_another_backend_has_no_guard",
        )
    },
    "Lease.state": {
        "HELD, AT_RISK, LOST or RELEASED": (
            "LeaseConformance.test_a_lease_shows_its_name_ttl_state_and_owner",
            "LossConformance.test_a_short_silence_puts_a_lease_at_risk_but_does_not_lose_it",
            "LossConformance.test_a_lost_lease_is_never_held_again",
            "LeaseConformance.test_a_released_lease_is_never_held_again",
        )
    },
    "Lease.on_lost": {
        "Exactly once": ("LossConformance.test_the_callback_is_called_once_however_many_threads_notice_the_loss",),
        "The callback is called at once if the lease is already lost": (
            "LossConformance.test_a_callback_set_after_the_loss_is_called_at_once",
        ),
        "Never after a release": ("LossConformance.test_there_is_never_a_callback_after_a_release",),
        "The callback starts before the backend could admit another holder": (
            "LossConformance.test_during_a_silence_the_lease_ends_before_another_client_gets_the_lock",
            "LossConformance.test_a_hanging_renewal_never_delays_the_callback",
        ),
        "Within one round trip of the backend's own notice": (
            "LossConformance.test_a_deleted_key_is_a_confirmed_loss",
            "BackendConformance.test_a_lost_claim_is_reported_if_the_backend_pushes_losses",
        ),
        "Never on the renewing thread; under asyncio on the loop, def or async def": (
            "LossConformance.test_the_callback_never_runs_on_the_renewing_thread",
            "CancelConformance.test_an_async_callback_is_awaited",
        ),
        "A callback that raises or hangs affects nothing else": (
            "LossConformance.test_a_callback_that_raises_affects_nothing_else",
            "LossConformance.test_a_callback_that_hangs_delays_no_renewal",
        ),
    },
    "Lease.wait_lost": {
        "Returns the loss, or None at the timeout or a release": (
            "LossConformance.test_wait_lost_returns_the_loss_to_every_waiting_thread",
            "LeaseConformance.test_wait_lost_returns_none_at_its_timeout_and_at_a_release",
        )
    },
    "Lease.renew": {
        "One renewal now": ("LeaseConformance.test_renew_moves_the_deadline",),
        "Raises LockLost if the lock is gone": ("LossConformance.test_renew_raises_lock_lost_when_the_lock_is_gone",),
        "Raises BackendUnavailable without a reply, and the lease continues": (
            "LossConformance.test_renew_raises_backend_unavailable_without_a_reply",
        ),
        "Raises NotHeld after a release": ("LeaseConformance.test_a_released_lease_is_never_held_again",),
    },
    "Lease.release": {
        "Returns True if the lock was held until the call, False if it was lost or released before": (
            "LeaseConformance.test_a_released_lease_is_never_held_again",
            "LossConformance.test_a_release_that_finds_the_key_gone_reports_a_loss",
        ),
        "Works from any thread": ("LockConformance.test_a_lease_can_be_released_from_any_thread",),
        "Never frees the lock of another holder": (
            "LockConformance.test_a_release_by_another_client_never_frees_the_lock",
            "BackendConformance.test_release_affects_no_other_claim",
        ),
        "Never raises; without a reply it continues in the background": (
            "LossConformance.test_a_release_without_a_reply_returns_and_continues_in_the_background",
            "LossConformance.test_a_release_whose_reply_is_lost_frees_the_lock",
        ),
        "Happens at the end of with, whatever its body does": (
            "LockConformance.test_a_lock_and_its_lease_are_both_context_managers",
            "LockConformance.test_the_lock_is_released_if_the_with_block_raises",
        ),
        "After the last release nothing is left at the server": (
            "LockConformance.test_nothing_is_left_at_the_server_after_the_last_release",
        ),
    },
    "LossReason.EXPIRED": {
        "No acknowledged renewal in time; not confirmed": (
            "LossConformance.test_during_a_silence_the_lease_ends_before_another_client_gets_the_lock",
        )
    },
    "LossReason.TAKEN": {
        "A deleted key, another holder, or a force release": (
            "LossConformance.test_a_deleted_key_is_a_confirmed_loss",
            "LossConformance.test_a_force_release_is_reported_as_a_lock_that_was_taken",
        )
    },
    "LossReason.SESSION_LOST": {
        "The session of the lock ended": (
            "tests/unit/test_watchdog.py::test_the_end_of_a_session_loses_each_of_its_locks_once",
        )
    },
    "LossReason.PAUSED": {
        "This process did not run; the callback is called once, whichever thread notices first": (
            "ProcessConformance.test_a_frozen_holder_notices_the_loss_when_it_runs_again",
            "tests/unit/test_holding.py::test_the_first_look_after_a_pause_notices_it_and_calls_back_once",
        )
    },
    "LossReason.WATCHDOG_DIED": {
        "The renewing thread ended": (
            "tests/unit/test_watchdog.py::test_a_watchdog_that_dies_is_a_loss_for_every_lease",
        )
    },
    "LossReason.CLOSED": {
        "The client was closed while it was held": (
            "CloseConformance.test_close_reports_each_held_lease_as_lost_before_it_releases_it",
        )
    },
    "LossReason.HELD_TOO_LONG": {
        "The lease was held for as long as max_hold allows": (
            "LossConformance.test_a_lease_held_beyond_max_hold_is_lost_and_its_release_frees_the_name",
        )
    },
    "LossReason.RESIGNED": {
        "Elections only: this node stepped down": (
            "ElectionConformance.test_each_on_elected_of_a_campaign_is_followed_by_one_on_lost",
        )
    },
    "Client.read_write_lock": {
        "Readers hold a name together, a writer holds it alone, and every other lock of that name excludes both": (
            "ReadWriteConformance.test_many_readers_hold_together_and_a_writer_holds_alone",
            "ReadWriteConformance.test_a_plain_lock_of_the_same_name_excludes_readers_and_writers",
            "ReadWriteConformance.test_readers_and_writers_never_overlap_under_contention",
            "ReadWriteConformance.test_a_decorated_function_runs_as_a_reader",
            "ReadWriteConformance.test_no_candidate_is_elected_while_readers_hold_the_name",
        ),
        "Neither readers nor writers starve, and a waiter that gives up blocks no other": (
            "ReadWriteConformance.test_a_waiting_writer_is_not_starved_by_a_stream_of_readers",
            "ReadWriteConformance.test_readers_behind_a_writer_that_gives_up_enter_at_once",
            "ReadWriteConformance.test_readers_behind_a_writer_that_gives_up_are_admitted_by_push",
            "ReadWriteConformance.test_waiting_readers_enter_together",
        ),
        "Each reader has a lease of its own": (
            "ReadWriteConformance.test_each_reader_is_renewed_separately",
            "ReadWriteConformance.test_a_reader_lock_is_held_while_any_of_its_leases_is",
            "ReadWriteConformance.test_force_release_takes_the_name_from_every_reader",
            "ReadWriteConformance.test_inspect_counts_the_readers",
            "ReadWriteConformance.test_a_lost_reply_leaves_no_reader_behind",
            "ReadWriteConformance.test_readers_and_writers_leave_nothing_at_the_server",
        ),
        "A token is greater than those of all earlier writers; a writer's token is greater than all earlier tokens": (
            "ReadWriteConformance.test_writers_have_greater_tokens_than_the_readers_before_them",
        ),
        "A reader cannot become a writer, nor a writer a reader: refused before any I/O": (
            "ReadWriteConformance.test_no_holder_can_change_between_reader_and_writer",
            "ReadWriteConformance.test_a_read_lease_of_another_client_raises_no_upgrade_error_here",
            "tests/unit/test_shared.py::test_an_upgrade_is_refused_before_any_request",
        ),
        "Reentrant: the same kind in the same thread or task": (
            "ReadWriteConformance.test_a_reentrant_reader_can_acquire_again_behind_a_waiting_writer",
            "ReadWriteConformance.test_a_reentrant_reader_cannot_be_acquired_as_a_reentrant_plain_lock",
        ),
    },
    "ReadWriteLock.name": {
        "As given": ("ReadWriteConformance.test_read_write_lock_always_returns_the_same_two_locks",)
    },
    "ReadWriteLock.reader": {
        "Always the same object": ("ReadWriteConformance.test_read_write_lock_always_returns_the_same_two_locks",),
    },
    "ReadWriteLock.writer": {
        "Always the same object": ("ReadWriteConformance.test_read_write_lock_always_returns_the_same_two_locks",),
    },
    "Client.semaphore": {
        "Up to permits hold it, never more, and every other lock of that name excludes them": (
            "SemaphoreConformance.test_a_semaphore_has_as_many_holders_as_permits",
            "SemaphoreConformance.test_a_plain_lock_and_readers_of_that_name_exclude_permits",
            "SemaphoreConformance.test_a_semaphore_with_one_permit_excludes",
            "SemaphoreConformance.test_under_contention_permits_are_never_exceeded_and_no_waiter_starves",
            "SemaphoreConformance.test_a_decorated_function_runs_with_a_permit",
        ),
        "A released permit, or that of a dead holder, goes to the next waiter and affects no other": (
            "SemaphoreConformance.test_a_released_permit_goes_to_a_waiter",
            "SemaphoreConformance.test_a_silent_clients_permit_expires_while_another_permit_is_kept",
            "SemaphoreConformance.test_inspect_shows_how_many_permits_are_taken",
        ),
        "The number is checked before any I/O, and another one is refused at once": (
            "SemaphoreConformance.test_the_number_of_permits_is_checked_before_any_request",
            "SemaphoreConformance.test_a_different_number_of_permits_is_refused_at_once_and_leaves_nothing",
            "SemaphoreConformance.test_a_semaphore_is_acquired_again_only_with_the_same_number_of_permits",
        ),
        "A permit of several has a token, and cannot fence": (
            "SemaphoreConformance.test_each_permit_has_a_token_and_fence_raises",
        ),
    },
    "Client.lock_all": {
        "All or none, within one timeout, in any order of the names": (
            "LockAllConformance.test_all_locks_of_a_set_are_acquired_and_released_together",
            "LockAllConformance.test_a_set_holds_nothing_while_one_of_its_locks_is_taken",
            "LockAllConformance.test_one_timeout_limits_the_wait_for_all_locks_of_a_set",
            "LockAllConformance.test_callers_that_name_the_locks_in_opposite_orders_never_deadlock",
            "LockAllConformance.test_a_wrong_argument_raises_before_any_request",
            "LockAllConformance.test_releasing_through_the_lock_ends_the_newest_lease_of_this_thread",
        ),
        "Each part is an ordinary lease, with its token and its renewal": (
            "LockAllConformance.test_each_lock_of_a_set_has_a_token_and_the_set_has_none",
            "LockAllConformance.test_each_lock_of_a_set_is_renewed",
            "LockAllConformance.test_a_reentrant_set_can_be_acquired_again",
        ),
        "Lost once when one of its locks is lost; the others are kept until the callback has ended": (
            "LockAllConformance.test_a_set_is_lost_with_one_of_its_locks_and_names_it",
            "LockAllConformance.test_the_other_locks_are_kept_until_the_lost_set_is_released",
            "LockAllConformance.test_the_other_locks_of_a_lost_set_that_nobody_releases_are_kept_for_one_ttl",
            "LockAllConformance.test_the_end_of_a_with_block_raises_the_loss_of_a_set",
            "LockAllConformance.test_a_closed_client_releases_all_locks_of_a_set",
        ),
        "If one lock is lost during the wait, all are released and the wait begins again": (
            "LockAllConformance.test_a_lock_of_a_set_that_is_lost_during_the_wait_is_acquired_again",
        ),
        "An interrupt anywhere leaves nothing behind": (
            "tests/unit/test_lock_all.py::test_an_interrupt_anywhere_in_the_acquire_leaves_nothing",
            "tests/unit/test_lock_all.py::test_an_interrupt_anywhere_in_a_with_block_leaves_nothing",
        ),
    },
    "Client.locked": {
        "The function runs while the lock is held; its parameters may be in the name": (
            "LockConformance.test_a_decorated_function_runs_while_the_lock_is_held",
        ),
        "skip=True returns None instead of raising LockTimeout if the lock is taken": (
            "LockConformance.test_a_decorated_function_is_skipped_or_times_out_if_the_lock_is_taken",
        ),
        "The other kind of function raises TypeError": (
            "LockConformance.test_the_decorator_refuses_coroutine_functions_on_a_blocking_lock_and_the_reverse",
        ),
    },
    "Client.current_lease": {
        "The innermost lease of this thread, otherwise NotHeld; always NotHeld in a forked child": (
            "LockConformance.test_current_lease_is_the_innermost_of_this_thread",
            "ProcessConformance.test_a_forked_child_holds_no_lock_and_opens_its_own_connections",
        )
    },
    "Client.inspect": {
        "Who holds a name": (
            "ClientConformance.test_inspect_shows_the_holder_of_a_name",
            "ElectionConformance.test_an_election_is_a_contest_for_the_lock_of_that_name",
        )
    },
    "Client.inspect_all": {
        "The names held, without the prefix": (
            "ClientConformance.test_inspect_all_returns_the_held_names_without_the_prefix",
        )
    },
    "Client.force_release": {
        "Takes the name from its holder, which gets TAKEN": (
            "ClientConformance.test_force_release_frees_a_name_and_says_whether_it_was_held",
            "ClientConformance.test_force_release_lets_a_waiter_in",
            "LossConformance.test_a_force_release_is_reported_as_a_lock_that_was_taken",
            "BackendConformance.test_force_release_takes_the_name_from_each_holder",
        )
    },
    "Client.capabilities": {
        "Frozen facts, without I/O": ("ClientConformance.test_capabilities_are_immutable_and_known_without_a_request",),
        "The next holder enters within takeover_bound": (
            "LossConformance.test_the_next_client_gets_the_lock_within_the_published_bound",
            "ProcessConformance.test_the_lock_of_a_killed_holder_is_free_within_the_published_bound",
        ),
    },
    "Client.diagnose": {"Findings with remedies": ("ClientConformance.test_diagnose_returns_findings_with_remedies",)},
    "Client.ping": {"Seconds of one round trip": ("ClientConformance.test_ping_returns_the_time_of_one_round_trip",)},
    "Client.is_healthy": {
        "The watchdog runs on time; no I/O": (
            "ClientConformance.test_a_client_with_an_idle_watchdog_is_healthy",
            "OutageConformance.test_is_healthy_sends_no_request",
        )
    },
    "Client.events": {
        "What happens to locks, in order; one that raises is logged": (
            "ClientConformance.test_events_report_the_life_of_a_lock_in_order",
            "ClientConformance.test_a_subscriber_that_raises_affects_nothing_else",
        )
    },
    "Client.close": {
        "A held lease is LOST first, its callback called, and then it is released": (
            "CloseConformance.test_close_reports_each_held_lease_as_lost_before_it_releases_it",
        ),
        "Waiters and later calls raise ClientClosed": (
            "CloseConformance.test_close_makes_each_waiter_raise_client_closed_and_leaves_nothing",
            "CloseConformance.test_a_lock_granted_while_the_client_closes_is_released",
            "CloseConformance.test_a_call_after_close_raises_client_closed",
            "CloseConformance.test_a_client_is_a_context_manager",
        ),
        "Ends observe(), stops threads": (
            "CloseConformance.test_close_ends_observe",
            "CloseConformance.test_a_closed_client_leaves_no_thread_behind",
        ),
        "Always ends: one request_timeout for callbacks and one for replies": (
            "CloseConformance.test_close_ends_despite_a_callback_that_hangs_and_a_backend_without_replies",
        ),
        "Twice is harmless": (
            "CloseConformance.test_closing_twice_is_harmless",
            "BackendConformance.test_closing_twice_is_harmless_and_the_capabilities_stay",
        ),
        "Stops elections as stop() does": ("ElectionConformance.test_closing_the_client_resigns_its_leaderships",),
    },
    "Client.election": {
        "A contest for the lock of that name": (
            "ElectionConformance.test_an_election_is_a_contest_for_the_lock_of_that_name",
            "ElectionConformance.test_a_leader_excludes_readers_and_permits_of_that_name",
        ),
        "Callbacks come in pairs and in order; any gap in leadership shows as a pair": (
            "ElectionConformance.test_each_on_elected_of_a_campaign_is_followed_by_one_on_lost",
            "ElectionConformance.test_after_a_loss_a_started_node_campaigns_again_and_its_callbacks_stay_paired",
        ),
        "on_lost comes before another node leads": (
            "ElectionConformance.test_a_lost_leadership_is_reported_before_another_candidate_leads",
        ),
        "A running on_elected never delays on_lost; the node campaigns again when both have ended": (
            "ElectionConformance.test_a_running_on_elected_never_delays_on_lost_and_the_node_waits_for_both",
        ),
        "An on_elected that raises ends the leadership": (
            "ElectionConformance.test_an_on_elected_that_raises_ends_the_leadership",
        ),
        "An orderly end: released when work, on_elected and on_lost have ended, or after the grace": (
            "ElectionConformance.test_new_work_begins_after_the_work_of_the_former_leader_has_ended",
            "ElectionConformance.test_a_new_on_elected_begins_after_that_of_the_former_leader_has_ended",
            "ElectionConformance.test_if_on_elected_raises_the_lease_is_released_after_the_work_has_ended",
            "ElectionConformance.test_work_that_does_not_end_keeps_the_lease_for_the_grace_and_is_named",
            "ElectionConformance.test_work_that_stops_its_own_election_is_not_waited_for_and_keeps_the_lease",
            "ProcessConformance.test_the_next_leader_begins_after_the_former_leader_has_ended_its_work",
        ),
        "on_leader_changed tells who leads": ("ElectionConformance.test_on_leader_changed_receives_the_new_leader",),
    },
    "Election.name": {"As given": ("ElectionConformance.test_campaign_elects_one_leader",)},
    "Election.identity": {"As given": ("ElectionConformance.test_campaign_elects_one_leader",)},
    "Election.campaign": {
        "One node leads; the others raise LockTimeout": ("ElectionConformance.test_campaign_elects_one_leader",),
    },
    "Election.run": {
        "Returns the result or raises the exception of work that ends by itself, and resigns": (
            "ElectionConformance.test_run_returns_the_result_of_work_that_ends_by_itself",
            "ElectionConformance.test_run_raises_the_exception_of_its_work",
        ),
        "Campaigns again after a loss; asynchronous work is cancelled": (
            "ElectionConformance.test_run_campaigns_again_after_a_loss",
            "ElectionConformance.test_asynchronous_work_is_cancelled_on_loss",
        ),
        "When cancelled, it ends after its work and on_lost": (
            "ElectionConformance.test_a_cancelled_run_releases_the_lease_after_its_work_and_on_lost",
        ),
    },
    "Election.start": {
        "Leads in the background": (
            "ElectionConformance.test_start_campaigns_in_the_background_and_stop_resigns",
            "ElectionConformance.test_an_election_is_a_context_manager",
        ),
        "Never gives up during an outage": ("ElectionConformance.test_elections_never_give_up_during_an_outage",),
    },
    "Election.stop": {
        "on_lost (RESIGNED) BEFORE the lease is released, which is kept for the grace at most": (
            "ElectionConformance.test_start_campaigns_in_the_background_and_stop_resigns",
            "ElectionConformance.test_on_lost_is_called_before_the_lease_is_released",
            "ElectionConformance.test_an_on_lost_that_hangs_delays_the_release_by_one_ttl_at_most",
        ),
        "Never leaves a leader behind": (
            "ElectionConformance.test_stop_leaves_no_leader_behind_even_if_it_meets_the_grant",
        ),
        "run() gives None": (
            "ElectionConformance.test_stop_makes_run_return_none",
            "ElectionConformance.test_stop_ends_run_even_if_the_node_never_led",
        ),
    },
    "Election.is_leader": {
        "Computed from the clock, never a cached value": (
            "ElectionConformance.test_is_leader_is_false_as_soon_as_the_deadline_has_passed",
        )
    },
    "Election.leader": {
        "The leader, as every client sees it": ("ElectionConformance.test_every_client_sees_the_leader",)
    },
    "Election.observe": {
        "Starts with the present leader, then yields each change, also those of this client": (
            "ElectionConformance.test_observe_yields_the_present_leader_and_then_each_change",
            "ElectionConformance.test_observe_yields_the_leadership_of_its_own_client",
            "BackendConformance.test_a_followed_name_is_reported_when_its_holder_changes",
        ),
        "An outage yields nothing": ("ElectionConformance.test_observe_yields_nothing_during_an_outage",),
    },
    "Election.resign": {
        "Another candidate is elected without waiting for a ttl": (
            "ElectionConformance.test_after_a_resignation_the_next_candidate_leads_without_waiting_for_a_ttl",
        ),
        "It campaigns again behind those waiting": (
            "ElectionConformance.test_a_node_that_resigned_queues_behind_the_other_candidates",
        ),
    },
    "Leadership.term": {"The token: always greater": ("ElectionConformance.test_each_later_term_is_greater",)},
    "Leadership.identity": {"The candidate's": ("ElectionConformance.test_campaign_elects_one_leader",)},
    "Leadership.release": {
        "Does the same as resign(); callbacks set on the Leadership itself are not called": (
            "ElectionConformance.test_releasing_a_leadership_resigns_it",
        )
    },
    "kernel: validity": {
        "Counts from before the sending of the acknowledged request": (
            "BackendConformance.test_the_validity_of_a_grant_counts_from_the_sending_of_its_request",
            "BackendConformance.test_the_validity_counts_from_the_sending_even_if_replies_are_late",
            "tests/unit/test_holding.py::test_validity_counts_from_the_sending_of_the_request_and_not_from_its_reply",
        ),
        "An acknowledgement after lost_at does not revive the lease": (
            "LossConformance.test_an_acknowledgement_that_arrives_too_late_does_not_revive_the_lease",
        ),
    },
    "kernel: clock": {
        "Counts the time in which the process or the machine does not run": (
            "ProcessConformance.test_a_frozen_holder_notices_the_loss_when_it_runs_again",
            "tests/unit/test_validity.py::test_the_module_for_validity_reads_no_clock",
        )
    },
    "kernel: pull first": {
        "Compared with the clock at every call": (
            "tests/unit/test_holding.py::test_is_held_turns_false_by_the_clock_alone",
        )
    },
    "kernel: states": {
        "An acknowledgement in time turns AT_RISK into HELD; LOST is final": (
            "LossConformance.test_a_short_silence_puts_a_lease_at_risk_but_does_not_lose_it",
            "LossConformance.test_a_lost_lease_is_never_held_again",
        )
    },
    "kernel: callback": {
        "Lost at lost_at at the latest; a renewal that hangs never delays it": (
            "LossConformance.test_a_hanging_renewal_never_delays_the_callback",
        )
    },
    "kernel: one watchdog": {
        "One renewing thread, also under asyncio: a blocked loop never loses a lock": (
            "CancelConformance.test_a_blocked_event_loop_loses_no_lock",
            "tests/unit/test_watchdog.py::test_ten_thousand_leases_need_few_threads",
        ),
        "A dead server never starves another group": (
            "tests/unit/test_watchdog.py::test_a_server_that_hangs_starves_no_other_group",
        ),
    },
    "kernel: identity": {
        "One id for all sends of one attempt; renew, release and cancel compare it": (
            "BackendConformance.test_a_repeated_attempt_with_the_same_id_is_the_same_attempt",
            "BackendConformance.test_a_repeated_release_reports_that_the_claim_was_not_held",
            "BackendConformance.test_renew_returns_one_result_for_each_claim_in_order",
            "BackendConformance.test_renew_never_acquires_a_lost_name",
        )
    },
    "kernel: unknown is not no": {
        "A request with a lost reply is repeated, or its effect is undone": (
            "LossConformance.test_an_acquire_whose_reply_is_lost_is_repeated",
            "LossConformance.test_a_lost_reply_to_a_single_try_raises_and_leaves_nothing",
            "LossConformance.test_a_renewal_whose_reply_is_lost_costs_nothing",
            "LossConformance.test_a_release_whose_reply_is_lost_frees_the_lock",
        )
    },
    "kernel: a cancel must be final": {
        "A request that is executed after its cancel acquires nothing": (
            "LossConformance.test_a_request_executed_after_its_cancel_acquires_nothing",
            "BackendConformance.test_a_cancel_also_stops_a_request_that_arrives_later",
        )
    },
    "kernel: outages": {
        "A wait continues through a shorter outage; a service starts while its backend is down": (
            "OutageConformance.test_a_wait_continues_through_an_outage_shorter_than_the_outage_timeout",
            "OutageConformance.test_a_client_starts_while_its_backend_is_down",
        ),
        "Each call that asks the backend raises BackendUnavailable": (
            "OutageConformance.test_each_call_that_asks_the_backend_raises_backend_unavailable_in_an_outage",
        ),
    },
    "kernel: cancellation": {
        "Each end of a wait leaves nothing behind": (
            "LockConformance.test_a_waiter_that_gave_up_leaves_nothing_behind",
            "LockConformance.test_a_claim_whose_cancel_is_pending_never_blocks_a_later_try_of_its_client",
            "CancelConformance.test_a_cancelled_wait_leaves_nothing_behind",
            "CancelConformance.test_a_waiter_of_a_closed_loop_blocks_no_other_waiter_and_leaves_nothing",
            "CloseConformance.test_close_makes_each_waiter_raise_client_closed_and_leaves_nothing",
            "OutageConformance.test_a_lock_that_a_failed_wait_may_have_acquired_is_released",
            "BackendConformance.test_a_cancelled_waiter_never_gets_the_lock",
        )
    },
    "kernel: waiting": {
        "Only a reply or a pushed grant makes a holder; any other push is a hint": (
            "BackendConformance.test_only_a_reply_or_a_push_with_the_same_id_makes_a_waiter_the_holder",
            "BackendConformance.test_a_taken_name_returns_busy",
        ),
        "A released lock is never reported lost": ("BackendConformance.test_a_released_claim_is_never_reported_lost",),
    },
    "kernel: local gate": {
        "Of the unfair waiters of one client one at a time sends requests, and all get their turn": (
            "LockConformance.test_one_unfair_waiter_of_each_client_queues_at_the_backend",
            "LockConformance.test_every_unfair_waiter_of_one_client_gets_its_turn",
        )
    },
    "kernel: fork and exit": {
        "A child holds nothing and opens its own connections": (
            "ProcessConformance.test_a_forked_child_holds_no_lock_and_opens_its_own_connections",
            "BackendConformance.test_a_backend_can_be_opened_again",
        ),
        "At interpreter exit held locks are released without callbacks": (
            "ProcessConformance.test_a_process_that_ends_releases_its_locks",
            "ProcessConformance.test_an_exiting_process_never_passes_its_locks_to_its_own_waiters",
        ),
        "No thread keeps the process alive, no signal handler is installed": (
            "ProcessConformance.test_no_thread_of_multilock_keeps_a_process_alive",
            "ProcessConformance.test_no_signal_handler_is_installed",
        ),
    },
    "kernel: token": {
        "Greater for every later acquisition, in real-time order": (
            "LeaseConformance.test_each_later_token_is_greater",
            "BackendConformance.test_tokens_grow_with_every_grant",
        )
    },
    "kernel: values": {
        "The stored value names the holder; values of other programs are shown unchanged": (
            "ClientConformance.test_inspect_shows_the_holder_of_a_name",
            "tests/unit/test_values.py::test_a_value_of_another_program_is_shown_unchanged",
        )
    },
    "kernel: names": {
        "Distinct names never collide": ("LockConformance.test_different_names_do_not_exclude_each_other",),
    },
}
