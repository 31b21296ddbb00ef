"""What is the same for every backend and both faces: from acquire() to on_lost. Nobody imports it by name."""

__all__: list[str] = []
