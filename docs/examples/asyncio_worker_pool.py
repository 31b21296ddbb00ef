"""A pool of asyncio workers in several processes: each job is done once, by the worker that gets its lock.

    pip install 'multilock[redis]'
    export MULTILOCK_URL=redis://127.0.0.1:6379/0
    cd docs/examples; mkdir -p /tmp/inbox /tmp/done; touch /tmp/inbox/{1..20}
    python asyncio_worker_pool.py /tmp/inbox /tmp/done & python asyncio_worker_pool.py /tmp/inbox /tmp/done; wait

You should see 20 lines from both processes together, each job once. If you kill one process, the other process does the
unfinished jobs when their locks end.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import multilock
from multilock.aio import AsyncClient

WORKERS = 5


async def do(job: Path) -> None:
    await asyncio.sleep(0.05)
    print(f"job {job.name} by pid {os.getpid()}", flush=True)


async def work(client: AsyncClient, inbox: Path, done: Path) -> None:
    """Work until the inbox is empty. A job whose lock is taken is tried again in the next round, because its worker may
    die."""
    while jobs := sorted(inbox.iterdir()):  # noqa: ASYNC240, a local folder
        for job in jobs:
            lease = await client.lock(f"jobs/{job.name}").try_acquire()
            if lease is None:
                continue
            async with lease:  # cancels the body if the lock is lost
                if job.exists():  # another worker may have done it before we got the lock
                    await do(job)
                    lease.check()
                    job.rename(done / job.name)
        await asyncio.sleep(0.1)


async def main(inbox: Path, done: Path) -> None:
    async with multilock.connect_async() as client:  # $MULTILOCK_URL
        await asyncio.gather(*(work(client, inbox, done) for _ in range(WORKERS)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
