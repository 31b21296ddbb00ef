"""The code shared by every backend and by both APIs (blocking, asyncio). It is private: no user imports it."""

__all__: list[str] = []
