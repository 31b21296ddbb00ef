"""The code shared by all backends and both faces, from acquire() to on_lost. It is private: no user imports it."""

__all__: list[str] = []
