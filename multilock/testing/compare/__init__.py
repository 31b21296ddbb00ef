"""Compare lock backends: how each behaves when a fault happens.

    from multilock.testing import compare

    report = compare.run(["redis://localhost:6379"], scenarios=["pause", "partition"], cycles=20)
    assert report.exit_code == 0, report.violations + report.void

In each cycle three contenders compete, one fault happens, and the beliefs that they recorded are judged. Controls,
which are known to be weak, run as well: if they do not fail, the report is void. Any lock library can take part through
an `Adapter`. It needs Linux, or another system with SIGSTOP and one CLOCK_MONOTONIC for all processes.
"""

from multilock.testing.compare.changes import against
from multilock.testing.compare.contestants import Adapter, Holding, Lock, Place
from multilock.testing.compare.report import Report, read_report, verify
from multilock.testing.compare.runner import INTERRUPTED, Progress, run
from multilock.testing.compare.scenarios import SCENARIOS, Scenario

__all__ = [
    "INTERRUPTED",
    "SCENARIOS",
    "Adapter",
    "Holding",
    "Lock",
    "Place",
    "Progress",
    "Report",
    "Scenario",
    "against",
    "read_report",
    "run",
    "verify",
]
