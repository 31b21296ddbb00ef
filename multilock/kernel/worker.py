"""`Worker`: a supervised thread. This is the only file that starts threads.

The operating system may refuse a thread (a limit of the container, no memory), and a thread may die of a defect of
multilock. Neither may cause the loss of a lock. The ticking thread of each client retries a start that was refused. A
thread that died begins again. `Client.is_healthy` and `Client.diagnose` report refused and dead threads.
"""

from __future__ import annotations

from collections.abc import Callable

from multilock import system
from multilock.timing import LONGEST_IN_BACKGROUND, retry_pause

__all__ = [
    "SOON",
    "Worker",
    "begin_thread",
    "forget",
    "helpers",
    "is_any_missing",
    "start_worker",
    "troubles",
    "try_again",
]

SOON = 0.1  # seconds between two attempts to start a refused thread

helpers: dict[object, Callable[[], None]] = {}
"""The ticking threads, each with a function that wakes it. They call `try_again` until no thread is missing."""

_missing: dict[Worker, str] = {}  # workers without a running thread, each with the reason
_deaths: dict[str, tuple[int, str]] = {}  # by thread name: the number of deaths, and the first error


def start_worker(run: Callable[[], object], name: str, *, once: bool = False, or_here: bool = False) -> Worker:
    """Run ``run()`` on a new daemon thread, now or as soon as the operating system grants a thread.

    If ``run`` raises, the error is logged once for each thread name, and ``run`` begins again after a pause. ``run``
    must check its own closed flag, because it also begins again after its owner was closed. If ``once`` is True,
    ``run`` does not begin again. ``or_here`` is for a short job whose caller waits for it. Such a job runs in the
    calling thread if a thread is refused while the interpreter is exiting, or while no ticking thread would try again.

    A refused thread raises no error. If this call is interrupted, the caller gets the interrupt, and ``run`` begins
    nevertheless.
    """
    worker = Worker(run, name, once, or_here)
    worker.begin()
    return worker


def begin_thread(run: Callable[[], object], name: str) -> str | None:
    """Start a thread without supervision. Returns the reason if it is refused, otherwise None.

    Outside this file only `TickingThread` uses this, because its callers try again themselves.
    """
    try:
        system.Thread(target=run, name=name, daemon=True).start()
    except RecursionError:
        raise
    except (RuntimeError, MemoryError) as error:
        return str(error) or type(error).__name__
    return None


class Worker:
    """One supervised thread. `start_worker` makes it."""

    __slots__ = ("_ended", "_left", "_once", "_or_here", "_run", "name")

    def __init__(self, run: Callable[[], object], name: str, once: bool, or_here: bool) -> None:
        self.name = name
        self._run = run
        self._once = once
        self._or_here = or_here
        self._ended = system.Event()
        # Emptied by the first thread that begins, because after an interrupted start there may be two threads.
        self._left = [None]

    @property
    def missing(self) -> bool:
        """Whether the thread was refused until now, or has died and has not begun again."""
        return self in _missing

    def is_alive(self) -> bool:
        """Return whether ``run`` has not ended yet. True also before the thread has started."""
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        """Wait until ``run`` has returned, at most ``timeout`` seconds."""
        self._ended.wait(timeout)

    def begin(self) -> bool:
        """Start the thread. Returns False if it is refused: `try_again` then calls this again."""
        try:
            refusal = begin_thread(self._main, self.name)
        except BaseException:  # interrupted: the thread may or may not run
            self._is_missing("its start was interrupted")
            self._call_for_help()
            raise
        if refusal is None:
            return True
        if self._or_here and ("shutdown" in refusal or not helpers):
            self._main()
            return True
        if self._is_missing(refusal) and "shutdown" not in refusal:
            _log("no thread for %s yet: %s", self.name, refusal)
            self._call_for_help()
        return False

    def _is_missing(self, why: str) -> bool:
        """Record why the thread does not run. Returns True the first time. Removes the record again if another ticking
        thread has started the thread meanwhile."""
        first = self not in _missing
        _missing[self] = why
        if not self._left:
            _missing.pop(self, None)
        return first

    def _call_for_help(self) -> None:
        for wake in list(helpers.values()):
            wake()

    def _main(self) -> None:
        try:
            self._left.pop()
        except IndexError:
            return
        finally:
            _missing.pop(self, None)
        deaths = 0
        while True:
            try:
                self._run()
                break
            except BaseException as error:  # including SystemExit, because no user code may end a thread of multilock
                self._died(error)
                if self._once:
                    break
            _missing[self] = "it died of a defect"
            deaths += 1
            system.sleep(retry_pause(deaths, LONGEST_IN_BACKGROUND))
            _missing.pop(self, None)
        self._ended.set()

    def _died(self, error: BaseException) -> None:
        times, first = _deaths.get(self.name, (0, f"{type(error).__name__}: {error}"))
        _deaths[self.name] = (times + 1, first)
        if not times:
            ending = "it is not run again" if self._once else "it begins again"
            _log("the thread %s died of a defect of multilock; %s", self.name, ending, error=error)


def try_again() -> bool:
    """Start refused threads again. Returns whether a thread is still missing. Called by the ticking threads."""
    for worker in list(_missing):
        if worker._left and not worker.begin():
            return True
    return any(worker._left for worker in list(_missing))


def is_any_missing() -> bool:
    """Return whether any thread of multilock is missing in this process."""
    return bool(_missing)


def troubles() -> list[str]:
    """Return a sentence for each thread that is missing, or has died."""
    missing = [f"the thread {worker.name} does not run: {reason}" for worker, reason in list(_missing.items())]
    died = [f"the thread {name} died {times} times, first of {first}" for name, (times, first) in list(_deaths.items())]
    return missing + died


def _log(message: str, *args: object, error: BaseException | None = None) -> None:
    from multilock.log_thread import logger  # imported here, because the module of the log imports this one

    logger.error(message, *args, exc_info=error)


def forget() -> None:
    """Forget all threads in a forked child, which has none of them."""
    helpers.clear()
    _missing.clear()
    _deaths.clear()
