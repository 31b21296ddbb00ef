"""The commands ``run`` and ``elect``: wait for the lock or the leadership, then run CMD under its lease."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from multilock import Client, ConfigurationError, DistributedLock, Election, LockTimeout
from multilock.backend import FindsTheDead
from multilock.cli.command_under_lease import run_under
from multilock.cli.exits import LOST, say
from multilock.cli.signals import Signalled, Signals

__all__ = ["Signals", "elect", "run"]


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
    code = run_under(lease, command, signals)
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
        code = run_under(leadership, command, signals, leadership.ttl if grace is None else grace)
        if code is not None:
            return code
        if signals.passed_on:  # CMD was being ended already, so it could not obey the signal
            return 128 + signals.passed_on[-1]
        say(f"is a candidate for {election.name!r} again")


def _check_command(command: Sequence[str]) -> None:
    if not command[0]:
        raise ConfigurationError("CMD is empty: name the program to run after --")


def _works_in_children(client: Client) -> None:
    """Have the backend keep the name until its ttl ends if multilock is killed, because the processes of CMD are killed
    a moment later."""
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
