"""multilock in the company of other libraries; nothing here is imported unless you do."""

from __future__ import annotations

__all__: list[str] = []
