"""Draw a takeover as it happened: three processes campaign, and the leader is killed with SIGKILL.

    python -m docs.images.takeover redis://127.0.0.1:6379/0 > docs/images/takeover.svg

Each process reports when it was elected and when its leadership ended. All times are of one host's clock.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from html import escape

import multilock

NAMES = ("node-1", "node-2", "node-3")
TTL = 3.0
SECONDS = 9.0
CANDIDATE = """
import sys, time, multilock
client = multilock.connect(sys.argv[1], ttl=float(sys.argv[3]))
def say(what):
    print(what, time.time(), flush=True)
election = client.election("takeover", identity=sys.argv[2],
    on_elected=lambda leadership: say(f"elected {leadership.term}"), on_lost=lambda loss: say("ended 0"))
with election:
    sys.stdin.readline()
"""
WIDTH, LANE, LEFT, TOP = 900, 52, 90, 58


def run(url: str) -> tuple[float, float, list[tuple[str, float, float | None]]]:
    """Return the time of the first leader, the time of SIGKILL, and each leadership: its node, its start and its end.

    The end is the time of SIGKILL, or None for a node that was not killed.
    """
    nodes = {
        name: subprocess.Popen(
            [sys.executable, "-c", CANDIDATE, url, name, str(TTL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in NAMES
    }
    with multilock.connect(url) as client:
        seen = client.election("takeover")
        while not (leader := seen.leader()):
            time.sleep(0.01)
        began = time.time()
        time.sleep(SECONDS / 3)
        os.kill(nodes[leader.identity].pid, signal.SIGKILL)
        killed = time.time()
        time.sleep(began + SECONDS - time.time())
    led: list[tuple[str, float, float | None]] = []
    for name, node in nodes.items():
        said = [line.split() for line in node.communicate("\n")[0].splitlines()]
        elected = [float(words[-1]) for words in said if words[0] == "elected"]
        led += [
            (name, max(at, began), killed if name == leader.identity else None)
            for at in elected
            if at < began + SECONDS
        ]
    return began, killed, sorted(led, key=lambda each: each[1])


def draw(began: float, killed: float, led: list[tuple[str, float, float | None]]) -> str:
    def x(moment: float) -> float:
        return LEFT + (moment - began) / SECONDS * (WIDTH - LEFT - 20)

    (first, _, _), (second, taken, _) = led[:2]
    title = f"{first} is killed; {taken - killed:.1f} s later its lease has ended, and {second} leads (ttl {TTL:g} s)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{TOP + LANE * 3 + 40}" role="img" '
        f'viewBox="0 0 {WIDTH} {TOP + LANE * 3 + 40}" aria-label="{escape(title)}">',
        "<style>text{font:15px system-ui,sans-serif;fill:#16191d}.soft{fill:#57606a}.lane{fill:#f0f2f4}"
        ".led{fill:#0072b2}.rest{fill:none;stroke:#0072b2;stroke-dasharray:4 3}"
        ".kill{stroke:#c9291b;stroke-width:2}</style>",
        f'<rect width="{WIDTH}" height="{TOP + LANE * 3 + 40}" fill="#fff"/>',
        f'<text x="12" y="28" font-weight="700">{escape(title)}</text>',
    ]
    for lane, name in enumerate(NAMES):
        y = TOP + LANE * lane
        parts.append(f'<text x="12" y="{y + 24}">{name}</text>')
        parts.append(f'<rect class="lane" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 20}" height="36" rx="4"/>')
        for leader, since, until in led:
            if leader == name:
                end = until or began + SECONDS
                parts.append(
                    f'<rect class="led" x="{x(since):.1f}" y="{y}" width="{x(end) - x(since):.1f}" height="36" rx="4"/>'
                )
                parts.append(f'<text x="{x(since) + 8:.1f}" y="{y + 23}" style="fill:#fff">leads</text>')
        if name == first:
            parts.append(
                f'<rect class="rest" x="{x(killed):.1f}" y="{y + 1}" width="{x(taken) - x(killed):.1f}" height="34"/>'
                f'<text class="soft" x="{x(killed) + 8:.1f}" y="{y + 23}">its lease still lasts</text>'
            )
    bottom = TOP + LANE * 3
    parts.append(f'<line class="kill" x1="{x(killed):.1f}" x2="{x(killed):.1f}" y1="{TOP - 14}" y2="{bottom - 8}"/>')
    parts.append(f'<text x="{x(killed) + 6:.1f}" y="{bottom + 10}" style="fill:#c9291b">SIGKILL</text>')
    parts += [
        f'<text class="soft" x="{x(began + second):.1f}" y="{bottom + 32}" text-anchor="middle">{second} s</text>'
        for second in range(0, int(SECONDS) + 1, 3)
    ]
    return "\n".join([*parts, "</svg>"])


if __name__ == "__main__":
    print(draw(*run(sys.argv[1])))
