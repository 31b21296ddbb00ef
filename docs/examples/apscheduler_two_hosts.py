"""APScheduler on every host; each tick's job runs on one of them.

    pip install 'multilock[redis]' 'apscheduler<4'
    export MULTILOCK_URL=redis://127.0.0.1:6379/0
    python docs/examples/apscheduler_two_hosts.py & python docs/examples/apscheduler_two_hosts.py

You should see one line for each tick, from the host that was first. The clocks of the hosts may differ by less than
HOLD, because the name stays taken for HOLD seconds after the grant, however short the job is.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from apscheduler.schedulers.blocking import BlockingScheduler

import multilock

EVERY = 3  # seconds between ticks
HOLD = 2.0  # seconds: longer than the clocks may differ, shorter than EVERY

client = multilock.connect()  # $MULTILOCK_URL


@client.locked("tick", timeout=0, skip=True, hold_at_least=HOLD)
def tick() -> None:
    print(f"tick {round(time.time()) // EVERY} on pid {os.getpid()}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that `with` ends properly
    scheduler = BlockingScheduler()
    scheduler.add_job(tick, "cron", second=f"*/{EVERY}")  # unlike an interval, cron follows the clock
    with client:
        scheduler.start()
