"""A lock in production: settings from a file, log lines with the id of a lease, metrics, and a drill.

    cd docs/examples/systems && python row11_production.py        # reads multilock.toml

You should see a log line with the id of the lease, two metrics, and a lock that an operator takes from its holder.
"""

import logging
import threading
from pathlib import Path

from prometheus_client import generate_latest

import multilock
from multilock.contrib import prometheus

FORMAT = "%(levelname)s %(message)s lock=%(lock_name)s owner=%(lock_owner)s token=%(lock_token)s"

handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter(FORMAT))
logging.getLogger("multilock").addHandler(handler)

# The profile is $MULTILOCK_PROFILE, or the default of the file. A URL in $MULTILOCK_URL takes precedence over both.
with multilock.connect(config=Path(__file__).with_name("multilock.toml")) as client:
    prometheus.instrument(client)
    for finding in client.diagnose():  # settings of this server that weaken the lock
        print(finding.level, finding.message)

    lost = threading.Event()
    client.events.subscribe(lambda event: lost.set() if isinstance(event, multilock.Lost) else None)
    with client.lock("orders") as lease:
        print("healthy:", client.is_healthy(), "owner:", lease.owner)
    lease = client.lock("orders").acquire()
    client.force_release("orders")  # the drill
    assert lost.wait(30)
    assert not lease.is_held()

# Prometheus would scrape these lines.
for line in generate_latest().decode().splitlines():
    if line.startswith(("multilock_acquires_total", "multilock_losses_total")):
        print(line)
