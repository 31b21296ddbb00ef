"""What processes believe about a lock, on one clock: written down by each, judged from outside.

Contenders `note` what they ask and what they are told (`witness` lists the lines). A `Record` of those lines answers
the oracles; what it calls a violation is certain:

| | | |
| --- | --- | --- |
| O1 | `Record.overlaps` | two never believe in one name at the same time |
| O2 | `LedgerServer.lost` | a fenced read-modify-write loses nothing |
| O3 | `Record.token_regressions` | a later holder has a greater token |
| O4 | `Record.late_callbacks` | a callback begins in time, and before the next holder |
| O5 | `Record.slow_takeovers` | a free name has a holder within the bound |
| O6 | `Record.miscounted_callbacks` | one callback for a loss, none after a release |

`judge` tells *kept* from *undecided* besides, for those who count cases. `Believers` does all of it for a test: it
writes down what clients hold, in every process, and judges. Leftovers (O7) are for whoever knows the server.
"""

from multilock.testing.beliefs.believers import Believers, Verdict
from multilock.testing.beliefs.judge import Apart, Outcome, judge
from multilock.testing.beliefs.ledger import Account, LedgerServer
from multilock.testing.beliefs.oracles import Belief, Fault, Record
from multilock.testing.beliefs.witness import note, watch_pulse

__all__ = [
    "Account",
    "Apart",
    "Belief",
    "Believers",
    "Fault",
    "LedgerServer",
    "Outcome",
    "Record",
    "Verdict",
    "judge",
    "note",
    "watch_pulse",
]
