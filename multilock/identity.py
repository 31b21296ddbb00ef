"""The identity of a client: the text that shows others which program holds a lock."""

from __future__ import annotations

from multilock import system
from multilock.names import check_text

__all__ = ["check_identity", "default_identity"]

IDENTITY_MAX = 255  # characters, and bytes if percent-encoded: it must fit into the key or value of every backend
DEFAULT_IDENTITY_MAX = 64  # characters


def check_identity(identity: object) -> str:
    """Return ``identity`` if it is valid: 1 to 255 characters, no control characters, and at most 255 bytes in
    percent-encoding. Raises TypeError or ValueError otherwise."""
    from urllib.parse import quote  # imported late, as in `names.escape`

    text = check_text(identity, "identity", IDENTITY_MAX)
    if (encoded := len(quote(text, safe=""))) > IDENTITY_MAX:
        raise ValueError(f"identity has {encoded} bytes in percent-encoding: at most {IDENTITY_MAX} are allowed")
    return text


def default_identity() -> str:
    """Return ``host:pid`` of this process. The host name is cut so that the result has at most 64 characters."""
    pid = f":{system.pid()}"
    return system.host()[: DEFAULT_IDENTITY_MAX - len(pid)] + pid
