"""A simulated ZooKeeper: sessions, connections, watches and faults. `zookeeper_store` has the data of each member.

An ensemble is one `Server`: its first member is the leader. A follower passes every write to the leader, and executes
the writes later than the leader. Twice in each tick it reports the sessions of its clients to the leader, as a real
follower does. The ensemble never loses a write that it has answered. Elections are simulated by a restart of all
servers.
"""

from __future__ import annotations

import math
import re
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from multilock.timing import JITTER, UNPUSHED
from tests.simulation.scheduler import Simulation
from tests.simulation.server import Server
from tests.simulation.zookeeper_store import (
    ANSWERED_HERE,
    CHILDREN,
    CLOSE,
    CREATE,
    CREATE_SESSION,
    DELETE,
    DELETE_CONTAINER,
    DELETED,
    EXISTS,
    GET_CHILDREN,
    PING,
    SESSION_EXPIRED,
    SESSION_MOVED,
    SYNC,
    Failed,
    Store,
    bytes_of,
    parent_of,
    text_of,
    written,
)

__all__ = ["ZooKeeperServer"]

HEADER = struct.Struct("!iqi")
REVALIDATE = -12  # a follower asks the leader about a session
SYNC_LIMIT = 10  # ticks until a follower without a leader closes its connections
MOST = 60.0  # seconds; the longest session that a server grants
EVENT_XID = -1
_NODE = re.compile(r"(.+?)(?:!(p\d+))?__(r?)lock__(\d{10})", re.ASCII)


class Link(Protocol):
    """The connection back to a client. ``process`` is the client's process, or a substitute in a test."""

    process: Any
    network: Any

    def deliver(self, data: bytes) -> None: ...
    def reset(self) -> None: ...


class Entry(NamedTuple):
    """A write in the log of all writes. ``refused`` is the error if the leader refused the write because of its
    session, or 0."""

    kind: int
    body: bytes
    session: int
    now: int
    refused: int


@dataclass(slots=True, eq=False)
class Request:
    """A request that a member received. ``reply`` is None until it is known, and b"" if there is none.

    ``at`` is the number of writes that the member must have executed before it replies.
    """

    xid: int
    kind: int
    body: bytes
    end: End
    session: int
    era: int
    reply: bytes | None = None
    at: int = -1


class End:
    """The server's end of one connection."""

    def __init__(self, number: int, link: Link, run: int, member: Member) -> None:
        self.number, self.link, self.run, self.member = number, link, run, member
        self.session, self.timeout = 0, 0.0  # 0 until the handshake was answered
        self.requests: deque[Request] = deque()  # requests without a reply so far, in order


class Member:
    """One server of the ensemble."""

    def __init__(self, number: int, grants_less: bool) -> None:
        self.number = number
        self.grants_less = grants_less
        self.store = Store()
        self.applied = 0  # how many writes of the log the store has executed
        self.ends: dict[int, End] = {}
        # For each kind of watch, the connections that watch a path. Watches of children also fire when the node is
        # deleted.
        self.on_node: dict[str, dict[End, None]] = {}
        self.on_children: dict[str, dict[End, None]] = {}
        self.up = True  # whether it serves clients; False only for a follower that has lost its leader
        self.era = 0  # how often it has lost its leader
        self.cut_until = -math.inf  # until this time no message passes between this member and the leader
        self.to_leader = self.from_leader = -math.inf  # when the last message in each direction arrives
        self.waiting: dict[int, deque[Request]] = {}  # number of a write -> the requests that wait for it
        # active sessions that were not reported to the leader yet, with their timeouts
        self.touched: dict[int, float] = {}


@dataclass(slots=True)
class Tracked:
    """A session at the leader. ``owner`` is the member to which its client is connected, with the member's era."""

    expires: float
    owner: tuple[int, int] | None = None
    closing: bool = False
    watched: bool = field(default=False)  # whether a check at the session's expiry is planned


class Contender(NamedTuple):
    """A node in the queue of a name."""

    number: int
    claim: str
    mode: str


class ZooKeeperServer(Server):
    """An ensemble. Without ``sim`` it has one server, and no session expires."""

    unwatched = UNPUSHED * (1 + JITTER)

    def __init__(self, name: str, sim: Simulation | None, clock: Callable[[], int], seed: object) -> None:
        super().__init__(name, sim, clock, seed)
        chance = self.random
        size = chance.choice([1, 3]) if sim else 1
        self.tick = chance.choice([0.1, 0.2, 0.5])
        self.lag = chance.choice([0.0002, 0.002, 0.02])  # the mean delay of a message between two members
        self.cleans_every = chance.choice([3.0, 60.0])  # seconds between two removals of abandoned containers
        self.shortest = 2.0  # seconds; the longest session that servers with ``grants_less`` grant
        self.members = [Member(each, self._grants_less()) for each in range(size)]
        self.forced: set[str] = set()  # nodes that the simulated operator deletes
        self.created: dict[int, float] = {}  # token -> when the node was created
        self.wanted: dict[Any, int] = {}  # process -> the session that it requested last
        self._numbers = 0
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # calls that were due while it was stopped
        self._ending: dict[str, None] = {}  # the nodes that the present write deletes
        self._begin()
        self._clean()

    def _begin(self) -> None:
        self.log: list[Entry] = []
        self.sessions: dict[int, Tracked] = {}
        for member in self.members:
            member.store, member.applied = Store(), 0

    def _grants_less(self) -> bool:
        """Return whether a server grants only short sessions from its start on."""
        return bool(self.sim) and self.random.random() < 1 / 3

    @property
    def leader(self) -> Member:
        return self.members[0]

    def _now(self) -> float:
        return float(self.sim.time) if self.sim else 0.0

    def _later(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Call ``call`` at the time ``when``, or later if the server is stopped at that time. A server that has ended
        never calls it."""
        if self.sim is None:
            call(*args)
        else:
            self.sim.at(when, self._due, self.run, call, args)

    def _due(self, run: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if run == self.run and self.up:
            if self.paused:
                self._held.append((call, args))
            else:
                call(*args)

    def _arrival(self, member: Member, last: float) -> float:
        """Return when a message between this member and the leader arrives. The previous message arrives at
        ``last``."""
        if member is self.leader or self.sim is None:
            return self._now()
        delay = self.random.expovariate(1.0) * self.lag
        return max(self._now() + delay, last, member.cut_until) + 1e-9

    # Connections

    def accept(self, link: Any) -> End | None:
        member = self.members[self.random.randrange(len(self.members))]
        if not self.up or not member.up:
            return None
        self._numbers += 1
        end = member.ends[self._numbers] = End(self._numbers, link, self.run, member)
        return end

    def closed(self, end: End) -> None:
        if end.member.ends.pop(end.number, None):
            for watches in (end.member.on_node, end.member.on_children):
                for path in [path for path, ends in watches.items() if ends.pop(end, 0) is None and not ends]:
                    del watches[path]

    def _hang_up(self, end: End) -> None:
        if end.number in end.member.ends:
            self.closed(end)
            end.link.reset()

    def _received(self, end: End, data: bytes) -> None:
        while data and end.number in end.member.ends:
            message, at = bytes_of(data, 0)
            data = data[at:]
            if not end.session:
                self._connect(end, message)
                continue
            xid, kind = struct.unpack_from("!ii", message)
            request = Request(xid, kind, message[8:], end, end.session, end.member.era)
            self._touch(end)
            end.requests.append(request)
            if kind not in ANSWERED_HERE:
                self._pass_on(request)
            self._answer(end)

    def _answer(self, end: End) -> None:
        """Send the replies that are due. A read waits for the earlier requests of its connection."""
        while end.requests and end.number in end.member.ends:
            request = end.requests[0]
            if request.reply is None:
                if request.kind not in ANSWERED_HERE:
                    return
                request.reply = self._replied(request, self._read(request))
            end.requests.popleft()
            if request.reply:
                end.link.deliver(written(request.reply))
            if request.kind == CLOSE:
                self.closed(end)

    def _read(self, request: Request) -> bytes | int:
        """Return the body of the reply, or the code of an error."""
        end, body = request.end, request.body
        path = "" if request.kind == PING else text_of(body, 0)[0]
        watches = body[-1:] == b"\1"
        if watches and request.kind == EXISTS:
            end.member.on_node.setdefault(path, {})[end] = None
        try:
            reply = end.member.store.read(request.kind, body)
        except Failed as failed:
            return failed.code
        if watches and request.kind == GET_CHILDREN:
            end.member.on_children.setdefault(path, {})[end] = None
        return reply

    def _replied(self, request: Request, reply: bytes | int) -> bytes:
        store = request.end.member.store
        if self.sim and self.sim.trace is not None:
            shown = reply if isinstance(reply, int) else len(reply)
            place = f"{self.name}.{request.end.member.number} {request.session & 0xFFFF:x}"
            self.sim.note(None, f"  {place} {request.kind} {request.body[:90]!r} -> {shown} at {store.zxid}")
        if isinstance(reply, int):
            return HEADER.pack(request.xid, store.zxid, reply)
        return HEADER.pack(request.xid, store.zxid, 0) + reply

    # Sessions

    def _connect(self, end: End, message: bytes) -> None:
        _, seen, asked, session = struct.unpack_from("!iqiq", message)
        password, _ = bytes_of(message, 24)
        member = end.member
        if seen > member.store.zxid:
            self._hang_up(end)  # the client has seen a newer state
            return
        most = self.shortest if member.grants_less else MOST
        end.timeout = min(max(asked / 1000, 2 * self.tick), most)
        session, is_new = session or self._new_session(), not session
        if end.link in end.link.network.sockets:  # a late handshake of a closed connection makes an unwanted session
            self.wanted[end.link.process] = session
        if not is_new:
            for other in [each for each in member.ends.values() if each.session == session]:
                self._hang_up(other)
            if password != _password(session):
                self._welcome(end, 0)
                return
            self._pass_on(Request(0, REVALIDATE, b"", end, session, member.era))
        else:
            body = round(end.timeout * 1000).to_bytes(4, "big")
            self._pass_on(Request(0, CREATE_SESSION, body, end, session, member.era))

    def _new_session(self) -> int:
        self._numbers += 1
        return 1 << 56 | int(self._now() * 1000) << 20 | self._numbers & 0xFFFFF

    def _welcome(self, end: End, session: int) -> None:
        """Answer a handshake. Without a session the connection ends."""
        if end.number in end.member.ends:
            end.session = session
            timeout = round(end.timeout * 1000) if session else 0
            password = _password(session) if session else bytes(16)
            end.link.deliver(written(struct.pack("!iiq", 0, timeout, session) + written(password) + b"\0"))
            if not session:
                self.closed(end)

    def _touch(self, end: End) -> None:
        """Record that the client of a session is alive. A follower reports this to the leader twice in a tick."""
        member = end.member
        if member is self.leader:
            self._touch_at_leader(end.session, end.timeout)
            return
        if not member.touched:
            half = self.tick / 2
            self._later((self._now() // half + 1) * half, self._report, member, member.era)
        member.touched[end.session] = end.timeout

    def _report(self, member: Member, era: int) -> None:
        if member.era == era:
            touched, member.touched = member.touched, {}
            member.to_leader = self._arrival(member, member.to_leader)
            self._later(member.to_leader, self._reported, member, era, touched)

    def _reported(self, member: Member, era: int, touched: dict[int, float]) -> None:
        if member.era == era:
            for session, timeout in touched.items():
                self._touch_at_leader(session, timeout)

    def _touch_at_leader(self, session: int, timeout: float) -> bool:
        """Give the session its full timeout again. Returns False if the session has ended."""
        tracked = self.sessions.get(session)
        if tracked is None or tracked.closing:
            return False
        tracked.expires = ((self._now() + timeout) // self.tick + 1) * self.tick
        if self.sim and not tracked.watched:
            tracked.watched = True
            self._later(tracked.expires, self._look, session)
        return True

    def _look(self, session: int) -> None:
        tracked = self.sessions.get(session)
        if tracked is None or tracked.closing:
            return
        if tracked.expires > self._now() + 1e-9:
            self._later(tracked.expires, self._look, session)
            return
        for key in {parent_of(path)[1:]: None for path in self.leader.store.owned.get(session, ())}:
            self.on_expiry(key)
        self._order(CLOSE, b"", session, 0)

    # Writes

    def _pass_on(self, request: Request) -> None:
        member = request.end.member
        member.to_leader = self._arrival(member, member.to_leader)
        self._later(member.to_leader, self._reaches_leader, request)

    def _reaches_leader(self, request: Request) -> None:
        member, session = request.end.member, request.session
        if request.era != member.era:
            return  # the member has lost its leader since then
        if request.kind == REVALIDATE:
            valid = self._touch_at_leader(session, request.end.timeout)
            if valid:
                self.sessions[session].owner = member.number, member.era
            member.from_leader = self._arrival(member, member.from_leader)
            self._later(member.from_leader, self._welcome, request.end, session if valid else 0)
            return
        if request.kind == SYNC:
            request.at = len(self.log)
            member.from_leader = self._arrival(member, member.from_leader)
            self._later(member.from_leader, self._synced, request)
            return
        refused = self._refused(request, (member.number, member.era))
        member.waiting.setdefault(len(self.log), deque()).append(request)
        self._order(request.kind, request.body, session, refused)

    def _refused(self, request: Request, sender: tuple[int, int]) -> int:
        """Return the error if the session of a write has ended or moved to another server, otherwise 0."""
        session = request.session
        if request.kind == CREATE_SESSION:
            self.sessions[session] = Tracked(math.inf, sender)
            self._touch_at_leader(session, request.end.timeout)
        tracked = self.sessions.get(session)
        if tracked is None or tracked.closing:
            return SESSION_EXPIRED
        tracked.owner = tracked.owner or sender
        return SESSION_MOVED if tracked.owner != sender and request.kind != CLOSE else 0

    def _order(self, kind: int, body: bytes, session: int, refused: int) -> None:
        """Append a write to the log. The leader executes it now, and the other members later."""
        entry = Entry(kind, body, session, self.micros() // 1000, refused)
        if kind == CLOSE and session in self.sessions:
            del self.sessions[session]
        self.log.append(entry)
        executed = [] if refused else self._before(entry)
        self._apply(self.leader)
        for call in executed:
            call()
        for member in self.members[1:]:
            member.from_leader = self._arrival(member, member.from_leader)
            self._later(member.from_leader, self._apply, member)

    def _apply(self, member: Member) -> None:
        """Let a member execute its next write."""
        if member.applied == len(self.log):
            return
        number, entry = member.applied, self.log[member.applied]
        member.applied += 1
        store = member.store
        reply: bytes | int
        try:
            if entry.refused:
                store.fail()
                reply = entry.refused
            else:
                reply = store.write(*entry[:4])
        except Failed as failed:
            reply = failed.code
        self._notify(member, store.events)
        answered = member.waiting.pop(number, ())
        for request in answered:
            self._executed(request, reply)
        if entry.kind == CLOSE and not entry.refused:
            for end in [each for each in member.ends.values() if each.session == entry.session]:
                self._hang_up(end)

    def _executed(self, request: Request, reply: bytes | int) -> None:
        end = request.end
        if request.kind == CREATE_SESSION:
            self._welcome(end, request.session)
            return
        request.reply = self._replied(request, reply)
        if reply == SESSION_MOVED:  # this request gets no reply, and the connection ends
            request.reply = b""
            self._later(self._now() + self.random.expovariate(1.0) * self.lag, self._hang_up, end)
        self._answer(end)

    def _synced(self, request: Request) -> None:
        request.reply = self._replied(request, request.body)
        self._answer(request.end)

    def _notify(self, member: Member, events: list[tuple[int, str]]) -> None:
        for kind, path in events:
            told: dict[End, None] = {}
            if kind != CHILDREN:
                told |= member.on_node.pop(path, {})
            if kind in (DELETED, CHILDREN):
                told |= member.on_children.pop(path, {})
            body = struct.pack("!ii", kind, 3) + written(path.encode())
            for end in told:
                end.link.deliver(written(HEADER.pack(EVENT_XID, -1, 0) + body))

    # For the oracles

    def _before(self, entry: Entry) -> list[Callable[[], None]]:
        """Report a write to the world before the write is executed, and return the functions to call after it."""
        path, _ = text_of(entry.body, 0) if entry.kind in (CREATE, DELETE) else ("", 0)
        if entry.kind == CREATE:
            self.created[self.leader.store.zxid + 1] = self._now()
            one = _contender(path + "0" * 10)
            return [self.on_step(parent_of(path)[1:], one.claim, "ask")] if one else []
        owned = self.leader.store.owned.get(entry.session, {}) if entry.kind == CLOSE else {}
        self._ending = dict(owned) if entry.kind == CLOSE else {path: None}
        executed = []
        for path in self._ending:
            one, key = _contender(path), parent_of(path)[1:]
            node = self.leader.store.nodes.get(path)
            if one and node:
                forced = path in self.forced and self.holder(key) in (None, one.claim)
                forced = forced and node.owner in self.wanted.values()
                # Reported without the claim, because the claim may have another node in its next session.
                executed.append(self.on_step(key, "", "force" if forced else "leave"))
        return executed

    def _queue(self, key: str) -> list[Contender]:
        node = self.leader.store.nodes.get(f"/{key}")
        found = (one for child in (node.children if node else ()) if (one := _contender(child)))
        return sorted(found)

    def _holding(self, queue: list[Contender]) -> int:
        """Return how many contenders of a queue hold the name."""
        mode = queue[0].mode if queue else "x"
        if mode == "x":
            return min(1, len(queue))
        same = next((at for at, one in enumerate(queue) if one.mode != mode), len(queue))
        return min(same, int(mode[1:])) if mode[0] == "p" else same

    def holder(self, key: str) -> str | None:
        queue = self._queue(key)
        return queue[0].claim if queue and queue[0].mode == "x" else None

    def is_free(self, key: str) -> bool:
        return not self._queue(key)

    def claims(self) -> Iterator[tuple[str, str]]:
        """Yield the claims of connected sessions that their clients still want. All other sessions expire soon."""
        ends = [end for member in self.members for end in member.ends.values()]
        connected = {end.session for end in ends if end.link in end.link.network.sockets}
        for session in [each for each in dict.fromkeys(self.wanted.values()) if each in connected]:
            for path in self.leader.store.owned.get(session, ()):
                if one := _contender(path):
                    yield parent_of(path)[1:], one.claim

    def waiters(self, key: str, me: str) -> list[str]:
        queue = self._queue(key)
        ending = [_contender(path) for path in self._ending if parent_of(path)[1:] == key]
        return [one.claim for one in queue[self._holding(queue) :] if one not in ending]

    def request(self, data: bytes) -> object:
        return data[8:12], len(data) // 32  # the type of the operation, and roughly the length of the request

    def pushed(self, data: bytes) -> str | None:
        """Return the claim whose node was deleted."""
        xid, _, _ = HEADER.unpack_from(data, 4) if len(data) > 28 else (0, 0, 0)
        if xid != EVENT_XID or int.from_bytes(data[20:24], "big") != DELETED:
            return None
        one = _contender(text_of(data, 28)[0])
        return one.claim if one else None

    def granted_at(self, token: int) -> float:
        return self.created.get(token, 0.0)

    # Faults

    def _ended(self, *, forgets: bool) -> list[Any]:
        links = []
        for member in self.members:
            links += [end.link for end in member.ends.values()]
            while not forgets and member.applied < len(self.log):
                self._apply_silently(member)
            member.era += 1
            self._lose_connections(member)
            member.up = True
            member.to_leader = member.from_leader = member.cut_until = -math.inf
        self._held = []
        if forgets:
            self.went_back = True  # tokens begin again, as documented for the backend's fencing scope
            self._begin()
        return links

    def _apply_silently(self, member: Member) -> None:
        entry = self.log[member.applied]
        member.applied += 1
        if entry.refused:
            member.store.fail()
            return
        try:
            member.store.write(*entry[:4])
        except Failed:
            return

    def _lose_connections(self, member: Member) -> list[Link]:
        links = [end.link for end in member.ends.values()]
        for state in (member.ends, member.on_node, member.on_children, member.waiting, member.touched):
            state.clear()
        return links

    def start(self) -> None:
        """Start the servers. Each session gets its full timeout again."""
        if not self.up:
            self.up = True
            self.started = self._now()
            for member in self.members:
                member.grants_less = self._grants_less()
            self.sessions = {}
            for session, timeout in self.leader.store.sessions.items():
                self.sessions[session] = Tracked(math.inf)
                self._touch_at_leader(session, timeout)
            self._clean()

    def go_on(self) -> None:
        """Let a stopped server continue. Its waiting requests and timers run in any order."""
        timers_first = self.random.random() < 0.5
        held, self._held = self._held, []
        if timers_first:
            self.paused = False
            self._run_held(held)
        super().go_on()
        if not timers_first:
            self._run_held(held)

    def _run_held(self, held: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        for call, args in held:
            call(*args)

    def isolate(self, choice: int, seconds: float) -> None:
        """Block all messages between the leader and a follower. After a while the follower closes its connections."""
        if len(self.members) > 1 and self.up:
            member = self.members[1 + choice % (len(self.members) - 1)]
            member.cut_until = self._now() + seconds
            limit = SYNC_LIMIT * self.tick
            if seconds > limit:
                self._later(self._now() + limit, self._lose_leader, member, member.cut_until)

    def _lose_leader(self, member: Member, until: float) -> None:
        if member.up and member.cut_until == until:
            member.up = False
            member.era += 1
            for link in self._lose_connections(member):
                link.reset()
            self._later(until, self._find_leader, member)

    def _find_leader(self, member: Member) -> None:
        while member.applied < len(self.log):
            self._apply_silently(member)
        member.up = True

    def delete(self, key: str) -> None:
        """Delete one node of a name, or all its nodes and their parent."""
        node = self.leader.store.nodes.get(f"/{key}")
        if node is not None and self.up:
            children = sorted(node.children, key=lambda child: child[-10:])
            paths = [f"/{key}/{child}" for child in children]
            number = int((1.0 - self.random.random()) * 2 * len(paths))
            for path in paths[number : number + 1] or [*paths, f"/{key}"]:
                self.forced.add(path)
                self._order(DELETE, written(path.encode()) + b"\xff" * 4, 0, 0)

    def lose_scripts(self) -> None:
        """Do nothing: there are no scripts."""

    def _clean(self) -> None:
        """Delete abandoned containers from time to time."""
        if self.sim:
            self._later(self._now() + self.cleans_every, self._clean)
        for path in self.leader.store.abandoned():
            self._order(DELETE_CONTAINER, written(path.encode()), 0, 0)


def _password(session: int) -> bytes:
    return (session * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)).to_bytes(16, "big")


@lru_cache(maxsize=1024)
def _contender(path: str) -> Contender | None:
    found = _NODE.fullmatch(path.rpartition("/")[2])
    if found is None:
        return None
    claim, permits, reads, number = found.groups()
    return Contender(int(number), claim, permits or ("r" if reads else "x"))
