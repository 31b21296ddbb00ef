"""Checks for each server that a compose file starts."""

from __future__ import annotations

import uuid

import multilock
from multilock import LeaseState, Loss, LossReason
from multilock.testing import conformance
from multilock.testing.conformance.base import Recorder

__all__ = ["WELL_WITHIN", "Holder", "Service", "Smoke", "each_grants", "each_of"]

WELL_WITHIN = 60.0  # seconds until a server must work again after a fault
CALLBACK_SLACK = 0.05  # seconds after the end of the lease by which the callback has started
TOGETHER = ("redlock", "redis+sentinel", "redis+cluster")  # one server of these services does not work alone


def each_of(url: str) -> list[str]:
    """Return the URL of each server of a cluster, or the whole URL if its servers do not work alone."""
    scheme, _, hosts = url.partition("://")
    if scheme in TOGETHER:
        return [url]
    return [f"{scheme}://{host}" for host in hosts.split(",")]


def each_grants(url: str, name: str = "any") -> list[int]:
    """Wait until each server is healthy, take the lock ``name`` through one server after the other, and return the
    tokens."""
    tokens = []
    for server in each_of(url):
        with (
            multilock.connect(server, outage_timeout=None) as client,
            client.lock(name).acquire(timeout=WELL_WITHIN) as lease,
        ):
            tokens.append(lease.fence())
    return tokens


class Service(conformance.Place):
    """A service that the conformance suite tests. Faults are caused in the container of the service."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    @property
    def url(self) -> str:
        return self._url


class Smoke(conformance.Conformance):
    """A selection of the conformance suite, blocking and asyncio: exclusion, waiting, tokens, renewal, loss,
    election."""

    test_second_caller = conformance.LockConformance.test_a_second_caller_is_refused_while_the_first_holds_the_lock
    test_waiter = conformance.LockConformance.test_a_waiter_gets_the_lock_after_the_release
    test_no_overlap = conformance.LockConformance.test_holders_never_overlap_under_contention
    test_tokens = conformance.LeaseConformance.test_each_later_token_is_greater
    test_renew = conformance.LeaseConformance.test_renew_moves_the_deadline
    test_force_release = conformance.LossConformance.test_a_force_release_is_reported_as_a_lock_that_was_taken
    test_campaign = conformance.ElectionConformance.test_campaign_elects_one_leader
    test_terms = conformance.ElectionConformance.test_each_later_term_is_greater


class Holder:
    """A holder of a lock that no other client uses, to observe whether the lock is lost."""

    def __init__(self, url: str, ttl: float) -> None:
        self._lost = Recorder[Loss]()
        self.name = f"held-{uuid.uuid4().hex[:12]}"
        self._client = multilock.connect(url, ttl=ttl)
        self.lease = self._client.lock(self.name, on_lost=self._lost).acquire(timeout=30)

    def hears_in_time(self) -> None:
        """Assert that the holder is notified of its loss once, before another client could get the lock. The server
        must be silent."""
        loss = self._lost.wait(within=3 * self.lease.ttl)
        assert not self.lease.is_held()
        assert self._lost.times[0] <= loss.valid_until + CALLBACK_SLACK
        assert (loss.reason, loss.confirmed) == (LossReason.EXPIRED, False)
        assert self._lost.stays_at(1)

    def keeps_it(self) -> None:
        """Assert that the holder keeps its lock for longer than a ttl."""
        assert self._lost.stays_at(0, during=1.5 * self.lease.ttl)
        assert self.lease.is_held()
        assert self.lease.state is LeaseState.HELD

    def has_a_successor(self, url: str) -> None:
        """Assert that another client gets the lock with a greater token through each server of ``url``, once the server
        is healthy."""
        tokens = [self.lease.token or 0, *each_grants(url, self.name)]
        assert tokens == sorted(set(tokens))

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
