"""Row 5, Consul's own lock: a renewed session, one-shot with a limit, a channel that closes when the leader is none.

    MULTILOCK_URL=consul://127.0.0.1:8500 python docs/examples/systems/row05_consul_lock.py

You should see a second contender give up after its limit, the loss told when an operator takes the lock, and a release
that may be called again. The session's time and the lock delay are facts of `client.capabilities`.
"""

from queue import SimpleQueue

import multilock

told: SimpleQueue[multilock.Loss] = SimpleQueue()
with multilock.connect() as client, multilock.connect() as other:
    print("lock delay, s:", client.capabilities.lock_delay)
    lease = client.lock("service/leader", on_lost=told.put).acquire()
    print("one-shot:", other.lock("service/leader").try_acquire(timeout=0.5))
    client.force_release("service/leader")  # what an operator does
    loss = lease.wait_lost(timeout=30)  # the "leader channel"
    assert loss is not None
    assert not lease.is_held()
    print("told:", told.get(timeout=30).reason.value)
    print("released:", lease.release(), lease.release())  # it is not ours any more; again is harmless
