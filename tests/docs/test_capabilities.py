"""The table of capabilities in docs/choosing.md agrees with the code.

``python -m tests.docs.test_capabilities`` writes the table.
"""

from __future__ import annotations

from pathlib import Path

import multilock

PAGE = Path(__file__).parents[2] / "docs" / "choosing.md"
BEGIN, END = "<!-- capabilities: written from the code -->\n", "<!-- end of capabilities -->"
URLS = {
    "memory": "memory://",
    "sqlite": "sqlite:////var/tmp/locks.db",
    "redis": "redis://localhost",
    "redlock": "redlock://h1,h2,h3",
    "etcd": "etcd://localhost",
    "consul": "consul://localhost",
    "zookeeper": "zookeeper://localhost",
    "postgresql": "postgresql://localhost",
}
ROWS = {
    "fencing token": "fencing",
    "fair order": "fair",
    "waiters are pushed": "push_wait",
    "losses are pushed": "push_loss",
    "across hosts": "cross_host",
    "survives a failover": "survives_failover",
    "a name may rest (`hold_at_least`)": "hold_at_least",
    "readers and writers": "read_write",
    "semaphores": "semaphore",
    "smallest ttl, s": "ttl_min",
    "greatest ttl, s": "ttl_max",
    "takeover bound, s (ttl 30)": "takeover_bound",
    "lock delay, s": "lock_delay",
}


def shown(value: object) -> str:
    return (
        {True: "yes", False: "no"}[value]
        if isinstance(value, bool)
        else f"{value:.10g}"
        if isinstance(value, float)
        else str(value)
    )


def table() -> str:
    capabilities = []
    for url in URLS.values():
        with multilock.connect(url) as client:
            capabilities.append(client.capabilities)
    lines = [["", *URLS], ["---"] * (len(URLS) + 1)]
    lines += [[title, *(shown(getattr(each, field)) for each in capabilities)] for title, field in ROWS.items()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def test_the_table_of_capabilities_agrees_with_the_code() -> None:
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0] == table()


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
