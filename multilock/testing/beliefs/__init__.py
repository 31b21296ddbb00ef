"""Record when processes believe that they hold a lock, on one common clock, and judge the records.

Each contender records its requests and their results with `note` (see `witness` for the lines). A `Record` of these
lines has the checks below, called oracles. A violation that an oracle reports is certain:

| | | |
| --- | --- | --- |
| O1 | `Record.overlaps` | two processes never believe that they hold a name at the same time |
| O2 | `LedgerServer.lost` | a fenced read-modify-write loses nothing |
| O3 | `Record.token_regressions` | a later holder has a greater token |
| O4 | `Record.late_callbacks` | a callback starts in time, and before the next holder |
| O5 | `Record.slow_takeovers` | a free name gets a holder within the bound |
| O6 | `Record.miscounted_callbacks` | one callback for a loss, none after a release |

`judge` returns a verdict on one pair of holders: *kept*, *broken* or *undecided*. `Believers` does both for a test: it
records what clients hold, in every process, and judges the records. `multilock.testing.compare` checks for leftovers at
the server (O7).
"""

from multilock.testing.beliefs.believers import Believers, Verdict
from multilock.testing.beliefs.judge import Apart, Outcome, judge
from multilock.testing.beliefs.ledger import Account, LedgerServer
from multilock.testing.beliefs.oracles import Belief, FaultPeriod, Record
from multilock.testing.beliefs.witness import note, watch_pulse

__all__ = [
    "Account",
    "Apart",
    "Belief",
    "Believers",
    "FaultPeriod",
    "LedgerServer",
    "Outcome",
    "Record",
    "Verdict",
    "judge",
    "note",
    "watch_pulse",
]
