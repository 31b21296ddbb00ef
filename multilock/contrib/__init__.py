"""Integrations with other libraries. None is imported unless the program imports it."""

from __future__ import annotations

__all__: list[str] = []
