"""Each partition has one consumer at a time, and the processes share the partitions.

    pip install 'multilock[redis]'
    export MULTILOCK_URL=redis://127.0.0.1:6379/0
    python partitions.py & python partitions.py

You should see each partition consumed by one process at a time, in turns. If you end a process, the other process takes
its partitions over. There is one fair lock for each partition. A consumer keeps a partition for a limited time and then
joins the queue again, so a process that starts later gets some partitions, too.
"""

from __future__ import annotations

import asyncio
import os
import random

import multilock

URL = os.environ.get("MULTILOCK_URL", "redis://127.0.0.1:6379/0")
PARTITIONS = range(4)
KEPT = 2.0  # seconds; in production minutes


async def consume(partition: int) -> None:
    """Consume for as long as this process keeps the partition. If your queue has offsets, commit the offset here."""
    print("partition", partition, "begins in pid", os.getpid(), flush=True)
    try:
        await asyncio.sleep(KEPT)
    finally:
        print("partition", partition, "ends in pid", os.getpid(), flush=True)


async def take_part(client: multilock.AsyncClient, partition: int) -> None:
    while True:
        async with client.lock(f"orders/{partition}", fair=True, ttl=10):  # a loss cancels the body at once
            await consume(partition)
        await asyncio.sleep(random.uniform(0.05, 0.1))  # processes that waited are served first


async def main() -> None:
    async with multilock.connect_async(URL) as client, asyncio.TaskGroup() as group:
        for partition in PARTITIONS:
            group.create_task(take_part(client, partition))


if __name__ == "__main__":
    asyncio.run(main())
