"""Helpers of the unit tests: clients on a clock that the test moves, and a backend whose replies the test scripts."""

from __future__ import annotations

import contextlib
import gc
import opcode
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import multilock
from multilock import Capabilities, Client, Finding, Lease, LeaseState, LockInfo, Loss, LossReason, log_thread, system
from multilock.backend import Backend, Held, Notices
from multilock.config import settings_for
from multilock.errors import BackendUnavailable
from multilock.kernel.blocking import BlockingFace, Face, WaiterBell
from multilock.kernel.callbacks import Callbacks, ThreadCallbacks
from multilock.kernel.client import Kernel
from multilock.kernel.runtime import Runtime, Threads
from multilock.kernel.runtime import now as real_now
from multilock.model import Busy, Claim, Granted, Returned

__all__ = [
    "CAPABILITIES",
    "PRODUCT",
    "START_OF_A_THREAD",
    "Answer",
    "Call",
    "Losses",
    "Scripted",
    "Step",
    "StepFace",
    "client_on",
    "ctrl_c",
    "eventually",
    "executed_but_unanswered",
    "interrupted_at",
    "late",
    "our_threads",
    "refused",
    "silence",
    "state_of",
]

# the whole path, because the tests may be below a folder of the same name
PRODUCT = f"{Path(multilock.__file__).parent}/"
CAPABILITIES = Capabilities(
    fencing=True,
    fencing_scope="the test",
    fair=True,
    push_wait=True,
    push_loss=False,
    cross_host=False,
    survives_failover=False,
    ttl_min=0.1,
    ttl_max=3600.0,
    ttl_step=0.001,
    takeover_bound=30.0,
)


def client_on(
    backend: Backend, runtime: Runtime, face: Callable[[Kernel], Face] = BlockingFace, **options: Any
) -> Client:
    """Return a blocking client that uses the test's clock and threads."""
    client = Client.__new__(Client)
    client._kernel = Kernel(backend, settings_for(backend.scheme, options), runtime, face)
    client._scopes = threading.local()
    return client


def eventually(ready: Callable[[], object], within: float = 5.0) -> None:
    """Wait in real time until ``ready()`` is true."""
    until = time.monotonic() + within
    while not ready():
        assert time.monotonic() < until, f"the condition did not become true within {within:g} s"
        time.sleep(0.002)


START_OF_A_THREAD = "start_joinable_thread" if sys.version_info >= (3, 13) else "start_new_thread"


RESUME = opcode.opmap["RESUME"]  # the opcode at the beginning of a function, where CPython checks for signals


@contextlib.contextmanager
def ctrl_c(function: str, after: str | None = None) -> Iterator[None]:
    """Raise KeyboardInterrupt once where CPython could: as ``function`` begins in this thread or, with ``after``, when
    the C function ``after`` returns inside it."""
    event = "c_return" if after else "call"

    def profile(frame: FrameType, seen: str, argument: Any) -> None:
        if seen == event and frame.f_code.co_qualname == function and after in (None, getattr(argument, "__name__", 0)):
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield
    except KeyboardInterrupt:
        return
    finally:
        sys.setprofile(None)
    raise AssertionError(f"{function} was not come by")


def ctrl_c_now() -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def interrupted_at(
    step: int, function: str, within: str | None = None, *, interrupt: Callable[[], None] = ctrl_c_now
) -> Iterator[list[str]]:
    """Raise KeyboardInterrupt at the ``step``-th point at which CPython could raise it, counted from the call of
    ``function``.

    Such a point is the beginning of a function or the return of a C function. Points count in multilock and in all that
    it calls, even in the standard library. With ``within``, points count only in files whose path begins with it.
    Yields a list that receives the place of the interrupt, and stays empty if there are fewer points. Garbage
    collection is off meanwhile, so that no finalizer of an earlier client interferes. If ``interrupt`` is given, it is
    called at the point instead of raising KeyboardInterrupt.
    """
    left = step
    begun = False
    where: list[str] = []

    def called_by_ours(frame: FrameType | None) -> bool:
        if within is not None:
            return frame is not None and frame.f_code.co_filename.startswith(within)
        ours = False
        # a job that stands for another thread does not count
        while frame and frame.f_code.co_qualname != "HandRuntime._run_soon":
            ours = ours or frame.f_code.co_filename.startswith(PRODUCT)
            frame = frame.f_back
        return ours and frame is None

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left, begun
        if event not in ("call", "c_return") or not called_by_ours(frame):
            return
        if event == "call" and frame.f_code.co_code[frame.f_lasti] != RESUME:
            return  # no check for signals, because an exception enters here, as when a generator is closed
        begun = begun or frame.f_code.co_qualname == function
        if begun:
            if left == 0:
                sys.setprofile(None)
                where.append(f"{event} {frame.f_code.co_qualname}:{frame.f_lineno}")
                interrupt()
                return
            left -= 1

    gc.disable()
    sys.setprofile(profile)
    try:
        yield where
    finally:
        sys.setprofile(None)
        gc.enable()


def our_threads() -> set[threading.Thread]:
    """Return the threads of all clients. Other threads, such as the log's, come and go independently of a test."""
    threads = threading.enumerate()
    return {thread for thread in threads if thread.name.startswith("multilock-") and thread.name != log_thread.THREAD}


def state_of(lease: Lease) -> LeaseState:
    """Return the lease's state. A type checker would assume that an attribute keeps a value that was tested."""
    return lease.state


class Losses:
    """A lost callback that records the time, thread and argument of each call."""

    def __init__(self, runtime: Runtime | None = None) -> None:
        self._now = runtime.now if runtime else real_now
        self._changed = threading.Condition()
        self.calls: list[Loss] = []
        self.times: list[float] = []
        self.threads: list[threading.Thread] = []

    def __call__(self, loss: Loss) -> None:
        with self._changed:
            self.calls.append(loss)
            self.times.append(self._now())
            self.threads.append(threading.current_thread())
            self._changed.notify_all()

    @property
    def reasons(self) -> list[LossReason]:
        return [loss.reason for loss in self.calls]

    def wait(self, count: int = 1, within: float = 5.0) -> Loss:
        """Wait in real time for the ``count``-th call, and return its loss."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= count, within), f"called {len(self.calls)} times"
            return self.calls[count - 1]


@dataclass
class Call:
    """One request as the backend saw it. ``execute`` changes the store as a correct server would, and returns the
    reply."""

    method: str
    at: float
    within: float
    claims: tuple[Claim, ...]
    details: dict[str, Any]
    execute: Callable[[], Any] = field(repr=False)


Answer = Callable[["Scripted", Call], Any]


def silence(seconds: float | None = None, *, unknown: bool = True) -> Answer:
    """Do not execute the request, and fail after ``seconds``. None means the whole time that the caller allows."""

    def answer(backend: Scripted, call: Call) -> Any:
        backend.pass_time(call.within if seconds is None else min(seconds, call.within))
        raise BackendUnavailable("the test keeps silent", unknown=unknown)

    return answer


def executed_but_unanswered(backend: Scripted, call: Call) -> Any:
    """Execute the request, but lose its reply."""
    call.execute()
    backend.pass_time(call.within)
    raise BackendUnavailable("the reply was lost")


def late(seconds: float) -> Answer:
    """Execute the request at once, but reply after ``seconds``, however long the caller allows."""

    def answer(backend: Scripted, call: Call) -> Any:
        result = call.execute()
        backend.pass_time(seconds)
        return result

    return answer


def refused(error: BaseException) -> Answer:
    def answer(backend: Scripted, call: Call) -> Any:
        raise error

    return answer


class Scripted:
    """A backend that keeps its data in memory. It replies correctly until the test scripts the next replies of a
    method.

    With ``sessions=True`` all its claims belong to one session, which it reports with `Notices.group`. A renewal of the
    session renews them all.
    """

    scheme = "scripted"
    spi_version = 1

    def __init__(self, runtime: Runtime | None = None, *, sessions: bool = False, **capabilities: Any) -> None:
        self.runtime: Runtime = runtime or Threads()
        self.capabilities = replace(CAPABILITIES, **capabilities)
        self.calls: list[Call] = []
        self.holders: dict[str, str] = {}  # by name: the id of the holder's claim, or a text that a test sets
        self.queues: dict[str, list[str]] = defaultdict(list)
        self.cancelled: set[str] = set()
        self.heartbeat = 1.0
        self.valid_for: float | None = None
        self.closed = 0
        self.opened = 0
        self._tokens = 0
        self._sessions = sessions
        self._session_proof: dict[Hashable, float] = {}
        self._scripts: dict[str, deque[Answer]] = defaultdict(deque)
        self._always: dict[str, Answer] = {}

    # The methods that the test uses

    def script(self, method: str, *answers: Answer) -> None:
        """Reply to the next calls of ``method`` with ``answers``, one answer to each call."""
        self._scripts[method].extend(answers)

    def always(self, method: str, answer: Answer | None) -> None:
        """Reply to every call of ``method`` with this answer from now on. None makes the method behave correctly
        again."""
        if answer is None:
            self._always.pop(method, None)
        else:
            self._always[method] = answer

    def pass_time(self, seconds: float) -> None:
        self.runtime.event().wait(seconds)

    def called(self, method: str) -> list[Call]:
        return [call for call in self.calls if call.method == method]

    def released(self) -> set[str]:
        return {call.claims[0].id for call in self.called("release")}

    # The methods that the kernel uses

    def open(self, notices: Notices) -> None:
        self.opened += 1
        self.notices = notices
        self._session_proof.clear()

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        answer: Granted | Busy = self._ask("attempt", within, (claim,), lambda: self._attempt(claim, join), join=join)
        return answer

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        answer: Returned = self._ask(
            "release", within, (claim,), lambda: self._release(claim, unsure), granted=granted, unsure=unsure
        )
        return answer

    def renew(
        self, group: Hashable, held: Sequence[Held], within: float
    ) -> Sequence[Granted | BackendUnavailable | None]:
        claims = tuple(claim for claim, _ in held)
        answer: Sequence[Granted | BackendUnavailable | None] = self._ask(
            "renew", within, claims, lambda: self._renew(group, held), group=group
        )
        return answer

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        self._ask("watch", within, tuple(claim for claim, _ in held), lambda: None, group=group)

    def follow(self, names: frozenset[str], within: float) -> bool:
        answer: bool = self._ask("follow", within, (), lambda: self.capabilities.push_wait, names=names)
        return answer

    def inspect(self, name: str, within: float) -> LockInfo | None:
        answer: LockInfo | None = self._ask("inspect", within, (), lambda: self._inspect(name), name=name)
        return answer

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        return (info for name in sorted(self.holders) if name.startswith(prefix) and (info := self._inspect(name)))

    def force_release(self, name: str, within: float) -> bool:
        return self.holders.pop(name, None) is not None

    def diagnose(self, within: float) -> list[Finding]:
        return []

    def ping(self, within: float) -> None:
        self._ask("ping", within, (), lambda: None)

    def close(self) -> None:
        self.closed += 1

    def _ask(
        self, method: str, within: float, claims: tuple[Claim, ...], execute: Callable[[], Any], **details: Any
    ) -> Any:
        call = Call(method, self.runtime.now(), within, claims, details, execute)
        self.calls.append(call)
        answers = self._scripts[method]
        answer = answers.popleft() if answers else self._always.get(method)
        return answer(self, call) if answer else execute()

    # The server

    def _attempt(self, claim: Claim, join: bool) -> Granted | Busy:
        holder = self.holders.get(claim.name)
        if claim.id in self.cancelled or holder not in (None, claim.id):
            if join and claim.id not in self.cancelled and claim.id not in self.queues[claim.name]:
                self.queues[claim.name].append(claim.id)
            return Busy(self.heartbeat)
        if holder is None:
            self._tokens += 1
            self.holders[claim.name] = claim.id
        if claim.id in self.queues[claim.name]:
            self.queues[claim.name].remove(claim.id)
        return self._granted(claim, self._tokens)

    def _granted(self, claim: Claim, token: int | None) -> Granted:
        now = self.runtime.now()
        every = claim.ttl / 3
        if not self._sessions:
            return Granted(token, claim.ttl, now, self.valid_for or claim.ttl, every, "server")
        group = ("session", claim.ttl)
        if group not in self._session_proof:
            self._session_proof[group] = now
            self.notices.group(group, claim.ttl, every)
        return Granted(token, claim.ttl, self._session_proof[group], claim.ttl, every, group)

    def _release(self, claim: Claim, unsure: bool) -> Returned:
        if unsure:
            self.cancelled.add(claim.id)
        if claim.id in self.queues[claim.name]:
            self.queues[claim.name].remove(claim.id)
        if self.holders.get(claim.name) != claim.id:
            return Returned(False)
        del self.holders[claim.name]
        if self.queues[claim.name]:
            self.notices.wake(self.queues[claim.name][0])
        return Returned(True)

    def _renew(self, group: Hashable, held: Sequence[Held]) -> list[Granted | None]:
        if self._sessions:
            self._session_proof[group] = self.runtime.now()
        return [
            self._granted(claim, granted.token) if self.holders.get(claim.name) == claim.id else None
            for claim, granted in held
        ]

    def _inspect(self, name: str) -> LockInfo | None:
        holder = self.holders.get(name)
        return LockInfo(name, "lock", owner=holder, identity=holder, token=self._tokens) if holder else None


class _Point:
    """The point at which a coroutine on a `StepFace` is suspended, and the condition under which it may continue."""

    def __init__(self, ready: Callable[[], bool] = lambda: True) -> None:
        self.ready = ready

    def __await__(self) -> Generator[_Point, None, None]:
        yield self


class StepFace:
    """A substitute for the blocking and asyncio faces of the kernel. Its coroutines stop at every await until the test
    lets them continue, so that many run in one thread."""

    asynchronous = False

    def __init__(self, kernel: Kernel) -> None:
        self._backend = kernel.backend
        self._runtime = kernel.runtime
        self.callbacks: Callbacks = ThreadCallbacks(kernel.runtime, kernel.timers)

    async def attempt(self, claim: Claim, join: bool, within: float) -> Any:
        return await self.ask(within, self._backend.attempt, claim, join)

    async def release(self, claim: Claim, granted: Granted, unsure: bool, within: float) -> Any:
        return await self.ask(within, self._backend.release, claim, granted, unsure)

    async def ask(self, within: float, call: Callable[..., Any], *args: Any) -> Any:
        await _Point()
        try:
            return call(*args, within)
        finally:
            await _Point()

    def bell(self) -> WaiterBell:
        return _StepBell(self._runtime)

    def abandoned(self) -> Sequence[str]:
        return ()

    def forget_closed_loop(self) -> None:
        pass

    def close(self) -> None:
        pass


class _StepBell:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._rung = False

    def ring(self) -> None:
        self._rung = True

    async def wait(self, seconds: float) -> None:
        until = self._runtime.now() + seconds
        await _Point(lambda: self._rung or self._runtime.now() >= until)
        self._rung = False


class Step:
    """A coroutine on a `StepFace`, which the test advances."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._point: _Point | None = None
        self._done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._go(lambda: coroutine.send(None))

    def done(self) -> bool:
        return self._done

    def on(self) -> bool:
        """Advance to the next await. Returns False if the coroutine is done or must wait."""
        if self._done or not (self._point and self._point.ready()):
            return False
        self._go(lambda: self._coroutine.send(None))
        return True

    def cancel(self, error: BaseException) -> None:
        """Raise ``error`` at the point where the coroutine is suspended."""
        self._go(lambda: self._coroutine.throw(error))

    def _go(self, resume: Callable[[], _Point]) -> None:
        try:
            self._point = resume()
        except StopIteration as stop:
            self._done, self.result, self._point = True, stop.value, None
        except BaseException as error:
            self._done, self.error, self._point = True, error, None


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Make thread starts fail. In the returned dict the test sets, for each thread name, how many more starts fail."""
    refusals: dict[str, int] = {}
    real = system.Thread

    class Refused(real):  # type: ignore[valid-type, misc]
        def start(self) -> None:
            if refusals.get(self.name, 0):
                refusals[self.name] -= 1
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(system, "Thread", Refused)
    return refusals
