"""The code shared by every backend and by both APIs (blocking, asyncio). This package is private: no user imports
it."""

__all__: list[str] = []
