"""A lock library that cannot be imported."""

raise RuntimeError("not on this machine")
