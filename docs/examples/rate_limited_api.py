"""A partner's API that allows three requests at a time, from all your processes together.

    pip install 'multilock[redis]'
    export MULTILOCK_URL=redis://127.0.0.1:6379/0
    python rate_limited_api.py 4 & python rate_limited_api.py 4; wait

You should see eight "answered", and never more than three requests at once. A permit that a killed process held is free
when its ttl ends. A semaphore limits the number of requests at the same time; to limit the requests per minute use a
rate limiter.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import multilock

URL = os.environ.get("MULTILOCK_URL", "redis://127.0.0.1:6379/0")


async def call_the_partner(number: int) -> None:
    print("begins", time.time(), flush=True)
    await asyncio.sleep(0.2)
    print("answered", number, "by pid", os.getpid(), flush=True)
    print("ends", time.time(), flush=True)


async def main(calls: int) -> None:
    async with multilock.connect_async(URL) as client:
        permits = client.semaphore("partner-api", 3)

        async def one(number: int) -> None:
            async with permits.acquire(timeout=60):
                await call_the_partner(number)

        await asyncio.gather(*map(one, range(calls)))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
