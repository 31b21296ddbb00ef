"""Integrations with other libraries. multilock itself imports none of them."""

from __future__ import annotations

__all__: list[str] = []
