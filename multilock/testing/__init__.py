"""The test kit: a conformance suite, a pytest plugin, a fault proxy, helper processes, a clock that the test moves.

Only `multilock.testing.conformance` and the plugin need pytest.
"""

from multilock.testing.hand import HandRuntime
from multilock.testing.network import Network
from multilock.testing.pausing import Killed, Paused, kill, pause
from multilock.testing.process import Helper, hear, say
from multilock.testing.proxy import Connection, Fault, FaultProxy, Traffic

__all__ = [
    "Connection",
    "Fault",
    "FaultProxy",
    "HandRuntime",
    "Helper",
    "Killed",
    "Network",
    "Paused",
    "Traffic",
    "hear",
    "kill",
    "pause",
    "say",
]
