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

from tests.simulation.defects import try_all
from tests.simulation.plan import BACKENDS, FACES, PROFILES, Plan, make_plan
from tests.simulation.search import search
from tests.simulation.threads import install

SHOWN = 1500  # characters of a violation


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    plain = argparse.ArgumentParser(add_help=False)
    plain.add_argument("--backend", choices=BACKENDS, default="redis")
    plain.add_argument("--face", choices=FACES, default="blocking")
    plain.add_argument("--profile", choices=PROFILES)
    timed = argparse.ArgumentParser(add_help=False)
    timed.add_argument("--seconds", type=float, default=math.inf, help="of processor time")
    seeds = commands.add_parser("seeds", parents=[plain, timed])
    seeds.add_argument("first", type=int)
    seeds.add_argument("last", type=int)
    replay = commands.add_parser("replay", parents=[plain])
    shrink = commands.add_parser("shrink", parents=[plain, timed])
    for each in (replay, shrink):
        each.add_argument("plan", help="a seed, or a file")
        each.add_argument("--out", type=Path, required=each is shrink)
    commands.add_parser("search").add_argument("--seconds", type=float, default=math.inf)
    commands.add_parser("defects").add_argument("word", help="part of their names")
    args, options = parser.parse_known_args(arguments)
    if args.command == "defects":
        return try_all(args.word, options)
    if options:
        parser.error(f"unknown: {' '.join(options)}")
    if args.command == "search":
        return search(args.seconds)
    install()
    if args.command == "seeds":
        return run_seeds(args)
    return replay_one(args) if args.command == "replay" else shrink_one(args)


def run_seeds(args: argparse.Namespace) -> int:
    from tests.simulation.world import run

    began, seed, grants = time.process_time(), args.first, 0
    for seed in range(args.first, args.last):
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
    count = seed - args.first + 1
    speed = count / (time.process_time() - began)
    print(f"{count} seeds of {args.backend}, {args.face}: no oracle objects; {grants} grants, {speed:.1f} seeds/s")
    return 0


def plan_of(args: argparse.Namespace) -> Plan:
    if args.plan.isdigit():
        return make_plan(int(args.plan), args.backend, args.face, args.profile)
    return Plan.from_json(Path(args.plan).read_text())


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
    args.out.write_text(plan.to_json() + "\n")
    print(f"{plan.size()} operations and faults in {args.out}: {oracle}: {text[:SHOWN]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
