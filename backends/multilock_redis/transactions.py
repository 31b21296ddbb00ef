"""The Lua scripts.

A script is called by its hash. If the server does not have the script, the script is loaded first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from multilock import BackendUnavailable
from multilock.timing import LIVENESS_MAX
from multilock_redis.connections import Connections
from multilock_redis.transport import Answer
from multilock_redis.wire import ScriptMissing, Unclear, bulks, doubted, pack

__all__ = [
    "ACQUIRE",
    "CLOCKS_WITHIN",
    "FORCE",
    "GIVE",
    "INSPECT",
    "RELEASE",
    "RENEW",
    "RENEW_SHARED",
    "REST",
    "SHARE",
    "STAND",
    "Exchange",
    "Script",
    "Transactions",
]

# Seconds for which the server keeps a queue after the last request to it. A waiter's place ends sooner.
QUEUE_KEPT = 60.0
TOKEN_KEPT = 600.0  # seconds for which the server keeps the last token of a name after its last lease
CLOCKS_WITHIN = 1.0  # seconds by which a client's clock may be wrong; a greater difference is reduced to this
_NUMBERS = {  # the constants at the beginning of every script
    "LIVENESS_MAX": LIVENESS_MAX,
    "QUEUE_KEPT": QUEUE_KEPT,
    "TOKEN_KEPT": TOKEN_KEPT,
    "CLOCKS_WITHIN": CLOCKS_WITHIN,
}
_HEAD = "".join(f"local {name} = {1000 * seconds:.0f} -- ms\n" for name, seconds in _NUMBERS.items())

Exchange = Callable[[Sequence[bytes], float], list[Answer]]


class Script:
    """One Lua script, called by its hash."""

    def __init__(self, *files: str, words: int, keys: int) -> None:
        text = _HEAD + "\n".join(
            (Path(__file__).parent / "scripts" / file).read_text(encoding="utf-8") for file in files
        )
        self.load = pack("SCRIPT", "LOAD", text)
        self._sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.head = self.head_for(words, keys)

    def head_for(self, words: int, keys: int) -> bytes:
        """Return the beginning of a call with ``keys`` keys, and ``words`` keys and arguments in all."""
        return b"*%d\r\n%b" % (3 + words, bulks(b"EVALSHA", self._sha.encode(), b"%d" % keys))


ACQUIRE = Script("token.lua", "acquire_free.lua", "queue.lua", "acquire.lua", words=11, keys=6)
SHARE = Script("token.lua", "queue.lua", "share.lua", words=11, keys=6)
RELEASE = Script("token.lua", "release_alone.lua", "queue.lua", "release.lua", words=8, keys=6)
REST = Script("token.lua", "queue.lua", "rest.lua", words=10, keys=6)
FORCE = Script("token.lua", "queue.lua", "force.lua", words=7, keys=5)
INSPECT = Script("inspect.lua", words=6, keys=5)
# The scripts of a lock on several servers (Redlock):
STAND = Script("stamp.lua", "stand_free.lua", "queue.lua", "stand.lua", words=14, keys=6)
GIVE = Script("stamp.lua", "release_alone.lua", "queue.lua", "release.lua", words=9, keys=6)
RENEW = Script("renew.lua", words=0, keys=0)
RENEW_SHARED = Script("renew_shared.lua", words=0, keys=0)


class Transactions:
    """Calls of the scripts over the connections to one server."""

    def __init__(self, connections: Connections, now: Callable[[], float]) -> None:
        self.connections = connections
        self.now = now

    def run(self, script: Script, request: bytes, within: float) -> Answer:
        """Call one script. Returns the reply, and the time at which the call was sent. Loads the script if the server
        lacks it."""
        deadline = self.now() + within
        try:
            return self.connections.call(request, within)
        except ScriptMissing:
            return _checked(self._load_and_run([script], [request], self.connections.exchange, deadline))[0]
        except Unclear as error:
            raise doubted(error) from error

    def run_all(
        self, scripts: Collection[Script], requests: Sequence[bytes], exchange: Exchange, within: float
    ) -> list[Answer]:
        """Send these requests in one round trip, or in two if the server lacks a script. ``scripts`` are all scripts
        that the requests call."""
        return _checked(self.run_each(scripts, requests, exchange, within))

    def run_each(
        self, scripts: Collection[Script], requests: Sequence[bytes], exchange: Exchange, within: float
    ) -> list[Answer]:
        """Like `run_all`, but return a script's error in place of its reply."""
        deadline = self.now() + within
        answers = exchange(requests, within)
        if any(isinstance(answer, ScriptMissing) for answer, _ in answers):
            return self._load_and_run(scripts, requests, exchange, deadline)
        return _clear(answers)

    def _load_and_run(
        self, scripts: Collection[Script], requests: Sequence[bytes], exchange: Exchange, deadline: float
    ) -> list[Answer]:
        """Load the scripts and repeat the requests, in one round trip. Each reply comes with the time of the repeated
        request."""
        loads = [script.load for script in scripts]
        answers = exchange([*loads, *requests], deadline - self.now())
        answers = _clear(answers)
        _checked(answers[: len(loads)])
        # If a script is missing again, a program has flushed the scripts twice.
        forgot = BackendUnavailable("the server forgot the script that it had just loaded", unknown=False)
        return [(forgot if isinstance(it, ScriptMissing) else it, at) for it, at in answers[len(loads) :]]


def _clear(answers: list[Answer]) -> list[Answer]:
    return [(doubted(it) if isinstance(it, Unclear) else it, at) for it, at in answers]


def _checked(answers: list[Answer]) -> list[Answer]:
    for answer, _ in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers
