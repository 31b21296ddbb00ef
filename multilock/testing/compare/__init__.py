"""Compare lock backends: how each behaves when a fault happens.

    from multilock.testing import compare

    options = compare.Options(scenarios=["pause", "partition"], cycles=20)
    report = compare.run(["redis://localhost:6379"], options)
    assert report.exit_code == 0, report.violations + report.void

A *contestant* is a lock to be judged, a *scenario* is a fault, and a *cell* is one contestant in one scenario. A
*cycle* is one trial of a cell. The contenders A, B and C compete for a name, the fault happens, and the beliefs that
they recorded are judged. Contestants that are known to be weak are *controls*. If they do not fail, the report is
*void*. Any lock library can take part through an `Adapter`. A comparison needs Linux, or another system with SIGSTOP
and one CLOCK_MONOTONIC for all processes.
"""

from multilock.testing.compare.contestants import Adapter, AdapterClient, AdapterHolding, AdapterLock
from multilock.testing.compare.plan import Options
from multilock.testing.compare.report import Report, read_report, verify
from multilock.testing.compare.runner import INTERRUPTED, Progress, run
from multilock.testing.compare.scenarios import SCENARIOS, Scenario
from multilock.testing.compare.summary import against

__all__ = [
    "INTERRUPTED",
    "SCENARIOS",
    "Adapter",
    "AdapterClient",
    "AdapterHolding",
    "AdapterLock",
    "Options",
    "Progress",
    "Report",
    "Scenario",
    "against",
    "read_report",
    "run",
    "verify",
]
