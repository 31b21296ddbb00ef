"""One process of ``multilock demo``: a candidate until its stdin ends, which reports on stdout in JSON lines."""

from __future__ import annotations

import json
import sys

import multilock
from multilock.cli.exits import show_warnings

__all__ = ["main"]


def main() -> None:
    """Read the arguments from the first line of stdin, and be a candidate until stdin ends."""
    show_warnings()
    order = json.loads(sys.stdin.readline())

    def report(leadership: multilock.Leadership) -> None:
        print(json.dumps({"term": leadership.term, "at": multilock.now()}), flush=True)

    name, identity = order.pop("name"), order.pop("identity")
    with multilock.connect(**order) as client, client.election(name, identity=identity, on_elected=report):
        sys.stdin.read()


if __name__ == "__main__":
    main()
