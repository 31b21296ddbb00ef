"""Run CMD while a lease is held, and end CMD before the lease ends if the lock is lost."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from multilock import Lease, Loss, log_thread
from multilock.cli.child import CannotStart, Child
from multilock.cli.exits import LOST, leave, say
from multilock.cli.signals import Signals
from multilock.kernel.runtime import now

if TYPE_CHECKING:
    from multilock.kernel.holding import AnyHeld

__all__ = ["run_under"]

KILL_SHARE = 1 / 50  # share of the ttl: CMD is killed this long before the lease ends, even if it ignores SIGTERM


def run_under(lease: Lease, command: Sequence[str], signals: Signals, grace: float | None = None) -> int | None:
    """Run ``command`` while ``lease`` is held, then release it. Returns the exit code, or None if the lease was lost.

    ``grace`` is how many seconds after SIGTERM to wait for all processes that CMD started. If ``grace`` is None, this
    waits only for CMD itself, without a limit.

    This thread alone notices a loss, ends CMD and says so, because no other thread can be started once CMD has used up
    the limit of processes.
    """
    environment = {
        "MULTILOCK_NAME": lease.name,
        "MULTILOCK_TOKEN": "" if lease.token is None else str(lease.token),
        "MULTILOCK_OWNER": lease.owner,
    }
    log_thread.defer(int)  # start the thread of the log now, because CMD may use up the limit of processes
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
            # The lease is released only once CMD has ended, because the release reports the end of the work.
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
