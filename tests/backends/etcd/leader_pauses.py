"""Count how often a cluster ends a lease that was renewed in time, because a former leader that was frozen resumes.

python -m tests.backends.etcd.leader_pauses 20
MULTILOCK_TEST_ETCD_RELEASE=trixie python -m tests.backends.etcd.leader_pauses 20

This program is not a test, because only etcd can prevent the loss. The loss happened in 3 of 20 pauses on 3.4.23, and
in 4 of 32 on 3.5.16, although a change in 3.5.13 should prevent it. The holder is notified at once.
"""

from __future__ import annotations

import random
import sys
import time

import multilock
from multilock import LossReason
from tests.servers_etcd import EtcdCluster

__all__ = ["ended_early"]

TTL = 4.0


def ended_early(pauses: int) -> tuple[int, int]:
    """Return in how many pauses a renewed lease ended too early, and in how many it did not end.

    The remaining pauses do not count, because a reply was late.
    """
    early = kept = 0
    with EtcdCluster() as cluster, multilock.connect(cluster.url, ttl=TTL) as client:
        for _ in range(pauses):
            lease = client.lock("job").acquire(timeout=30)
            leader = cluster.leader()
            leader.pause()
            # The pause is longer than the ttl, so the former leader believes that the lease has expired.
            time.sleep(TTL * random.uniform(1.0, 1.4))
            leader.resume()
            loss = lease.wait_lost(timeout=TTL / 2)
            if loss is None:
                kept += 1
                lease.release()
            elif loss.reason is LossReason.SESSION_LOST and loss.detected_at < loss.valid_until:
                early += 1
    return early, kept


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    revoked, outlived = ended_early(number)
    print(f"{number} pauses of the leader: {revoked} leases ended although renewed, {outlived} continued")
