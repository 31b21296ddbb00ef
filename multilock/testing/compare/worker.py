"""A process of a comparison: it holds and waits as ordered, and records what it believes.

Each order is one JSON object in a line. Each line that this process writes is one of
`multilock.testing.beliefs.witness`, where the id of a lease is the role that holds it, or one of these::

    ready                        it takes orders
    opened TIME ROLE             its client is open
    asking TIME ROLE NAME        acquire() is called
    ttl ID SECONDS               the ttl that was granted
    valid ID UNTIL               the lease is valid until then, if nothing else happens
    listens TIME ID              a callback for its loss was registered
    refused TIME ROLE WHY        acquire() did not get the lock
    blocked FROM TO              its event loop was blocked
    raised TIME ROLE WHY         release() raised an exception
    wrote TIME ID TOKEN VALUE TAKEN          a write to the ledger: accepted (1), or it had seen a greater token (0)
    holds TIME ROLE N THREADS BYTES          the threads of the client, and the bytes for each of N locks
    kept TIME ROLE N SECONDS CPU             N of them are still held after SECONDS; CPU: seconds beyond those at rest
    ended TIME ROLE YES          the server was asked to end the client's session, and did (1 or 0)
    closed TIME ROLE             its client is closed
    grant TIME WHO ASKED UNTIL HELD TOKEN    acquired at TIME, released at UNTIL, and (HELD) believed until then
    served TIME WHO ASKED UNTIL HELD TOKEN   the same after the measured time, when no new acquire() begins
    unserved TIME WHO ASKED                  waited in vain until TIME, long after the measured time
    spent TIME ROLE ACQUIRE RELEASE PING     seconds of each; PING may be "-"
    done TIME ROLE               its contention or its cost has been measured
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import select
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multilock import now
from multilock.testing import hear
from multilock.testing.beliefs import Account, note, watch_pulse
from multilock.testing.compare.contestants import AdapterClient, AdapterHolding, load

__all__ = ["work"]

ASK_EVERY = 0.005  # seconds between two checks whether the lock is still held
NOTE_EVERY = 0.05  # seconds between two lines about a lock that is still held
RENEWED = 0.005  # seconds; the worker prints a line when the end of the lease's validity moves by more than this
OPEN_WITHIN = 10.0
PULSE = 0.01  # seconds between two checks whether this process was frozen; shorter ones would load the machine
AT_REST = 1.0  # seconds for which the CPU time of a process without locks is measured
TEXT = 300


def work() -> None:
    """Follow orders until stdin ends. At the end, exit at once, even if a thread hangs."""
    sys.stdout = sys.stderr  # the output of a lock library must not be mixed with our lines
    watch_pulse(PULSE)
    roles: dict[str, _Role] = {}
    note("ready")
    while line := hear():
        order = json.loads(line)
        match order["do"]:
            case "hog":
                hog(order["seconds"])
            case "go-on":
                pass
            case "open":
                role = roles[order["role"]] = _Role(**order)
                role.start(role.open)
            case what:
                role = roles[order["role"]]
                match what:
                    case "acquire":
                        role.start(role.acquire, order["timeout"])
                    case "contention":
                        role.start(role.contend, order["seconds"], order["threads"], order["hold"], order["patience"])
                    case "scale":
                        role.start(role.hold_many, order["locks"], order["seconds"])
                    case "cost":
                        role.start(role.spend, order["seconds"], order["most"])
                    case "block":
                        role.block(order["seconds"])
                    case "end-session":
                        threading.Thread(target=role.end_session, name="compare-operator", daemon=True).start()
                    case "release":
                        role.release_now.set()
                    case "close":
                        role.release_now.set()
                        role.start(role.close)
    os._exit(0)


@dataclass
class _Role:
    """One contender, with its own client and one lock."""

    role: str
    adapter: str
    url: str
    ttl: float
    name: str
    ledger: str = ""  #: the address of the ledger; empty in a measurement
    do: str = ""
    client: AdapterClient | None = None
    release_now: threading.Event = field(default_factory=threading.Event)
    _last: threading.Thread | None = None
    closed: bool = False
    _threads: int = 0  #: the number of threads before this role opened its client

    def start(self, what: Any, *arguments: Any) -> None:
        """Call ``what`` on a thread, once the previous call has ended."""
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            try:
                what(*arguments)
            except Exception as error:
                note("wrong", self.role, json.dumps(_told(error)))

        self._last = threading.Thread(target=run, name=f"compare-{self.role}", daemon=True)
        self._last.start()

    def open(self) -> None:
        """Open the client, and acquire once, so that its connections are made."""
        self._threads = threads_now()
        self.client = load(self.adapter).open(self.url, self.ttl)
        if warm := self.client.lock(f"{self.name}-{self.role}").acquire(OPEN_WITHIN):
            warm.release()
        note("opened", now(), self.role)

    def block(self, seconds: float) -> None:
        """Block the event loop of the client."""
        on_loop = getattr(self.client, "on_loop", None)
        if on_loop is None:
            raise TypeError("it has no loop that could be blocked")

        def wait() -> None:
            began = now()
            time.sleep(seconds)
            note("blocked", began, now())

        on_loop(wait)

    def end_session(self) -> None:
        """Ask the server to end the session of the client."""
        try:
            ended = bool(self.client.end_session())  # type: ignore[union-attr]  # present if has_sessions is
            note("ended", now(), self.role, int(ended))
        except Exception as error:
            note("wrong", self.role, json.dumps(_told(error)))

    def acquire(self, timeout: float) -> None:
        """Acquire the lock, hold it until the order to release, and record everything."""
        assert self.client is not None, "it could not be opened"
        lock = self.client.lock(self.name)
        note("asking", now(), self.role, self.name)
        try:
            holding = lock.acquire(timeout)
        except Exception as error:
            note("refused", now(), self.role, json.dumps(f"{type(error).__name__}: {error}"[:TEXT]))
            return
        if holding is None:
            note("refused", now(), self.role, json.dumps("taken"))
            return
        began = now()
        yes = self._believes(holding)
        token = holding.token
        if token is not None and type(token) is not int:
            raise TypeError(f"a token is an int or None, not {token!r:.40}")
        note("got", began, self.name, self.role, "-" if token is None else token, int(yes))
        if ttl := getattr(holding, "ttl", None):
            note("ttl", self.role, float(ttl))
        valid = self._note_validity(holding, 0.0)
        if on_lost := getattr(holding, "on_lost", None):
            on_lost(self._tell_loss)
            note("listens", now(), self.role)
        account = _Work(self.ledger, self.name, self.role, token) if self.ledger and token is not None else None
        if account is not None:
            account.write()
        self._hold(holding, yes, began, valid)
        self.release_now.wait()
        if account is not None:
            account.write()  # written without checking the lock, like a request that is already on its way
            account.close()
        note("release", now(), self.role)
        try:
            ours = holding.release() is not False
        except Exception as error:
            note("raised", now(), self.role, json.dumps(f"{type(error).__name__}: {error}"[:TEXT]))
            ours = False
        note("released", now(), self.role, int(ours))

    def contend(self, seconds: float, threads: int, hold: float, patience: float) -> None:
        """Let ``threads`` contenders share the client for ``seconds``. Waiters then wait for ``patience`` seconds
        more."""
        until = now() + seconds
        crew = [
            threading.Thread(target=self._contend, args=(f"{self.role}.{number}", until, hold, patience), daemon=True)
            for number in range(threads)
        ]
        for each in crew:
            each.start()
        for each in crew:
            each.join()
        note("done", now(), self.role)

    def _contend(self, who: str, until: float, hold: float, patience: float) -> None:
        assert self.client is not None
        try:
            lock = self.client.lock(self.name)
            while (asked := now()) < until:
                if (holding := lock.acquire(until + patience - asked)) is None:
                    if now() >= until:
                        note("unserved", now(), who, asked)
                    continue
                got, token = now(), holding.token
                if hold:
                    time.sleep(hold)
                released, yes = now(), self._believes(holding)
                holding.release()
                what = "grant" if got < until else "served"
                note(what, got, who, asked, released, int(yes), "-" if token is None else token)
        except Exception as error:
            note("refused", now(), who, json.dumps(f"{type(error).__name__}: {error}"[:TEXT]))

    def spend(self, seconds: float, most: int) -> None:
        """Acquire and release a free lock again and again, with a ping in between."""
        assert self.client is not None
        lock, ping = self.client.lock(self.name), getattr(self.client, "ping", None)
        until = now() + seconds
        for _ in range(most):
            if (before := now()) >= until:
                break
            holding = lock.acquire(OPEN_WITHIN)
            between = now()
            if holding is None:
                raise TimeoutError("a free lock was not granted")
            holding.release()
            after = now()
            if ping is not None:
                ping()
            pinged = "-" if ping is None else now() - after
            note("spent", before, self.role, between - before, after - between, pinged)
        note("done", now(), self.role)

    def hold_many(self, locks: int, seconds: float) -> None:
        """Hold ``locks`` locks with one client for ``seconds``."""
        assert self.client is not None
        spent = time.process_time()
        time.sleep(AT_REST)
        at_rest = (time.process_time() - spent) / AT_REST
        before = memory_now()
        held = []
        for number in range(locks):
            holding = self.client.lock(f"{self.name}-{number}").acquire(OPEN_WITHIN)
            if holding is None:
                raise TimeoutError("a free lock was not granted")
            held.append(holding)
        each = (memory_now() - before) / locks
        note("holds", now(), self.role, locks, threads_now() - self._threads, each)
        began, spent = now(), time.process_time()
        time.sleep(seconds)
        spent, lasted = time.process_time() - spent, now() - began
        kept = sum(self._believes(holding) for holding in held)
        note("kept", now(), self.role, kept, lasted, max(0.0, spent - at_rest * lasted))
        for holding in held:
            holding.release()
        note("done", now(), self.role)

    def _tell_loss(self) -> None:
        if self.closed:  # the next cycle may have begun, with a role of the same name
            return
        at = now()
        note("lost", at, self.role, "lost", at)

    def _note_validity(self, holding: AdapterHolding, before: float) -> float:
        """Record how long the lease is valid, if the adapter can say it. The record is not used for verdicts."""
        remaining = getattr(holding, "remaining", None)
        if remaining is None or (left := float(remaining())) <= 0:
            return before
        valid = now() + left
        if abs(valid - before) > RENEWED:
            note("valid", self.role, valid)
        return valid

    def _hold(self, holding: AdapterHolding, yes: bool, asked: float, valid: float) -> None:
        """Check the lock until the check returns False, or until the lock must be released.

        Every `NOTE_EVERY` seconds, record the time of a check that returned True. If this process was paused, also
        record the last check before the pause. At the end, record the last check that returned True. ``yes`` is the
        result of the first check, made at ``asked``. This process may have been frozen since then.
        """
        noted = last = asked
        while yes and not self.release_now.is_set():
            time.sleep(ASK_EVERY)  # polling needs a third of the CPU time of waiting for an event
            if self.release_now.is_set():
                break
            asked = now()
            yes = self._believes(holding)
            if not yes:
                note("held", last, self.role)
                note("over", asked, self.role, now())
                return
            if asked - noted >= NOTE_EVERY:
                if asked - last > NOTE_EVERY:
                    note("held", last, self.role)
                note("held", asked, self.role)
                noted = asked
                valid = self._note_validity(holding, valid)
            last = asked
        if yes:
            note("held", last, self.role)
        else:
            at = now()
            note("over", at, self.role, at)

    def _believes(self, holding: AdapterHolding) -> bool:
        said: object = holding.believes()
        if type(said) is not bool:
            raise TypeError(f"believes() is True or False, not {said!r:.40}")
        return said

    def close(self) -> None:
        """Close the client."""
        if self.client is not None:
            self.client.close()
        self.closed = True
        note("closed", now(), self.role)


def _told(error: Exception) -> str:
    """Return the type, message and place of an error. Reports are shared, so folders of this machine are left out."""
    trace = traceback.TracebackException.from_exception(error, limit=-3)
    for frame in trace.stack:
        frame.filename = Path(frame.filename).name
    return "".join(trace.format())[-TEXT:]


def hog(seconds: float) -> None:
    """Wait for the next order in C code that keeps the GIL."""
    ctypes.PyDLL(None).poll(ctypes.byref(_PollFd(0, select.POLLIN, 0)), 1, int(seconds * 1000))


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def threads_now() -> int:
    """Return the number of threads, including those of C libraries."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def memory_now() -> int:
    """Return how many bytes of memory this process uses after a garbage collection."""
    gc.collect()
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Work:
    """The work done under a lock: read a counter, and write it with the token at the start and at the end."""

    def __init__(self, ledger: str, name: str, role: str, token: int) -> None:
        self._account = Account(ledger)
        self._name, self._role, self._token = name, role, token
        self._seen = self._account.read(name, token)

    def write(self) -> None:
        """Write the counter."""
        value = 0 if self._seen is None else self._seen + 1  # None means that a later holder has written
        taken = bool(value) and self._account.write(self._name, self._token, value) is not None
        note("wrote", now(), self._role, self._token, value, int(taken))
        if taken:
            self._seen = value

    def close(self) -> None:
        """Close the connection to the ledger."""
        self._account.close()
