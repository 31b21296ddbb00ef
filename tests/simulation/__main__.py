"""``python -m tests.simulation``: run seeds, replay one, or shrink it."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.threads import install

if __name__ == "__main__":
    install()
    from tests.simulation.plan import make_plan
    from tests.simulation.world import run

    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--backend", default="redis")
    parser.add_argument("--face", default="blocking")
    parser.add_argument("--profile")
    parser.add_argument("--trace", action="store_true")
    args = parser.parse_args()
    began = time.process_time()
    n = grants = steps = 0
    virtual = 0.0
    for seed in range(args.first, args.last):
        out = run(make_plan(seed, args.backend, args.face, args.profile), trace=args.trace)
        n += 1
        grants += out.grants
        steps += out.steps
        virtual += out.seconds
        if args.trace:
            print("\n".join(out.trace))
        for kind, text in out.violations[:2]:
            print(seed, out.plan.profile, kind, text[:1200], flush=True)
    took = time.process_time() - began
    print(f"{n} seeds {took:.1f} s {n/took:.1f}/s {steps/took:.0f} steps/s {grants} grants {virtual/took:.0f} virtual s/s", file=sys.stderr)
