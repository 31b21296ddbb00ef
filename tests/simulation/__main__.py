"""Run multilock's own code in virtual time, over simulated servers, with seeded faults.

python -m tests.simulation seeds 0 100 --backend redis --face asyncio    these seeds; exit 1 after a violation
python -m tests.simulation replay 17 --backend redis                     one seed twice; its trace to a file
python -m tests.simulation replay tests/simulation/regressions/x.json    the same with a plan from a file
python -m tests.simulation shrink 17 --backend redis --out plan.json     a smaller plan that fails alike
python -m tests.simulation search --seconds 600                          new seeds on all cores, counted
python -m tests.simulation defects redis- --seconds 30                   which seeded defects are found, and how soon
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

from tests.simulation.plan import BACKENDS, FACES, PROFILES, Plan, make_plan
from tests.simulation.search import search, try_defects
from tests.simulation.threads import install

SHOWN = 1500  # characters of a violation that are printed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["seeds", "replay", "shrink", "search", "defects"])
    parser.add_argument("what", nargs="*", help="the first seed and the last; a seed or a file; part of names")
    parser.add_argument("--backend", choices=BACKENDS, default="redis")
    parser.add_argument("--face", choices=FACES, default="blocking")
    parser.add_argument("--profile", metavar=f"{{{','.join(PROFILES)},…}}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of processor time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.command == "search":
        return search(args.seconds)
    if args.command == "defects":
        return try_defects(args.what[0], arguments[2:])
    install()
    return {"seeds": run_seeds, "replay": replay_one, "shrink": shrink_one}[args.command](args)


def run_seeds(args: argparse.Namespace) -> int:
    from tests.simulation.world import run

    first, last = map(int, args.what)
    began, seed, grants = time.process_time(), first, 0
    for seed in range(first, last):
        result = run(make_plan(seed, args.backend, args.face, args.profile), halts=True)
        grants += result.grants
        if result.violations:
            oracle, text = result.violations[0]
            print(f"seed {seed} ({result.plan.profile}): {oracle}: {text[:SHOWN]}")
            profile = f" --profile {args.profile}" if args.profile else ""
            print(f"  python -m tests.simulation replay {seed} --backend {args.backend} --face {args.face}{profile}")
            return 1
        if time.process_time() - began > args.seconds:
            break
    count = seed - first + 1
    speed = count / (time.process_time() - began)
    print(f"{count} seeds of {args.backend}, {args.face}: no oracle objects; {grants} grants, {speed:.1f} seeds/s")
    return 0


def plan_of(args: argparse.Namespace) -> Plan:
    [what] = args.what
    if what.isdigit():
        return make_plan(int(what), args.backend, args.face, args.profile)
    return Plan.from_json(Path(what).read_text())


def replay_one(args: argparse.Namespace) -> int:
    from tests.simulation.world import run

    first, second = (run(plan_of(args), trace=True) for _ in range(2))
    same = (first.trace, first.hash) == (second.trace, second.hash)
    print(f"{first.plan.size()} operations and faults, {len(first.trace)} lines: {'the same' if same else 'DIFFERENT'}")
    if args.out:
        args.out.write_text("\n".join(first.trace) + "\n")
    for oracle, text in first.violations:
        print(f"{oracle}: {text[:SHOWN]}")
    return int(not same or bool(first.violations))


def shrink_one(args: argparse.Namespace) -> int:
    from tests.simulation.shrink import shrink

    plan, oracle, text = shrink(plan_of(args), args.seconds)
    out = args.out or Path("plan.json")
    out.write_text(plan.to_json() + "\n")
    print(f"{plan.size()} operations and faults in {out}: {oracle}: {text[:SHOWN]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
