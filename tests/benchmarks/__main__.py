"""``make bench``: run all benchmarks, or some with ``python -m tests.benchmarks redis etcd …``.

The results are printed as tables, stored as dated JSON under ``results``, and written into docs/performance.md. The
text of that page between the tables does not change.

A contender is a lock, or another way to send requests, whose time is measured. All contenders of a part take turns in
the same minutes on the same machine, so the ratios of their times are meaningful, but not the times themselves. Each
part runs in its own process, so that threads and memory of other parts do not affect it.
"""

from __future__ import annotations

import subprocess
import sys

from tests.benchmarks import page


def main() -> None:
    parts = sys.argv[1:] or list(page.PARTS)
    if unknown := [part for part in parts if part not in page.PARTS]:
        sys.exit(f"no such part: {', '.join(unknown)}; there are {', '.join(page.PARTS)}")
    for part in parts:
        subprocess.run([sys.executable, "-m", f"tests.benchmarks.{part}"], check=True)


if __name__ == "__main__":
    main()
