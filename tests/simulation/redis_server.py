"""A simulated Redis: the commands of `redis_store`, real Lua scripts, RESP, pushes and the tracking of keys.

Lua 5.1 runs the product's own scripts, as in Redis. `test_redis_model` compares the simulated server with a real one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lupa.lua51 import LuaRuntime

import multilock_redis
from multilock_redis import transactions
from multilock_redis.keys import Keyspace
from multilock_redis.redlock import RedlockBackend
from multilock_redis.transport import Endpoint
from tests.simulation.network import Network, Socket
from tests.simulation.redis_store import Refused, Reply, Sorted, Status, Store
from tests.simulation.scheduler import Simulation
from tests.simulation.server import PREFIX, Server, Simulated

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["LATER", "SIMULATED", "Client", "Connection", "Link", "RedisServer", "claim_of", "encoded", "settings_of"]

GUARD = 10.0  # seconds: `restart_guard`, as long as the longest ttl of a plan

ASKS = {transactions.ACQUIRE._sha, transactions.SHARE._sha}
FULL = 5  # the number of keys of a script that may give a name to a claim
INVALIDATED = "__redis__:invalidate"
CONNECTION = {"client", "subscribe", "ping"}  # commands that concern the connection
# returned instead of a reply if the server replies later, and only then executes the commands that follow
LATER = Status("LATER")

_lua = LuaRuntime(encoding="latin-1", unpack_returned_tuples=True)
_table: Callable[[Any], Any] = _lua.table_from
_compile = _lua.eval("""
function(text)
  local script, error_text = loadstring('return function(KEYS, ARGV, redis) ' .. text .. '\\nend')
  return script and script() or error(error_text)
end""")
# Numbers become text as in Redis. An error of redis.call ends the script, and an error of redis.pcall is returned.
_runner = _lua.eval("""
function(execute)
  local function pcall_(...)
    local given, count = {...}, select('#', ...)
    for i = 1, count do
      if type(given[i]) == 'number' then given[i] = string.format('%.17g', given[i]) end
    end
    return execute(unpack(given, 1, count))
  end
  local function call(...)
    local reply = pcall_(...)
    if type(reply) == 'table' and reply.err then error(reply, 0) end
    return reply
  end
  local redis = {call = call, pcall = pcall_}
  return function(script, count, ...)
    local KEYS = {...}
    local ARGV = {select(count + 1, ...)}
    for i = #KEYS, count + 1, -1 do KEYS[i] = nil end
    local ok, reply = pcall(script, KEYS, ARGV, redis)
    if ok or type(reply) == 'table' then return reply end
    return {err = 'ERR script: ' .. tostring(reply)}
  end
end""")
_compiled: dict[str, Any] = {}
_calls: dict[str, Any] = {}  # the commands of the server that executes a script, because Lua must not refer to servers


def _execute(name: str, *words: str) -> Any:
    call = _calls.get(name)
    try:
        reply = call(*words) if call else unknown(name)
    except Refused as refused:
        reply = refused
    return reply if type(reply) in (str, int) else _to_lua(reply)


_run = _runner(_execute)


def unknown(name: str) -> Reply:
    raise Refused(f"ERR unknown command '{name}'")


def _to_lua(reply: Reply | Refused) -> Any:
    if reply is None:
        return False
    if isinstance(reply, Refused):
        return _table({"err": str(reply)})
    if isinstance(reply, Status):
        return _table({"ok": str(reply)})
    return _table([_to_lua(each) for each in reply]) if isinstance(reply, list) else reply


def _of_lua(reply: Any) -> Reply:
    if type(reply) in (int, str):
        return reply
    if reply is None or reply is False:
        return None
    if isinstance(reply, bool | float):
        return int(reply)
    if reply["err"]:
        raise Refused(reply["err"])
    if reply["ok"]:
        return Status(reply["ok"])
    items: list[Reply] = []
    while (item := reply[len(items) + 1]) is not None:
        items.append(_of_lua(item))
    return items


class Link(Protocol):
    """The connection back to a client."""

    def deliver(self, data: bytes) -> None:
        """Send bytes to the client."""

    def reset(self) -> None:
        """Break the connection."""


class Client:
    """The server's end of one connection."""

    def __init__(self, number: int, link: Link, run: int) -> None:
        self.number = number
        self.link = link
        self.run = run  # the number of the server's run in which this connection was made
        self.channels: set[str] = set()
        self.redirect = 0  # the connection that is notified of changes of tracked keys, or 0 if no keys are tracked
        self.caching = False  # whether the keys of the present command are tracked
        self.caches_next = False
        self.asks = False  # in a cluster, whether the client has just sent ASKING
        self.written = 0  # the number of changes of a replicating server after the client's last command
        self.rest: bytes | None = None  # the commands that arrived after a command that the server answers later


class RedisServer(Server):
    """A Redis server. Without ``sim`` no key expires by itself."""

    def __init__(self, name: str, sim: Simulation | None, clock: Callable[[], int], seed: object) -> None:
        super().__init__(name, sim, clock, seed)
        self._by: Client | None = None  # the client whose command runs
        self._numbers = 0
        self._pushes: list[tuple[Client, bytes]] = []
        self._begin(forgets=True)

    def _begin(self, *, forgets: bool) -> None:
        if forgets:
            self.store = Store(self._touched)
            self.store.on_end = self._plan_end
            self._calls = {
                name.partition("do_")[2].upper(): getattr(holder, name)
                for holder in (self.store, self)
                for name in dir(holder)
                if name.startswith(("do_", "_do_"))
            }
        self.scripts: dict[str, Any] = {}
        self.clients: dict[int, Client] = {}
        self._tracked: dict[str, set[int]] = {}
        self._looks: dict[str, int] = {}  # key -> the time of its expiry for which a check is planned

    def micros(self) -> int:
        """Read and store the server's time in microseconds. Later commands use the stored time, because reading it
        takes long."""
        self._micros = micros = super().micros()
        self.store.now = micros // 1000
        return micros

    # Commands

    def execute(self, client: Client, words: list[str]) -> Reply | Refused:
        """Execute one command of a client, and return its reply."""
        name = words[0].lower()
        client.caching, self._by = client.caches_next, client
        if name != "client":
            client.caches_next = False
        try:
            if client.channels and name == "ping":
                return ["pong", ""]
            return self._of_client(client, name, words) if name in CONNECTION else self._command(words)
        except Refused as refused:
            return refused
        finally:
            self._by = None

    def _of_client(self, client: Client, name: str, words: list[str]) -> Reply:
        what = words[1].upper() if len(words) > 1 else ""
        if name == "ping":
            return Status("PONG")
        if name == "subscribe":
            for number, channel in enumerate(words[1:], 1):
                client.channels.add(channel)
                reply: list[object] = ["subscribe", channel, len(client.channels)]
                if number == len(words) - 1:
                    return reply
                self._push(client, reply)
        if what == "ID":
            return client.number
        if what == "TRACKING":
            client.redirect = int(words[words.index("REDIRECT") + 1])
            if client.redirect not in self.clients:
                client.redirect = 0
                raise Refused("ERR The client ID you want redirect to does not exist")
        client.caches_next = what == "CACHING"
        return Status("OK")

    def _command(self, words: Sequence[str]) -> Reply:
        reply = self._calls.get(words[0], unknown)(*words[1:])
        if self._by and self._by.caching and words[0] in ("GET", "MGET"):
            for key in words[1:]:
                self._tracked.setdefault(key, set()).add(self._by.number)
        return reply

    def _do_time(self) -> Reply:
        return [str(part) for part in divmod(self._micros, 1_000_000)]

    def _do_info(self, *sections: str) -> Reply:
        up = int(self.sim.time - self.started) if self.sim and self.started > -math.inf else 1_000_000
        return f"run_id:{self.name}-{self.run}\r\nuptime_in_seconds:{up}\r\n"

    def _do_publish(self, channel: str, message: str) -> Reply:
        listeners = self._listeners(channel)
        for each in listeners:
            self._push(each, ["message", channel, message])
        return len(listeners)

    def _do_pubsub(self, what: str, *channels: str) -> Reply:
        reply: list[object] = []
        for channel in channels:
            reply += [channel, len(self._listeners(channel))]
        return reply

    def _do_script(self, what: str, text: str) -> Reply:
        if text not in _compiled:
            _compiled[text] = _compile(text)
        sha = hashlib.sha1(text.encode("latin-1")).hexdigest()
        self.scripts[sha] = _compiled[text]
        return sha

    def _do_evalsha(self, sha: str, count: str, *words: str) -> Reply:
        script = self.scripts.get(sha)
        if script is None:
            raise Refused("NOSCRIPT No matching script. Please use EVAL.")
        keys, arguments = list(words[: int(count)]), list(words[int(count) :])
        executed = self._before(sha, keys, arguments)
        global _calls
        _calls = self._calls
        try:
            return _of_lua(_run(script, int(count), *words))
        finally:
            executed()

    def _before(self, sha: str, keys: list[str], arguments: list[str]) -> Callable[[], None]:
        if len(keys) < FULL:
            return lambda: None
        kind = "force" if sha == transactions.FORCE._sha else "ask" if sha in ASKS else "leave"
        barges = (sha, arguments[3:4]) == (transactions.ACQUIRE._sha, ["1"])
        return self.on_step(keys[0], claim_of(arguments[0] if arguments else ""), "barge" if barges else kind)

    # Pushes

    def _touched(self, key: str) -> None:
        """Report a change of a tracked key once to each client that has read the key, but not to the client that
        changed it."""
        for number in sorted(self._tracked.pop(key, ())):
            client = self.clients.get(number)
            if client is not None and client is not self._by:
                listener = self.clients.get(client.redirect)
                if listener is not None and INVALIDATED in listener.channels:
                    self._push(listener, ["message", INVALIDATED, [key]])

    def _push(self, client: Client, message: list[object]) -> None:
        data = encoded(message)
        if self._by is None:
            client.link.deliver(data)
        else:
            self._pushes.append((client, data))

    def _plan_end(self, key: str, end: int) -> None:
        """Plan a check of the key at its expiry, unless an earlier check is planned."""
        if self.sim is not None and end < self._looks.get(key, math.inf):
            self._looks[key] = end
            self.sim.after(max(0.0, end / 1000 - self.micros() / 1e6), self._look, key, end)

    def _look(self, key: str, planned: int) -> None:
        """Delete a key some time after its expiry even if no client reads the key, as Redis does."""
        if self.sim is None or self._looks.get(key) != planned:
            return
        del self._looks[key]
        end = self.store.ends.get(key, 0)
        if end > planned:
            self._plan_end(key, end)
        elif end:
            self.on_expiry(key)
            self.sim.after(self.random.expovariate(10.0), self._forget_ended, key, self.run)

    def _forget_ended(self, key: str, run: int) -> None:
        if run == self.run and self.up and not self.paused:
            self.micros()
            self.store.look(key)

    # For the oracles

    def holder(self, key: str) -> str | None:
        owner = self.store.values.get(key)
        return claim_of(owner) if isinstance(owner, str) and not owner.startswith("#") else None

    def is_free(self, key: str) -> bool:
        self.micros()
        return self.store.look(key) is None

    def claims(self) -> Iterator[tuple[str, str]]:
        self.micros()
        for key in list(self.store.values):
            value = None if key.endswith("}:token") or "}:gone:" in key else self.store.look(key)
            for text in [value] if isinstance(value, str) else list(value or ()):
                if "#" not in (claim := claim_of(text)):
                    yield key, claim

    def waiters(self, key: str, me: str) -> list[str]:
        places, lives = (self.store.values.get(f"{{{key}}}:{part}") for part in ("queue", "live"))
        if not isinstance(places, Sorted) or not isinstance(lives, dict):
            return []
        found = []
        self.micros()
        for owner, _ in places.in_order():
            _, deadline, *_ = str(lives.get(owner, "x:0")).split(":")
            alive = int(deadline.removesuffix("q")) > self.store.now
            quiet = deadline.endswith("q")
            if claim_of(owner) == me or (alive and (quiet or self._listeners(f"multilock:wake:{owner.split('.')[0]}"))):
                found.append(claim_of(owner))
        return found

    def request(self, data: bytes) -> object:
        words = data.split(b"\r\n", 5)
        return words[4] if words[2] == b"EVALSHA" else words[2]

    def pushed(self, data: bytes) -> str | None:
        is_push = b"multilock:wake" in data and b"message" in data
        return data.rsplit(b"\r\n", 2)[1].decode("latin-1") if is_push else None

    def _listeners(self, channel: str) -> list[Client]:
        return [each for each in self.clients.values() if channel in each.channels]

    # Connections

    def accept(self, link: Link) -> Client | None:
        if not self.up:
            return None
        self._numbers += 1
        client = self.clients[self._numbers] = Client(self._numbers, link, self.run)
        return client

    def closed(self, client: Client) -> None:
        if client.run == self.run:
            self.clients.pop(client.number, None)

    def _received(self, client: Client, data: bytes) -> None:
        """Execute the commands, and send the replies. Each command arrives whole, and no word of it contains a line
        break."""
        if client.rest is not None:
            client.rest += data
            return
        self.micros()
        lines, at = data.decode("latin-1").split("\r\n"), 0
        while at < len(lines) - 1:
            begin, at = at + 2, at + 1 + 2 * int(lines[at][1:])
            words = lines[begin:at:2]
            reply = self.execute(client, words)
            pushes, self._pushes = self._pushes, []
            for listener, push in pushes:
                listener.link.deliver(push)
            if self.sim is not None and self.sim.trace is not None:
                shown = " ".join(words[:1] + words[3:]) if words[0] in ("EVALSHA", "SCRIPT") else " ".join(words)
                self.sim.note(None, f"  {self.name} c{client.number} {shown[:300]!r} -> {reply!r:.200}")
            if reply is LATER:
                client.rest = "\r\n".join(lines[at:]).encode("latin-1")
                return
            if client.number in self.clients:
                client.link.deliver(encoded(reply))

    # Faults

    def _ended(self, *, forgets: bool) -> list[Link]:
        links = [client.link for client in self.clients.values()]
        self._begin(forgets=forgets)
        return links

    def lose_scripts(self) -> None:
        self.scripts.clear()

    def delete(self, key: str) -> None:
        self.store.delete(key)

    def start(self) -> None:
        super().start()
        for key, end in list(self.store.ends.items()):
            self._plan_end(key, end)


class VotingServer(RedisServer):
    """One of the servers of a Redlock. Their clocks differ."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.step = self.random.uniform(-0.01, 0.01)


class Connection:
    """Replaces a connection of redis-py in the library: see `endpoints`."""

    _sock: Socket

    def __init__(
        self, network: Network, servers: Mapping[str, RedisServer], host: str, socket_timeout: float, **ignored: object
    ) -> None:
        self._network, self._server, self._within = network, servers[host], socket_timeout

    def connect(self) -> None:
        """Connect. Raises OSError if the server is down or the network too slow."""
        self._sock = self._network.connect(self._server, self._within)

    def disconnect(self) -> None:
        self._sock.close()


def claim_of(owner: str) -> str:
    """Return the claim id in the text of an owner."""
    return owner.partition("@")[0]


def encoded(reply: Reply | Refused) -> bytes:
    """Return a reply as it is sent (RESP2)."""
    return _encoded(reply).encode("latin-1")


def _encoded(reply: Reply | Refused) -> str:
    if type(reply) is int:
        return f":{reply}\r\n"
    if type(reply) is str:
        return f"${len(reply)}\r\n{reply}\r\n"
    if isinstance(reply, list):
        return f"*{len(reply)}\r\n{''.join(map(_encoded, reply))}"
    if reply is None:
        return "$-1\r\n"
    return f"-{reply}\r\n" if isinstance(reply, Refused) else f"+{reply}\r\n"


def settings_of(world: World) -> dict[str, Any]:
    """Return the settings with which `Connection` finds the servers."""
    return {"network": world.network, "servers": {server.name: server for server in world.servers}}


def endpoints(world: World) -> list[Endpoint]:
    settings = settings_of(world)
    return [
        Endpoint(f"redis://{server.name}", Connection, {**settings, "host": server.name}) for server in world.servers
    ]


def _open(world: World, ttl: float) -> Any:
    return multilock_redis.RedisBackend("redis", endpoints(world)[0], Keyspace(PREFIX), ttl=ttl)


def _open_redlock(world: World, ttl: float) -> Any:
    return RedlockBackend("redlock", endpoints(world), Keyspace(PREFIX), ttl=ttl, guard=GUARD)


SIMULATED = {
    "redis": Simulated(_open, RedisServer, 1, often="cuts cuts process", ttls=(1.0, 2.0, 3.0, 6.0, 10.0, 10.0, 10.0)),
    "redlock": Simulated(_open_redlock, VotingServer, 3, shares=False),
}
