"""Measurements without a fault: the cost of a lock, and its behaviour under contention, one contestant at a time.

Each holder checks that it still holds the lock right before it releases it, so exclusion and tokens are judged in these
measurements as well. Waiters continue to wait after the measured time. If a free lock then reaches no waiter, that is a
deadlock.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from multilock import now
from multilock.testing.beliefs.oracles import within
from multilock.testing.compare.history import Event, record_of
from multilock.testing.compare.pool import LOOK_EVERY, RunEnded, Trouble, WorkerProcess
from multilock.testing.network import Network, why_no_network

__all__ = ["LOADS", "Load", "play_load", "rows_of"]

LOADS = {
    "cost": "acquire and release of a free lock, beside pings of the same client",
    "contention": "many contenders for one lock",
    "scale": "many locks held by one client",
}
OPEN_WITHIN = 30.0
END_WITHIN = 30.0
EACH_WITHIN = 0.05  # seconds that each of many locks adds to the time limit of a load
PAIRS = 200  # the greatest number of acquires and releases whose cost is measured
BEHIND = "Q"  # the first letter of roles behind a proxy; other roles begin with P
COUNTED = 0.5  # the load is repeated behind a proxy that counts the requests, for this share of the seconds
DIGITS = 6


@dataclass(frozen=True, slots=True)
class Load:
    """One measurement. In each of ``processes``, the ``contenders`` share one client."""

    number: int
    kind: str
    contestant: str
    adapter: str
    url: str
    name: str
    ttl: float
    seconds: float
    contenders: int = 1
    processes: int = 1
    hold: float = 0.0  #: seconds for which each contender holds the lock
    locks: int = 1
    bound: float = 0.0  #: seconds for which the lock may be free although a contender waits
    counted: bool = False  #: whether contention is repeated behind a proxy to count the requests

    @property
    def header(self) -> Event:
        """The first event, without the URL, which may contain a secret."""
        return {
            "what": "load", "kind": self.kind, "contestant": self.contestant, "adapter": self.adapter,
            "name": self.name, "ttl": self.ttl, "seconds": self.seconds, "contenders": self.contenders,
            "processes": self.processes, "hold": self.hold, "locks": self.locks, "bound": self.bound, "at": now(),
        }  # fmt: skip


def play_load(
    load: Load, worker: Callable[[], WorkerProcess], stop: threading.Event
) -> tuple[list[Event], list[WorkerProcess]]:
    """Run a measurement. Returns its events, and the workers that took part."""
    header, why = load.header, ""
    workers: list[WorkerProcess] = []
    measured = load.kind == "scale" or load.counted
    network = Network(load.url) if measured and not why_no_network(load.url) else None
    counted: list[Event] = []
    try:
        for _ in range(load.processes):
            workers.append(worker())
        if load.kind == "scale":
            counted = _play(load, workers, stop, network, load.seconds)
        else:
            _play(load, workers, stop, None, load.seconds)
            if network is not None:
                counted = _play(load, workers, stop, network, COUNTED * load.seconds, behind=BEHIND)
    except Trouble as trouble:
        why = str(trouble)
        for each in workers:
            each.fit = False
        if isinstance(trouble, RunEnded):
            raise
    finally:
        if network is not None:
            network.close()
    events = [
        header,
        *counted,
        *(event for each in workers for event in each.forget()),
        {"what": "end", "why": why, "at": now()},
    ]
    return [{"cycle": load.number, **event} for event in events], workers


def _play(
    load: Load,
    workers: list[WorkerProcess],
    stop: threading.Event,
    network: Network | None,
    seconds: float,
    behind: str = "P",
) -> list[Event]:
    """Play the load once, from opening the clients to closing them. Returns the counts of requests at start and end."""
    url = load.url if network is None else network.url
    roles = [f"{behind}{number}" for number in range(len(workers))]
    for role, each in zip(roles, workers, strict=True):
        each.order("open", role, adapter=load.adapter, url=url, ttl=load.ttl, name=load.name)
    for role, each in zip(roles, workers, strict=True):
        each.wait_for(role, "opened", within=OPEN_WITHIN)
    counted = [_count(network)]
    share, more = divmod(load.contenders, load.processes)
    for number, (role, each) in enumerate(zip(roles, workers, strict=True)):
        each.order(
            load.kind, role, seconds=seconds, threads=share + (number < more), hold=load.hold, most=PAIRS,
            locks=load.locks, patience=load.bound,
        )  # fmt: skip
    limit = END_WITHIN + EACH_WITHIN * load.locks + load.bound
    if load.kind == "scale":
        workers[0].wait_for(roles[0], "holds", within=limit + seconds)
        counted = [_count(network)]
    _wait(seconds, stop)
    if load.kind == "scale":
        workers[0].wait_for(roles[0], "kept", within=limit)
        counted.append(_count(network))
    for role, each in zip(roles, workers, strict=True):
        each.wait_for(role, "done", within=limit)
    if load.kind != "scale":
        counted.append(_count(network))
    for role, each in zip(roles, workers, strict=True):
        each.order("close", role)
        each.wait_for(role, "closed", within=END_WITHIN)
    return counted


def _count(network: Network | None) -> Event:
    """Return the event with the number of pieces and bytes that were sent to the server so far."""
    sent = None if network is None else network.traffic()
    return {
        "what": "sent", "at": now(), "pieces": None if sent is None else sent.up_pieces,
        "bytes": None if sent is None else sent.up_in,
    }  # fmt: skip


def _wait(seconds: float, stop: threading.Event) -> None:
    until = now() + seconds
    while now() < until:
        if stop.is_set():
            raise RunEnded("the run was interrupted")
        time.sleep(LOOK_EVERY)


# ---- the results


def rows_of(loads: Iterable[list[Event]]) -> list[dict[str, Any]]:
    """Return one row of results for each load."""
    return [_row(events) for events in loads]


def _row(events: list[Event]) -> dict[str, Any]:
    header, end = events[0], events[-1]
    row = {key: header[key] for key in ("cycle", "kind", "contestant", "adapter", "contenders", "processes", "hold")}
    row |= {"why": end["why"] or None, "violations": []}
    return row | {"cost": _cost, "contention": _contention, "scale": _scale}[header["kind"]](events)


def _scale(events: list[Event]) -> dict[str, Any]:
    """Return the figures of many locks.

    ``sends_per_second`` counts pieces of bytes that arrived at the server. Requests that are sent together count as one
    piece.
    """
    holds = next((event for event in events if event["what"] == "holds"), None)
    kept = next((event for event in events if event["what"] == "kept"), None)
    sent = [event for event in events if event["what"] == "sent" and event["pieces"] is not None]
    row: dict[str, Any] = dict.fromkeys(("threads", "bytes_each", "cpu_share", "sends_per_second", "kept"))
    row["locks"] = events[0]["locks"]
    if holds is not None:
        row |= {"threads": holds["threads"], "bytes_each": round(holds["bytes"])}
    if kept is not None:
        row |= {"kept": kept["locks"], "cpu_share": round(kept["cpu"] / kept["seconds"], 4)}
    if len(sent) == 2:
        first, last = sent
        row["sends_per_second"] = round((last["pieces"] - first["pieces"]) / (last["at"] - first["at"]), 1)
    return row


def _cost(events: list[Event]) -> dict[str, Any]:
    spent = [event for event in events if event["what"] == "spent"]
    pings = [event["ping"] for event in spent if event["ping"] is not None]
    both = _spread([event["acquire"] + event["release"] for event in spent])
    ping = _spread(pings)
    return {
        "acquire_release": both,
        "ping": ping,
        "times_ping": round(both["p50"] / ping["p50"], 2) if both and ping and ping["p50"] else None,
    }


def _contention(events: list[Event]) -> dict[str, Any]:
    """Return the figures of contention. An older history lacks ``deadlocks`` and ``sends_per_grant``."""
    given = sorted((event for event in events if event["what"] in ("grant", "served")), key=_at)
    grants = [event for event in given if event["what"] == "grant" and not event["id"].startswith(BEHIND)]
    seconds = events[0]["seconds"]
    per_contender = Counter(event["id"] for event in grants)
    waited = [event["at"] - event["asked"] for event in grants]
    # Seconds from each release to the next grant, if the next holder was already waiting at the release.
    handed = [other["at"] - one["until"] for one, other in pairwise(grants) if other["asked"] < one["until"]]
    row = {
        "grants": len(grants),
        "per_second": round(len(grants) / seconds, 1),
        "wait": _spread(waited),
        "hand_over": _spread([each for each in handed if each >= 0]),
        "most": max(per_contender.values(), default=0),
        "least": min(per_contender.values(), default=0) if len(per_contender) == events[0]["contenders"] else 0,
        "starved": events[0]["contenders"] - len(per_contender),
        "inversions": sum(other["asked"] < one["asked"] for one, other in pairwise(grants)),
        "token_regressions": sum(1 for _ in _regressions(given)),
        "violations": [*_overlaps(given), *_regressions(given)],
    }
    if "bound" in events[0]:
        deadlocks = list(_deadlocks(events, given))
        row |= {"deadlocks": len(deadlocks), "violations": [*row["violations"], *deadlocks]}
        row["sends_per_grant"] = _sends_per_grant(events, given)
    return row


def _overlaps(grants: list[Event]) -> Iterator[str]:
    for one, other in _believed(grants):
        if other["at"] < one["until"]:
            yield f"{one['id']} and {other['id']} believed at the same time, for {one['until'] - other['at']:.6f} s"


def _believed(grants: list[Event]) -> Iterator[tuple[Event, Event]]:
    """Yield the successive pairs of the grants whose holder believed that it held the lock."""
    return pairwise(event for event in grants if event["held"])


def _regressions(grants: list[Event]) -> Iterator[str]:
    for one, other in _believed(grants):
        if one["token"] is not None and other["token"] is not None and other["token"] <= one["token"]:
            yield f"token {other['token']} of {other['id']} came after {one['token']} of {one['id']}"


def _deadlocks(events: list[Event], given: list[Event]) -> Iterator[str]:
    """Yield each period in which a contender waited for too long although nobody held the lock.

    Too long means longer than a vanished holder can keep the lock taken. Time in which one of the processes did not run
    does not count.
    """
    bound, stalls = events[0]["bound"], record_of(event for event in events if event["what"] == "stall").stalls
    waits = [*given, *(event for event in events if event["what"] == "unserved")]
    free_since = min((wait["asked"] for wait in waits), default=0.0)
    for taken in [*given, {"at": max((wait["at"] for wait in waits), default=0.0), "until": 0.0}]:
        if taken["at"] - free_since > bound:
            for wait in waits:
                start, end = max(free_since, wait["asked"]), min(taken["at"], wait["at"])
                ran = end - start - max((within(its, start, end) for its in stalls.values()), default=0.0)
                if ran > bound:
                    yield f"nobody held it for {ran:.1f} s, and {wait['id']} waited: a deadlock"
                    break
        free_since = max(free_since, taken["until"])


def _sends_per_grant(events: list[Event], given: list[Event]) -> float | None:
    """Return how many pieces of bytes arrived at the server for each grant. Requests that are sent together count as
    one piece."""
    sent = [event["pieces"] for event in events if event["what"] == "sent" and event["pieces"] is not None]
    grants = sum(event["id"].startswith(BEHIND) for event in given)
    return round((sent[1] - sent[0]) / grants, 2) if len(sent) == 2 and grants else None


def _at(event: Event) -> float:
    return float(event["at"])


def _spread(values: Iterable[float]) -> dict[str, Any] | None:
    """Return the distribution, in seconds. A mean is left out, because no user waits for the mean."""
    known = sorted(values)
    if not known:
        return None
    at = {"least": 0, "p50": (len(known) - 1) // 2, "p99": math.ceil(0.99 * len(known)) - 1, "most": len(known) - 1}
    return {"n": len(known), **{name: round(known[index], DIGITS) for name, index in at.items()}}
