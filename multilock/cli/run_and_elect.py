"""``run`` and ``elect``: run CMD while a lease is held, and end it with the lease."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from multilock import Client, ConfigurationError, DistributedLock, Election, Lease, LockTimeout, Loss, log_thread
from multilock.backend import FindsTheDead
from multilock.cli.child import CannotStart, Child
from multilock.cli.exits import LOST, leave, say
from multilock.cli.signals import Signalled, Signals
from multilock.kernel.runtime import now

if TYPE_CHECKING:
    from multilock.kernel.holding import AnyHeld

__all__ = ["Signals", "elect", "run"]

KILL_SHARE = 1 / 50  # share of the ttl: CMD is killed this long before the lease ends, even if it ignores SIGTERM


def run(
    client: Client,
    lock: DistributedLock,
    command: Sequence[str],
    signals: Signals,
    timeout: float | None,
    taken: int,
    quiet: bool,
) -> int:
    """Run ``command`` under ``lock``. Returns its exit code, or ``taken`` if the lock was not obtained in time."""
    if not 0 <= taken <= 255:
        raise ConfigurationError(f"-E {taken}: give an exit code from 0 to 255")
    _check_command(command)
    _works_in_children(client)
    if not quiet:
        _tell_waiting(client)
    try:
        with signals.end_the_wait():
            lease = lock.acquire(timeout)
    except LockTimeout:
        if not quiet:
            taken_for = f"still taken after {timeout:g} s" if timeout else "taken"
            say(f"{lock.name!r} is {taken_for}: multilock status shows who holds it, or until when it rests")
        return taken
    except Signalled as signalled:
        return signalled.code
    code = _hold(lease, command, signals)
    return LOST if code is None else code


def elect(client: Client, election: Election, command: Sequence[str], signals: Signals, grace: float | None) -> int:
    """Run ``command`` each time this node is the leader of ``election``, whose grace is ``grace``.

    Returns the exit code of the run that ended by itself, or by SIGTERM.
    """
    _check_command(command)
    _works_in_children(client)
    _tell_waiting(client)
    while True:
        try:
            with signals.end_the_wait():
                leadership = election.campaign()
        except Signalled as signalled:
            return signalled.code
        code = _hold(leadership, command, signals, leadership.ttl if grace is None else grace)
        if code is not None:
            return code
        if signals.passed_on:  # CMD was being ended already, so it could not obey the signal
            return 128 + signals.passed_on[-1]
        say(f"is a candidate for {election.name!r} again")


def _check_command(command: Sequence[str]) -> None:
    if not command[0]:
        raise ConfigurationError("CMD is empty: name the program to run after --")


def _works_in_children(client: Client) -> None:
    """When multilock is killed, the processes of CMD are killed a moment later: until then no other process may get the
    name."""
    backend = client._kernel.backend
    if isinstance(backend, FindsTheDead):
        backend.works_in_children()


def _tell_waiting(client: Client) -> None:
    """If stderr is a terminal, print a line when this process begins to wait for the lock."""

    if not sys.stderr.isatty():
        return
    from multilock.events import Event, Waiting  # imported late, because a cron job does not need them

    def tell(event: Event) -> None:
        if isinstance(event, Waiting):
            say(f"waiting for {event.name!r}")

    client.events.subscribe(tell)


def _hold(lease: Lease, command: Sequence[str], signals: Signals, grace: float | None = None) -> int | None:
    """Run ``command`` while ``lease`` is held, then release it. Returns the exit code, or None if the lease was lost.

    ``grace`` is how many seconds after SIGTERM to wait for all processes that CMD started. If ``grace`` is None, this
    waits only for CMD itself, without a limit.

    This thread alone notices a loss, ends CMD and says so. CMD may use up the limit of processes, and then no further
    thread can be started.
    """
    environment = {
        "MULTILOCK_NAME": lease.name,
        "MULTILOCK_TOKEN": "" if lease.token is None else str(lease.token),
        "MULTILOCK_OWNER": lease.owner,
    }
    log_thread.defer(int)  # start the thread of the log now
    held = cast("AnyHeld", lease)
    held._at_end(signals.wake)
    began = False
    try:
        child = Child(command, environment)
        began = child.go(lambda: 0.0 if signals.pending else lease.remaining(), signals.pause)
    except CannotStart as error:
        say(str(error))
        return error.code
    finally:
        if not began:
            held._no_rest()  # nothing ran: the next attempt must not wait for --hold-at-least
            lease.release()
    if not began:
        if signals.pending:
            return 128 + signals.pending[0]
        say(f"{command[0]} was not started, because the lock was lost before")
        return None
    with signals.go_to(child):
        code = _wait(child, lease, command[0], signals, grace)
        ours = not lease.wait_lost(0) and lease.release()
        if loss := lease.wait_lost(0):
            signals.forget_survived()
            _end(child, loss, command[0], signals)
            # Called only once CMD has ended, because this reports the end of the work, and frees the name.
            lease.release()
        child.close()
    return code if ours else None


def _wait(child: Child, lease: Lease, what: str, signals: Signals, grace: float | None) -> int | None:
    """Wait until CMD has ended or the lease is lost. Returns the exit code, or None after a loss.

    With a ``grace``, also wait after SIGTERM for the other processes of CMD's group, and kill them after the grace.
    """
    while lease.is_held():
        if grace is not None and signal.SIGTERM in signals.passed_on:
            kill_at = now() + grace
            ended = child.kill(kill_at, kill_at, signals.pause, until=lambda: not lease.is_held())
            if now() >= kill_at and lease.is_held():
                what_then = "was killed" if ended else "may run on: it cannot be killed"
                say(f"{what} had not ended {grace:g} s after SIGTERM and {what_then}")
            grace = None
        elif (code := child.poll()) is not None:
            return code
        else:
            signals.pause(lease.remaining())
    return None


def _end(child: Child, loss: Loss[Any], what: str, signals: Signals) -> None:
    """End CMD's group before ``loss.valid_until``. If it cannot be ended, multilock exits."""

    def forbidden() -> None:
        say(f"{what} cannot be ended: its last processes belong to another user, and may outlive the lock")

    child.terminate()
    say(f"ending {what}")  # the library logs the reason
    share = loss.lease.ttl * KILL_SHARE
    if not child.kill(loss.valid_until - share, loss.valid_until - share / 2, signals.pause, forbidden):
        say(f"{what} still runs, without the lock: end it by hand")
        child.leave_terminal()
        leave(LOST)  # report the loss to our parent process now
