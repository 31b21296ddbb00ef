"""Both faces of the API (blocking and asyncio) with the blocking interface, so that one test body tests both.

For asyncio, a loop runs in its own thread. Each thread of the test has one task on that loop, which makes all calls of
this thread. So a lease that belongs to "this thread" in the blocking face belongs to "this task" in the asyncio face.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar, cast

from multilock import Client
from multilock.aio import AsyncClient
from multilock.backend import Backend
from multilock.kernel.holding import AnyHeld

__all__ = ["FACES", "AsyncioFace", "BlockingFace", "Face", "background"]

T = TypeVar("T")


class Face(Protocol):
    """The methods by which a test uses the blocking or the asyncio API."""

    name: str

    def client(self, backend: Backend, **options: Any) -> Client:
        """Return a client of this face, with blocking methods."""

    def wrap(self, value: Any) -> Any:
        """Return the argument of a callback, with the blocking interface."""

    def function(self, body: Callable[..., T], *, blocks: bool = False) -> Callable[..., Any]:
        """Return a function for this face's decorator and ``run()``: ``body``, or a coroutine function that calls it.

        If ``blocks`` is True, the coroutine function calls ``body`` in a thread.
        """

    def is_callback_thread(self, ident: int) -> bool:
        """Return whether a callback may run in this thread. A callback may run in the loop's thread, and in any thread
        that does no work of the library."""

    def close(self) -> None:
        """End the face."""


class BlockingFace:
    """The blocking face."""

    name = "blocking"

    def client(self, backend: Backend, **options: Any) -> Client:
        """Return a client."""
        return Client(backend, **options)

    def wrap(self, value: Any) -> Any:
        """Return ``value``."""
        return value

    def function(self, body: Callable[..., T], *, blocks: bool = False) -> Callable[..., Any]:
        """Return ``body``."""
        return body

    def is_callback_thread(self, ident: int) -> bool:
        """Return whether the thread ``ident`` has ended, or is a thread for callbacks."""
        return all(each.ident != ident or each.name == "multilock-callback" for each in threading.enumerate())

    def close(self) -> None:
        """Do nothing."""


class AsyncioFace:
    """The asyncio face, with a loop in its own thread."""

    name = "asyncio"

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop) -> None:
        self.loop = new_loop()
        self._tasks = threading.local()
        self._all_tasks: list[_Task] = []
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-loop", daemon=True)
        self._thread.start()

    def client(self, backend: Backend, **options: Any) -> Client:
        """Return an asyncio client with blocking methods."""
        return cast("Client", _Mirror(self, AsyncClient(backend, **options)))

    def wrap(self, value: Any) -> Any:
        """Return ``value`` with the blocking interface."""
        if hasattr(value, "__anext__"):
            return self._iterate(value)
        if isinstance(value, AnyHeld) or type(value).__module__.startswith("multilock.aio"):
            return _Mirror(self, value)
        if callable(value) and not isinstance(value, type):
            return lambda *args, **kwargs: self.call(lambda: value(*args, **kwargs))
        return value

    def function(self, body: Callable[..., T], *, blocks: bool = False) -> Callable[..., Any]:
        """Return a coroutine function that calls ``body``."""

        @functools.wraps(body)
        async def function(*args: Any, **kwargs: Any) -> T:
            wrapped = [self.wrap(value) for value in args]
            if blocks:
                return await asyncio.to_thread(body, *wrapped, **kwargs)
            return body(*wrapped, **kwargs)

        return function

    def is_callback_thread(self, ident: int) -> bool:
        """Return whether ``ident`` is the thread of the loop, where asyncio callbacks run."""
        return ident == self._thread.ident

    def run(self, coroutine: Coroutine[Any, Any, T], within: float = 30.0) -> T:
        """Run a coroutine of the test as a task of the loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(within)

    def call(self, call: Callable[[], Any]) -> Any:
        """Return the result of ``call()``, awaited if needed, in the task that runs the calls of this test thread."""
        if threading.current_thread() is self._thread:
            return self.wrap(call())
        return self.wrap(self.task().do(call))

    def task(self) -> _Task:
        """Return the task that runs the calls of this test thread on the loop."""
        try:
            task: _Task = self._tasks.task
        except AttributeError:
            task = self._tasks.task = _Task(self.loop)
            self._all_tasks.append(task)
        return task

    def close(self) -> None:
        """Cancel the tasks that are left on the loop, and end the loop."""

        async def end_all() -> None:
            for task in self._all_tasks:
                task.end()
            await asyncio.sleep(0)
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for left in rest:
                left.cancel()
            if rest:
                await asyncio.wait(rest, timeout=1.0)

        self.run(end_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        while True:
            try:
                yield self.call(lambda: anext(source))
            except StopAsyncIteration:
                return


FACES: dict[str, Callable[[], Face]] = {"blocking": BlockingFace, "asyncio": AsyncioFace}


class _Task:
    """A task of the loop that does the jobs of one thread of the test, one after another."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: asyncio.Queue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None] = asyncio.Queue()
        self.cancelled = False  # whether the body of an `async with` was cancelled between two jobs
        asyncio.run_coroutine_threadsafe(self._main(), loop)

    def do(self, call: Callable[[], Any]) -> Any:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._jobs.put_nowait, (call, answer))
        return answer.result()

    def end(self) -> None:
        """End the task. Called on the loop after the last job."""
        self._jobs.put_nowait(None)

    async def _main(self) -> None:
        while True:
            try:
                job = await self._jobs.get()
            except asyncio.CancelledError:  # the lease of an open `async with` was lost
                self.cancelled = True
                continue
            if job is None:
                return
            call, answer = job
            try:
                result = call()
                answer.set_result(await result if hasattr(result, "__await__") and not _is_plain(result) else result)
            except BaseException as error:
                answer.set_exception(error)


def _is_plain(value: object) -> bool:
    """Return whether the value must not be awaited. An AsyncClient can be awaited, but need not be."""
    return isinstance(value, AsyncClient)


class _Mirror:
    """Wrap an object of the asyncio API, so that a test can use it like one of the blocking API."""

    def __init__(self, face: AsyncioFace, target: Any) -> None:
        self._face = face
        self._target = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return self._face.wrap(value)
        return lambda *args, **kwargs: self._face.call(lambda: value(*args, **kwargs))

    def __enter__(self) -> Any:
        return self._face.call(self._target.__aenter__)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        task = self._face.task()
        if task.cancelled and error is None:  # the body runs in a thread, where nothing raised the task's cancellation
            error = asyncio.CancelledError()
            kind = type(error)
        task.cancelled = False
        return self._face.call(lambda: self._target.__aexit__(kind, error, trace))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mirror) and other._target is self._target

    def __hash__(self) -> int:
        return id(self._target)

    def __repr__(self) -> str:
        return repr(self._target)


def background(call: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Call ``call()`` in a thread of its own (asyncio: a task of its own). Wait for it with ``result(within)``."""
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="test-background", daemon=True).start()
    return answer
