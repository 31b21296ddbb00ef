"""The features of Consul's own lock: a renewed session, one try with a time limit, and a channel that closes after a
loss.

    MULTILOCK_URL=consul://127.0.0.1:8500 python docs/examples/systems/row05_consul_lock.py

You should see a second contender give up after its time limit, a loss reported when an operator takes the lock, and a
repeated release. `client.capabilities` has the lock delay.
"""

from queue import SimpleQueue

import multilock

told: SimpleQueue[multilock.Loss] = SimpleQueue()
with multilock.connect() as client, multilock.connect() as other:
    print("lock delay, s:", client.capabilities.lock_delay)
    lease = client.lock("service/leader", on_lost=told.put).acquire()
    print("one-shot:", other.lock("service/leader").try_acquire(timeout=0.5))
    client.force_release("service/leader")  # as an operator would
    loss = lease.wait_lost(timeout=30)  # in place of the "leader channel" of Consul's Go client
    assert loss is not None
    assert not lease.is_held()
    print("told:", told.get(timeout=30).reason.value)
    print("released:", lease.release(), lease.release())  # False twice: the lock was lost
