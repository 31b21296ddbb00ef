"""A lock library whose import already fails."""

raise RuntimeError("not on this machine")
