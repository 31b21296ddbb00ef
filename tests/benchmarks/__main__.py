"""``make bench``: run all benchmarks, or some with ``python -m tests.benchmarks redis etcd …``.

The results are printed as tables, kept as dated JSON under ``results``, and written into docs/performance.md, where the
other parts stay as they are.

Ratios count, not microseconds: every contender of a part takes its turns in the same minutes on the same machine. Each
part runs in a process of its own, so that it is not affected by threads or memory of another part.
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
