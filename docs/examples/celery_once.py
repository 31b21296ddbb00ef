"""Celery: a task that runs once at a time, however often it is sent, and one beat on several hosts.

    pip install 'multilock[redis,cli]' 'celery[redis]'
    export MULTILOCK_URL=redis://127.0.0.1:6379/0 CELERY_BROKER_URL=redis://127.0.0.1:6379/1
    cd docs/examples
    celery -A celery_once worker &
    multilock elect beat -- celery -A celery_once beat -s /tmp/beat          # on every host
    python celery_once.py                                        # sends the same task twice

You should see one of the two calls print "done" and the other "skipped", and one beat send tasks. If you end the
`multilock elect` that runs this beat, the beat of the other host starts.
"""

from __future__ import annotations

import os
import time

from celery import Celery

import multilock

app = Celery("celery_once", broker=os.environ.get("CELERY_BROKER_URL", "redis://127.0.0.1:6379/1"))
app.conf.beat_schedule = {"report": {"task": "celery_once.report", "schedule": 1.0, "args": ["beat"]}}
app.conf.broker_connection_retry_on_startup = True

client = multilock.connect()  # $MULTILOCK_URL; a module global is safe: each forked worker opens its own connections


@client.locked("report/{day}", timeout=0, skip=True)
def make_report(day: str) -> str:
    time.sleep(1.0)
    return f"report of {day} with token {client.current_lease().fence()}"


@app.task(name="celery_once.report")
def report(day: str) -> None:
    made = make_report(day)
    print(f"done: {made}" if made else f"skipped: the report of {day} is being made", flush=True)


if __name__ == "__main__":
    report.delay("monday")
    report.delay("monday")
