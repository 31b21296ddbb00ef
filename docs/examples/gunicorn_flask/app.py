"""Flask under gunicorn: an application that is loaded before the workers are forked, with a lock and one leader.

    pip install 'multilock[redis]' flask gunicorn
    export MULTILOCK_URL=redis://127.0.0.1:6379/0
    cd docs/examples/gunicorn_flask && gunicorn app:app          # reads gunicorn.conf.py
    curl localhost:8000/leader; curl -X POST localhost:8000/report & curl -X POST localhost:8000/report

You should see every worker name the same leader, and one of two simultaneous reports refused with 409.
"""

from __future__ import annotations

import os
import time

import flask

import multilock
from multilock import Leadership

# The client is created before the fork, without I/O, and used after it: each worker opens its own connections.
client = multilock.connect()  # $MULTILOCK_URL


def work(leadership: Leadership) -> None:
    """Do the work that only one worker of all hosts may do."""
    print(f"pid {os.getpid()}, term {leadership.term}: leads", flush=True)
    while leadership.is_held():  # False at once when this worker stops or loses the leadership
        leadership.wait_lost(1.0)
    print(f"pid {os.getpid()}, term {leadership.term}: cleaned up", flush=True)


election = client.election("flask", on_elected=work, grace=20)
app = flask.Flask(__name__)


@app.get("/leader")
def leader() -> dict[str, object]:
    now = election.leader()
    return {"leader": now and now.identity, "pid": os.getpid(), "healthy": client.is_healthy()}


@app.post("/report")
def report() -> tuple[dict[str, object], int]:
    lease = client.lock("report").try_acquire()
    if lease is None:
        return {"error": "a report is being made"}, 409
    with lease:
        time.sleep(2)  # make the report
        return {"report": lease.fence(), "pid": os.getpid()}, 200
