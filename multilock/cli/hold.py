"""``run`` and ``elect``: run CMD while a lease is held, and end it with the lease."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from multilock import Client, ConfigurationError, DistributedLock, Lease, LockTimeout, Loss, system
from multilock.backend import FindsTheDead
from multilock.cli.child import CannotStart, Child
from multilock.cli.exits import LOST, leave, say
from multilock.cli.signals import Signalled, Signals
from multilock.kernel.runtime import Threads, now
from multilock.kernel.worker import start_worker

if TYPE_CHECKING:
    from multilock.kernel.holding import AnyHeld

__all__ = ["elect", "run"]

KILL_SHARE = 1 / 50  # of the ttl: CMD is killed so long before the lease ends, even if it ignores SIGTERM


def run(
    client: Client, lock: DistributedLock, command: Sequence[str], timeout: float | None, taken: int, quiet: bool
) -> int:
    """Run ``command`` under ``lock``. Returns its exit code, or ``taken`` if the lock was not obtained in time."""
    if not 0 <= taken <= 255:
        raise ConfigurationError(f"-E {taken}: give an exit code from 0 to 255")
    _check_command(command)
    _works_in_children(client)
    if not quiet:
        _tell_waiting(client)
    with Signals() as signals:
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


def elect(client: Client, name: str, command: Sequence[str], identity: str | None, grace: float | None) -> int:
    """Run ``command`` each time this node is the leader.

    Returns the exit code of the run that ended by itself, or by SIGTERM.
    """
    _check_command(command)
    _works_in_children(client)
    election = client.election(name, identity=identity, grace=grace)
    _tell_waiting(client)
    with Signals() as signals:
        while True:
            try:
                with signals.end_the_wait():
                    leadership = election.campaign()
            except Signalled as signalled:
                return signalled.code
            code = _hold(leadership, command, signals, leadership.ttl if grace is None else grace)
            if code is not None:
                return code
            if signals.passed_on is not None:  # CMD was being ended already, so it could not obey the signal
                return 128 + signals.passed_on
            say(f"is a candidate for {name!r} again")


def _check_command(command: Sequence[str]) -> None:
    if not command[0]:
        raise ConfigurationError("CMD is empty: name the program to run after --")


def _works_in_children(client: Client) -> None:
    """When multilock is killed, the processes of CMD are killed a moment later: until then nobody may get the name."""
    backend = client._kernel.backend
    if isinstance(backend, FindsTheDead):
        backend.works_in_children()


def _tell_waiting(client: Client) -> None:
    """Print a line when the lock is awaited, if a person reads stderr."""

    if not sys.stderr.isatty():
        return
    from multilock.events import Event, Waiting  # late: a cron job has no use for them

    def tell(event: Event) -> None:
        if isinstance(event, Waiting):
            say(f"waiting for {event.name!r}")

    client.events.subscribe(tell)


class _Ending:
    """Signals for a CMD with a grace time. After SIGTERM the lease is kept until CMD's whole group has ended.

    After the grace time the rest of the group is killed.
    """

    def __init__(self, child: Child, what: str, grace: float) -> None:
        self._child = child
        self._what = what
        self._grace = grace
        self._told = Threads().bell()  # a signal handler may ring it
        self._wanted = False
        self._worker = start_worker(self._see_to_it, "multilock-signals", once=True)

    def signal(self, signum: int) -> bool:
        sent = self._child.signal(signum)
        if signum == signal.SIGTERM:
            self._wanted = True
            self._told.ring()
        return sent

    def wait(self) -> None:
        """Wait for the rest of the group. Call it once CMD itself has ended."""
        self._told.ring()
        self._worker.join()

    def _see_to_it(self) -> None:
        self._told.wait(math.inf)
        if not self._wanted:
            return
        kill_at = now() + self._grace
        ended = self._child.kill(kill_at, kill_at, lambda: None)
        if now() >= kill_at:
            what_then = "was killed" if ended else "may run on: it cannot be killed"
            say(f"{self._what} had not ended {self._grace:g} s after SIGTERM and {what_then}")


def _hold(lease: Lease, command: Sequence[str], signals: Signals, grace: float | None = None) -> int | None:
    """Run ``command`` while ``lease`` is held, then release it. Returns the exit code, or None if the lease was lost.

    ``grace`` is how many seconds after SIGTERM to wait for all processes that CMD started. None means to wait for CMD
    itself only, without a limit.
    """
    environment = {
        "MULTILOCK_NAME": lease.name,
        "MULTILOCK_TOKEN": "" if lease.token is None else str(lease.token),
        "MULTILOCK_OWNER": lease.owner,
    }
    try:
        child = Child(command, environment)
    except BaseException as error:
        cast("AnyHeld", lease)._no_rest()  # nothing ran: the next attempt must not wait for --hold-at-least
        lease.release()
        if not isinstance(error, CannotStart):  # the system refused a process or a pipe
            raise
        say(str(error))
        return error.code
    ended = system.Event()

    def forbidden() -> None:
        say(f"{command[0]} cannot be ended: its last processes belong to another user, and may outlive the lock")

    def end(loss: Loss) -> None:
        child.terminate()
        say(f"ending {command[0]}")  # the library logs the reason
        share = lease.ttl * KILL_SHARE
        if not child.kill(loss.valid_until - share, loss.valid_until - share / 2, forbidden):
            say(f"{command[0]} still runs, without the lock: end it by hand")
            child.leave_terminal()
            leave(LOST)  # the main thread waits for CMD, but our parent must learn of the loss now
        ended.set()

    ending = None if grace is None else _Ending(child, command[0], grace)
    with signals.go_to(ending or child):
        lease.on_lost(end)
        code = child.wait(signals.pause)
        if ending:
            ending.wait()
        ours = lease.release()
        if not ours:  # lost while CMD ran: the rest of its group is being ended
            ended.wait(lease.ttl)
        child.close()
    return code if ours else None
