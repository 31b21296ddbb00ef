"""The conformance suite: tests for the behaviour that every backend must have. Needs pytest.

    from multilock.testing.conformance import LockConformance, Place

    class MyPlace(Place):
        url = "mine://127.0.0.1:1234"

        def delete(self, name: str) -> None:
            ...  # remove the key of self.prefix + name from the server, without multilock

    class TestLock(LockConformance):
        backend = MyPlace

A `Place` is one backend with its server. `SUITES` holds all suites. A backend conforms if it has a subclass of each
suite, and all their tests pass. A table of the promises, and of the tests that show them, is in multilock's own
repository: ``tests/conformance/promises.py``.
"""

from multilock.testing.conformance.base import Conformance
from multilock.testing.conformance.client import ClientConformance, CloseConformance
from multilock.testing.conformance.descriptors import DescriptorConformance
from multilock.testing.conformance.election import ElectionConformance
from multilock.testing.conformance.faces import FACES
from multilock.testing.conformance.faulty_backend import Call, FaultyBackend, Mishap
from multilock.testing.conformance.lock import (
    LeaseConformance,
    LockConformance,
    OptionConformance,
    ThreadingConformance,
)
from multilock.testing.conformance.loss import CancelConformance, LossConformance, WithConformance
from multilock.testing.conformance.many import LockAllConformance
from multilock.testing.conformance.outage import OutageConformance
from multilock.testing.conformance.places import Place
from multilock.testing.conformance.process import ProcessConformance
from multilock.testing.conformance.rest import RestConformance
from multilock.testing.conformance.shared import ReadWriteConformance, SemaphoreConformance
from multilock.testing.conformance.spi import BackendConformance

__all__ = [
    "FACES",
    "SUITES",
    "BackendConformance",
    "Call",
    "CancelConformance",
    "ClientConformance",
    "CloseConformance",
    "Conformance",
    "DescriptorConformance",
    "ElectionConformance",
    "FaultyBackend",
    "LeaseConformance",
    "LockAllConformance",
    "LockConformance",
    "LossConformance",
    "Mishap",
    "OptionConformance",
    "OutageConformance",
    "Place",
    "ProcessConformance",
    "ReadWriteConformance",
    "RestConformance",
    "SemaphoreConformance",
    "ThreadingConformance",
    "WithConformance",
]

SUITES: tuple[type[Conformance], ...] = (
    LockConformance,
    ThreadingConformance,
    LeaseConformance,
    OptionConformance,
    LossConformance,
    WithConformance,
    CancelConformance,
    OutageConformance,
    ClientConformance,
    CloseConformance,
    ElectionConformance,
    RestConformance,
    ReadWriteConformance,
    SemaphoreConformance,
    LockAllConformance,
    BackendConformance,
    ProcessConformance,
    DescriptorConformance,
)
