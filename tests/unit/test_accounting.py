"""After each random step, a client's leases are compared with a model that counts acquires and bodies of ``with``.

A *body* is an open ``with``. The library only counts the acquires and the bodies of a lease. In the model, each body
owns an acquire, or is a *guest* without an acquire, and a set of locks is a body of each of its parts. Some steps are
interrupted.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from multilock import LockLost, NotHeld
from multilock.testing import HandRuntime
from tests.unit.kit import PRODUCT, Scripted, client_on, interrupted_at

SEEDS, STEPS = 100, 40
HELD, RELEASED, LOST = "held", "released", "lost"
WEIGHTS = {"acquire": 4, "with": 3, "enter": 5, "exit": 6, "leave": 4, "release": 4, "lose": 0.6}
# For each operation, the function that is interrupted.
INTERRUPTED = {
    "acquire": "Lock.try_acquire",
    "with": "Lock.__enter__",
    "enter": "Waits.__enter__",
    "exit": "Lock.__exit__",
    "leave": "Waits.__exit__",
}


class Account:
    """A lease in the model: its acquires, its bodies and its state."""

    def __init__(self, names: tuple[str, ...], reentrant: bool, parts: tuple[Account, ...] = ()) -> None:
        self.names, self.reentrant, self.parts = names, reentrant, parts
        # numbers of acquires without a body, bodies with an acquire, and guests
        self.by_hand, self.owners, self.guests = 1, 0, 0
        self.state = HELD
        self.settled = False  # the last acquire was released, and all work has ended
        self.sets: list[Account] = []
        for part in parts:
            part.enter()
            part.sets.append(self)

    def enter(self) -> bool:
        """Begin a body. If an acquire has no body yet, this body becomes its owner. Returns False if the lease is
        over."""
        owner = self.by_hand > 0
        self.by_hand, self.owners, self.guests = self.by_hand - owner, self.owners + owner, self.guests + (not owner)
        if self.state != HELD:
            self.end()
        return self.state == HELD

    def end(self) -> None:
        """End a body. Guests end before bodies with an acquire, because a guest releases no acquire."""
        if self.guests:
            self.guests -= 1
        else:
            self.owners -= 1
            self._settle()

    def release(self) -> None:
        """Release an acquire by hand. If every acquire has a body, one of the bodies becomes a guest."""
        if self.by_hand:
            self.by_hand -= 1
        elif self.owners:
            self.owners, self.guests = self.owners - 1, self.guests + 1
        self._settle()

    def _settle(self) -> None:
        if self.settled or self.by_hand + self.owners:
            return
        self.settled = True
        self.over(RELEASED)
        for part in reversed(self.parts):
            part.end()

    def over(self, state: str) -> None:
        """End the lease, and each set that it is a part of."""
        for lease in (self, *self.sets):
            lease.state = state if lease.state == HELD else lease.state


class Books:
    """A client, its leases, and the accounts of the model."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.runtime = HandRuntime(start=1000.0)
        self.server = Scripted(self.runtime)
        self.client = client_on(self.server, self.runtime, ttl=20.0)
        lock, lock_all = self.client.lock, self.client.lock_all
        self.locks: list[Any] = [lock("a", reentrant=True), lock("a", reentrant=True), lock("b", reentrant=True)]
        self.locks += [lock("c"), lock_all([*"ab"], reentrant=True), lock_all([*"bc"])]
        self.locks.append(lock_all([*"ac"], reentrant=True))
        self.leases: dict[Account, Any] = {}
        self.entered: list[tuple[Any, Account]] = []  # open bodies of `with lock`
        self.bodies: list[Account] = []  # open bodies of `with lease`
        self.log: list[str] = []

    # The model of an acquire

    def _holder(self, name: str) -> Account | None:
        return next((each for each in self.leases if each.names == (name,) and each.state == HELD), None)

    def _again(self, names: tuple[str, ...], reentrant: bool) -> Account | None:
        """Return the lease that a reentrant lock of these names acquires once more."""
        held = [each for each in self.leases if each.names == names and each.reentrant and each.state == HELD]
        return held[-1] if held and reentrant else None

    def _acquire(self, lock: Any) -> Account | None:
        """Acquire a lock in the model. Returns None if another lease has one of its names."""
        names, reentrant = lock._want.names, lock._want.reentrant
        if account := self._again(names, reentrant):
            account.by_hand += 1
            return account
        parts: list[Account] = []
        for name in names:
            part = self._again((name,), reentrant)
            if part is None and self._holder(name):
                held = [each for each in parts if each in self.leases]
                for each in held:  # the failed set was a body of the parts that it had acquired
                    each.enter()
                for each in reversed(held):
                    each.end()
                return None
            if part:
                part.by_hand += 1
            parts.append(part or Account((name,), reentrant))
        return Account(names, reentrant, tuple(parts)) if lock._want.parts else parts[0]

    # The steps

    def step(self) -> None:
        """Take a random step, and compare the client with the model."""
        what = self.random.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
        recent = [*self.leases][-6:]
        if what in ("acquire", "with"):
            self._acquire_or_enter(what, self.random.choice(self.locks))
        elif what == "exit" and self.entered:
            lock = self.random.choice(self.entered)[0]
            account = [account for other, account in self.entered if other is lock][-1]  # the newest body of this lock
            self.entered.remove((lock, account))
            self._end(what, lambda: lock.__exit__(None, None, None), account)
        elif what == "leave" and self.bodies:
            account = self.bodies.pop(self.random.randrange(len(self.bodies)))
            self._end(what, lambda: self.leases[account].__exit__(None, None, None), account)
        elif what == "enter" and recent:
            self._enter(self.random.choice(recent))
        elif what == "release" and recent:
            account = self.random.choice(recent)
            self.log.append(f"release {account.names}")
            self.leases[account].release()
            account.release()
        elif what == "lose" and (held := [each for each in recent if each.state == HELD and not each.parts]):
            account = self.random.choice(held)
            self.log.append(f"lose {account.names}")
            del self.server.holders[account.names[0]]
            with pytest.raises(LockLost):
                self.leases[account].renew()
            account.over(LOST)
        self.compare()

    def _acquire_or_enter(self, what: str, lock: Any) -> None:
        free = all(self._again((name,), lock._want.reentrant) or not self._holder(name) for name in lock._want.names)
        if what == "with" and not (free or self._again(lock._want.names, lock._want.reentrant)):
            return  # it would wait
        lease, interrupted = self._call(what, lock.try_acquire if what == "acquire" else lock.__enter__, lock._want)
        if interrupted:
            return
        account = self._acquire(lock)
        assert (lease is None) == (account is None)
        if account:
            for part, of_part in zip(account.parts, lease.leases, strict=False):
                self.leases.setdefault(part, of_part)
            assert self.leases.setdefault(account, lease) is lease
            if what == "with":
                account.enter()
                self.entered.append((lock, account))

    def _enter(self, account: Account) -> None:
        error, interrupted = self._call("enter", self.leases[account].__enter__, account)
        if not account.enter():
            assert interrupted or isinstance(error, (NotHeld, LockLost))
        elif interrupted:
            account.end()
        else:
            self.bodies.append(account)

    def _end(self, what: str, end: Callable[[], object], account: Account) -> None:
        self._call(what, end, account)
        account.end()

    def _call(self, what: str, call: Callable[[], Any], of: Any) -> tuple[Any, bool]:
        """Return the result of ``call()``, or its error, and whether it was interrupted."""
        self.log.append(f"{what} {of.names}")
        with contextlib.ExitStack() as stack:
            if self.random.random() < 0.25:
                step = self.random.randrange(1, 40)  # at point 0 no code of multilock has run yet
                stack.enter_context(interrupted_at(step, INTERRUPTED[what], PRODUCT))
            try:
                return call(), False
            except (LockLost, NotHeld) as error:
                return error, False
            except KeyboardInterrupt as error:
                self.log[-1] += ", interrupted"
                return error, True

    def compare(self) -> None:
        self.runtime.settle()
        for account, lease in self.leases.items():
            held = account.state == HELD
            assert lease.is_held() == held, account.names
            if held:
                assert lease.count == account.by_hand + account.owners, account.names
            if not account.parts:
                assert (self.server.holders.get(lease.name) == lease.claim.id) == held, account.names
                assert lease._work_over == account.settled or account.state != LOST, account.names
        assert all(self._holder(name) for name in self.server.holders), "a name stays taken"

    def finish(self) -> None:
        """End every body, and release every acquire: nothing may be left."""
        for lock, account in reversed(self.entered):
            self._end("exit", lambda lock=lock: lock.__exit__(None, None, None), account)  # type: ignore[misc]
            self.compare()
        for account in self.bodies:
            self._end("leave", lambda lease=self.leases[account]: lease.__exit__(None, None, None), account)  # type: ignore[misc]
            self.compare()
        for account in reversed(self.leases):
            while account.by_hand:
                self.leases[account].release()
                account.release()
                self.compare()
        assert self.server.holders == {}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # unawaited coroutines cause warnings
def test_acquires_and_bodies_are_counted_as_if_each_body_owned_its_acquire() -> None:
    for seed in range(SEEDS):
        books = Books(seed)
        try:
            for _ in range(STEPS):
                books.step()
            books.finish()
        except AssertionError as error:
            error.add_note(f"seed {seed}: " + "; ".join(books.log))
            raise
        finally:
            books.client.close()
