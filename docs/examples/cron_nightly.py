"""cron on two hosts whose clocks differ by a second: the job runs once a night.

Put this line into the crontabs of both hosts:

    0 3 * * *  MULTILOCK_URL=redis://locks:6379/0 python cron_nightly.py

You should see "made" once. The first host is done in milliseconds, and the second host's cron starts the job a second
later. `hold_at_least` keeps the name taken for a minute after the grant, by the server's clock, even if this process is
gone.
"""

from __future__ import annotations

import os

import multilock

client = multilock.connect()  # $MULTILOCK_URL


@client.locked("nightly", timeout=0, skip=True, hold_at_least=60)
def nightly() -> str:
    return f"made on {os.uname().nodename}, pid {os.getpid()}"


if __name__ == "__main__":
    with client:
        print(nightly() or "another host makes it, or has just made it")
