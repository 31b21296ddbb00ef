"""A lock library that is broken already as it is imported."""

raise RuntimeError("not on this machine")
