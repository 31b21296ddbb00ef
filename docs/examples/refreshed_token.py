"""An OAuth token that many workers use, and that only one of them refreshes.

    pip install 'multilock[redis]'
    export MULTILOCK_URL=redis://127.0.0.1:6379/0 TOKEN_URL=https://login.example.com/oauth/token
    python refreshed_token.py token.json & python refreshed_token.py token.json; wait

You should see "refreshed" once, and every process use the same token. Many authorization servers accept a refresh token
only once. If two workers send the same refresh token, the second request is refused, and some servers then end the
session of both. So a worker checks the token, takes the lock, checks again, and only then refreshes.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import multilock

client = multilock.connect()  # $MULTILOCK_URL
EARLY = 30.0  # a token is refreshed this many seconds before it expires


def fresh(token: dict[str, Any]) -> bool:
    """Return True if the token can still be used. The times are from the clocks of the hosts, which may differ by
    seconds."""
    return float(token["expires_at"]) - EARLY > time.time()


def refresh(token: dict[str, Any]) -> dict[str, Any]:
    """Ask the authorization server for a new token."""
    form = urllib.parse.urlencode({"grant_type": "refresh_token", "refresh_token": token["refresh_token"]}).encode()
    with urllib.request.urlopen(os.environ["TOKEN_URL"], form, timeout=10) as reply:
        new = json.load(reply)
    return {**token, **new, "expires_at": time.time() + new["expires_in"]}


def access_token(store: Path) -> str:
    """Return a token that can be used now. `store` stands for the row or key where your workers keep it."""
    token = json.loads(store.read_text())
    if not fresh(token):  # the usual case needs no lock
        with client.lock("oauth/crm").acquire(timeout=60) as lease:
            token = json.loads(store.read_text())
            if not fresh(token):  # no other worker refreshed it while we waited
                token = refresh(token)
                lease.check()  # raises LockLost: another worker may have refreshed meanwhile
                beside = store.with_suffix(f".{os.getpid()}")
                beside.write_text(json.dumps(token))
                beside.replace(store)
                print("refreshed by pid", os.getpid(), flush=True)
    return str(token["access_token"])


if __name__ == "__main__":
    with client:
        print("uses", access_token(Path(sys.argv[1])), flush=True)
