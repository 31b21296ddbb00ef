"""The memory backend in the simulation: all processes of a run share one store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import multilock_memory
from tests.simulation.server import PREFIX, Simulated

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["SIMULATED"]


def _open(world: World, ttl: float) -> Any:
    return multilock_memory.open_backend("memory://simulation", {"prefix": PREFIX})


SIMULATED = {"memory": Simulated(_open, lacks="kill", forgets=multilock_memory._stores.clear)}
