"""One test body for both faces: what a test sees is always the blocking interface.

Under asyncio a loop runs in a thread of its own. Each thread of the test is one task of that loop, so that what belongs
to "this thread" in the blocking face belongs to "this task" there.
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
    """How a test uses one face of the library."""

    name: str

    def client(self, backend: Backend, **options: Any) -> Client:
        """A client of this face; in a test it behaves like the blocking one."""

    def wrap(self, value: Any) -> Any:
        """What a callback was given, with the blocking interface."""

    def function(self, body: Callable[..., T], *, blocks: bool = False) -> Callable[..., Any]:
        """What this face's decorator and ``run()`` take: ``body``, or a coroutine function that calls it; in a thread
        if it ``blocks``."""

    def is_callback_thread(self, ident: int) -> bool:
        """Whether a callback may run there: on the loop, or off every thread of the library's own work."""

    def close(self) -> None: ...


class BlockingFace:
    name = "blocking"

    def client(self, backend: Backend, **options: Any) -> Client:
        return Client(backend, **options)

    def wrap(self, value: Any) -> Any:
        return value

    def function(self, body: Callable[..., T], *, blocks: bool = False) -> Callable[..., Any]:
        return body

    def is_callback_thread(self, ident: int) -> bool:
        return all(each.ident != ident or each.name == "multilock-callback" for each in threading.enumerate())

    def close(self) -> None:
        pass


class AsyncioFace:
    name = "asyncio"

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop) -> None:
        self.loop = new_loop()
        self._tasks = threading.local()
        self._all_tasks: list[_Task] = []
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-loop", daemon=True)
        self._thread.start()

    def client(self, backend: Backend, **options: Any) -> Client:
        return cast("Client", _Mirror(self, AsyncClient(backend, **options)))

    def wrap(self, value: Any) -> Any:
        if hasattr(value, "__anext__"):
            return self._iterate(value)
        if isinstance(value, AnyHeld) or type(value).__module__.startswith("multilock.aio"):
            return _Mirror(self, value)
        if callable(value) and not isinstance(value, type):
            return lambda *args, **kwargs: self.call(lambda: value(*args, **kwargs))
        return value

    def function(self, body: Callable[..., T], *, blocks: bool = False) -> Callable[..., Any]:
        @functools.wraps(body)
        async def function(*args: Any, **kwargs: Any) -> T:
            wrapped = [self.wrap(value) for value in args]
            if blocks:
                return await asyncio.to_thread(body, *wrapped, **kwargs)
            return body(*wrapped, **kwargs)

        return function

    def is_callback_thread(self, ident: int) -> bool:
        return ident == self._thread.ident

    def run(self, coroutine: Coroutine[Any, Any, T], within: float = 30.0) -> T:
        """A coroutine of a test's own, as a task of the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(within)

    def call(self, call: Callable[[], Any]) -> Any:
        """``call()``, awaited if need be, in the task that stands for this thread."""
        if threading.current_thread() is self._thread:
            return self.wrap(call())
        return self.wrap(self.task().do(call))

    def task(self) -> _Task:
        try:
            task: _Task = self._tasks.task
        except AttributeError:
            task = self._tasks.task = _Task(self.loop)
            self._all_tasks.append(task)
        return task

    def close(self) -> None:
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
    """A task of the loop that does, one after another, what one thread of the test asks for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: asyncio.Queue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None] = asyncio.Queue()
        self.cancelled = False  # between two jobs: the body of an `async with` was, if there is one
        asyncio.run_coroutine_threadsafe(self._main(), loop)

    def do(self, call: Callable[[], Any]) -> Any:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._jobs.put_nowait, (call, answer))
        return answer.result()

    def end(self) -> None:
        """On the loop, when nobody asks any more."""
        self._jobs.put_nowait(None)

    async def _main(self) -> None:
        while True:
            try:
                job = await self._jobs.get()
            except asyncio.CancelledError:  # the lease of an `async with` that is open was lost
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
    """An AsyncClient may be awaited, and need not be."""
    return isinstance(value, AsyncClient)


class _Mirror:
    """An object of the asyncio face with the blocking interface."""

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
        if task.cancelled and error is None:  # the body was cancelled in the middle, which a thread cannot be
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
    """``call()`` in a thread of its own (asyncio: a task of its own); the answer has ``result(within)``."""
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="test-background", daemon=True).start()
    return answer
