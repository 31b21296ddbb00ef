"""``run`` and ``elect``: CMD runs while a lease is held, and ends with it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

from multilock import Client, ConfigurationError, Lease, LockTimeout, Loss
from multilock.cli.child import CannotStart, Child
from multilock.cli.exits import LOST, say
from multilock.cli.signals import Signalled, Signals
from multilock.events import Event, Waiting

__all__ = ["elect", "run"]

KILL_SHARE = 1 / 50  # of the ttl: so long before the validity ends CMD is dead, whatever it does with SIGTERM


def run(client: Client, name: str, command: Sequence[str], timeout: float | None, taken: int) -> int:
    """``command`` under the lock ``name``; the exit code, ``taken`` if the lock was not obtained in time."""
    if not 0 <= taken <= 255:
        raise ConfigurationError(f"-E {taken}: an exit code is 0 to 255")
    _check_command(command)
    lock = client.lock(name)
    _tell_waiting(client)
    with Signals() as signals:
        try:
            with signals.end_the_wait():
                lease = lock.acquire(timeout)
        except LockTimeout:
            say(f"{name!r} is still taken after {timeout:g} s: wait longer, or see who holds it with multilock status")
            return taken
        except Signalled as signalled:
            return signalled.code
        code = _hold(lease, command, signals)
        return LOST if code is None else code


def elect(client: Client, name: str, command: Sequence[str], identity: str | None) -> int:
    """``command`` whenever this node leads; the exit code of the one that ended by itself."""
    _check_command(command)
    election = client.election(name, identity=identity)
    _tell_waiting(client)
    with Signals() as signals:
        while True:
            try:
                with signals.end_the_wait():
                    leadership = election.campaign()
            except Signalled as signalled:
                return signalled.code
            code = _hold(leadership, command, signals)
            if code is not None:
                return code
            if signals.passed_on is not None:  # CMD could not obey it: it was being ended anyway
                return 128 + signals.passed_on
            say(f"stands again for {name!r}")


def _check_command(command: Sequence[str]) -> None:
    if not command[0]:
        raise ConfigurationError("CMD is empty: name the program to run after --")


def _tell_waiting(client: Client) -> None:
    """For a user who wonders; a program has no use for it."""

    def tell(event: Event) -> None:
        if isinstance(event, Waiting):
            say(f"waiting for {event.name!r}")

    if sys.stderr.isatty():
        client.events.subscribe(tell)


def _hold(lease: Lease, command: Sequence[str], signals: Signals) -> int | None:
    """Run ``command`` while ``lease`` is held, then give it back; the exit code, or None if it was lost."""
    environment = {
        "MULTILOCK_NAME": lease.name,
        "MULTILOCK_TOKEN": "" if lease.token is None else str(lease.token),
        "MULTILOCK_OWNER": lease.owner,
    }
    try:
        child = Child(command, environment)
    except CannotStart as error:
        lease.release()
        say(str(error))
        return error.code
    ended = threading.Event()

    def end(loss: Loss) -> None:
        say(f"ending {command[0]}")  # why is logged by the library
        child.end(loss.valid_until - lease.ttl * KILL_SHARE)
        ended.set()

    with signals.go_to(child):
        lease.on_lost(end)
        code = child.wait()
        ours = lease.release()
        if not ours:  # lost while it ran: what is left of its group is being ended
            ended.wait(lease.ttl)
        child.close()
    return code if ours else None
