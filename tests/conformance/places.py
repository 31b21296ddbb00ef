"""The backends of this distribution as places under test, each hurt by its own means."""

from __future__ import annotations

import multilock_memory
from multilock import now
from multilock.names import escape
from multilock.testing.conformance import Place

__all__ = ["PLACES", "Memory"]


class Memory(Place):
    scheme = "memory"
    process_url = None

    @property
    def url(self) -> str:
        return f"memory://{self.prefix.strip('/')}"

    def delete(self, name: str) -> None:
        # Nothing but the store itself can take a key away.
        store = multilock_memory._stores[self.prefix.strip("/")]
        with store.mutex:
            store.force(self.prefix + escape(name), now())
        store.deliver()

    def leftovers(self) -> list[str]:
        store = multilock_memory._stores.get(self.prefix.strip("/"))
        return sorted(store.names) if store else []


PLACES = {"memory": Memory}
