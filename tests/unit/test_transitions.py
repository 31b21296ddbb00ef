"""Each change of a lease's state starts from the right states, and happens under the client's lock."""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable
from typing import Any

import pytest

from multilock import Client, Loss, LossReason
from multilock.kernel import holding
from multilock.kernel.holding import HELD, LOST, NEW, RELEASED, RELEASING, AnyHeld, Holding
from multilock.kernel.lock_options import want
from multilock.lock import HeldLease
from multilock.lock_all import HeldSet
from multilock.model import Granted
from multilock.testing import HandRuntime
from multilock.testing.conformance.base import inner
from tests.unit.kit import Losses, Scripted, silence

STATES = {"NEW": NEW, "HELD": HELD, "RELEASING": RELEASING, "RELEASED": RELEASED, "LOST": LOST}

# For each transition: the states in which it is allowed, and the state that follows. Every other state refuses the
# transition.
TABLE = {
    "_adopt": {NEW: HELD},
    "_count_down": {},  # only leases acquired more than once are counted down
    "_begin_release": {HELD: RELEASING},
    "_end_release": {RELEASING: RELEASED},
    "_lose": {HELD: LOST},
    "_lose_released": {RELEASING: LOST},
    "_abandon": {NEW: RELEASED, HELD: RELEASED, RELEASING: RELEASED},
    "_reset_in_child": dict.fromkeys(STATES.values(), RELEASED),
}


def loss_of(lease: HeldLease) -> Loss:
    return Loss(lease, LossReason.TAKEN, True, "by the test", 0.0, 0.0)


def make(client: Client, state: int) -> HeldLease:
    """Make a lease and bring it into this state by transitions."""
    wanted = want(client._kernel, "n", HeldLease, on_lost=lambda loss: None)
    claim = client._kernel.claim(wanted, 0)
    lease = HeldLease(
        client._kernel, wanted, claim, Granted(1, 30.0, client._kernel.now(), 30.0, 10.0, "server"), False
    )
    lease._hooks = [lambda: None]
    way: dict[int, list[Callable[[], object]]] = {
        NEW: [],
        HELD: [lease._adopt],
        RELEASING: [lease._adopt, lease._begin_release],
        RELEASED: [lease._adopt, lease._begin_release, lease._end_release],
        LOST: [lease._adopt, lambda: lease._lose(loss_of(lease))],
    }
    for step in way[state]:
        assert step()
    assert lease.stage == state
    return lease


def go(lease: HeldLease, transition: str) -> bool | None:
    method = getattr(lease, transition)
    answer: bool | None = method(loss_of(lease)) if transition.startswith("_lose") else method()
    return answer


@pytest.mark.parametrize("transition", TABLE)
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_each_transition_is_refused_outside_the_states_it_names(client: Client, transition: str, state: int) -> None:
    lease = make(client, state)
    before = [getattr(lease, name) for name in ("loss", "_callbacks", "_hooks", "count")]
    answer = go(lease, transition)
    if state in TABLE[transition]:
        assert lease.stage == TABLE[transition][state]
        assert answer is (None if transition == "_reset_in_child" else True)
    else:
        assert answer is False
        assert lease.stage == state
        assert before == [getattr(lease, name) for name in ("loss", "_callbacks", "_hooks", "count")]


def test_the_table_lists_every_transition() -> None:
    """A transition is a method of a lease that changes the state, directly or through another method."""
    change = {"_lost_from"}
    members = {**vars(AnyHeld), **vars(Holding), **vars(HeldSet)}
    source = {name: function for name, function in members.items() if callable(function)}
    changing = {name for name, function in source.items() if "stage" in stored_by(function) or name in change}
    changing |= {name for name, function in source.items() if change & set(function.__code__.co_names)}
    assert changing - change - {"__init__"} == set(TABLE) - {"_count_down"}


def stored_by(function: Any) -> set[str]:
    return {str(step.argval) for step in dis.get_instructions(function) if step.opname == "STORE_ATTR"}


@pytest.mark.parametrize("state", [state for state in STATES.values() if state != LOST])
def test_only_a_lost_lease_has_a_loss(client: Client, state: int) -> None:
    assert make(client, state).loss is None
    assert make(client, LOST).loss is not None


def test_a_held_reentrant_lease_is_counted_down_while_it_has_more_than_one_acquire(client: Client) -> None:
    lease = make(client, HELD)
    lease.count = 3
    assert [lease._count_down() for _ in range(3)] == [True, True, False]
    assert lease.count == 1
    lease.count = 2
    assert lease._begin_release()
    assert not lease._count_down()


@pytest.mark.oracle
def test_no_callback_is_left_after_a_release_or_in_a_child(client: Client) -> None:
    assert make(client, RELEASED)._callbacks is None
    child = make(client, LOST)
    child._reset_in_child()
    assert (child.loss, child._callbacks, child._hooks) == (None, None, None)


def test_a_grant_that_becomes_no_lease_is_neither_held_nor_ended(client: Client) -> None:
    lease = make(client, NEW)
    assert not lease.is_held()
    assert not lease._over()


def a_release(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    client.lock("n").acquire().release()


def a_silent_release(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    lease = client.lock("n").acquire()
    backend.script("release", silence())
    lease.release()


def a_release_that_finds_it_gone(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    lease = client.lock("n").acquire()
    backend.holders.clear()
    lease.release()


def a_reentrant_one(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    lock = client.lock("n", reentrant=True)
    with lock, lock:
        pass


def an_expiry(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    client.lock("n", renew=False).acquire()
    runtime.advance(60)


def one_in_the_background(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    client._kernel.releases.later(inner(client.lock("n").acquire()))


def a_close(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    client.lock("n", on_lost=Losses(runtime)).acquire()
    client.close()


def an_exit(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    client.lock("n").acquire()
    client._kernel.end.withdraw(runtime.now() + 1)
    client._kernel.end.exit(runtime.now() + 1)


def an_interrupted_acquire(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    def interrupted(lease: HeldLease) -> float:
        raise KeyboardInterrupt

    client._kernel.watchdog.adopt = interrupted  # type: ignore[method-assign, assignment]
    with contextlib.suppress(KeyboardInterrupt):
        client.lock("n").acquire()


@pytest.mark.parametrize(
    "life",
    [
        a_release,
        a_silent_release,
        a_release_that_finds_it_gone,
        a_reentrant_one,
        an_expiry,
        one_in_the_background,
        a_close,
        an_exit,
        an_interrupted_acquire,
    ],
)
def test_every_transition_happens_under_the_lock_of_the_client(
    client: Client,
    backend: Scripted,
    runtime: HandRuntime,
    monkeypatch: pytest.MonkeyPatch,
    life: Callable[[Client, Scripted, HandRuntime], None],
) -> None:
    seen: list[tuple[str, bool]] = []

    def watched(name: str) -> Callable[..., Any]:
        transition = getattr(Holding, name)

        def call(lease: HeldLease, *args: Any) -> Any:
            seen.append((name, client._kernel.lock._is_owned()))  # type: ignore[attr-defined]
            return transition(lease, *args)

        return call

    for name in TABLE:
        monkeypatch.setattr(Holding, name, watched(name))
    life(client, backend, runtime)
    assert len(seen) >= 2
    assert [name for name, under_lock in seen if not under_lock] == []


def test_the_states_are_distinct() -> None:
    assert len(STATES) == len(set(STATES.values())) == len({getattr(holding, name) for name in STATES})
