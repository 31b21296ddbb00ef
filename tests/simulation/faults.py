"""The faults of a run. To add a fault, write a function here, and name it in `plan.PROFILES`. The faults of a single
backend are in the module of its simulated server, in the table ``SIMULATED``.

A fault that makes the server forget or end a lease must call `Oracles.excuse` at that moment, because the oracles would
report the loss as a violation.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.simulation.plan import Fault, Operation
from tests.simulation.scheduler import Process
from tests.simulation.server import Strike

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["strike"]

#: Faults that disturb only the process to which they happen.
OF_ONE = {"pause", "part", "cut", "cut_all", "lose_reply", "late_request", "late_reply", "newcomer", "close"}
OF_ONE |= {"remove_agent", "repeat_request"}
MOMENTARY = {"cut", "cut_all", "lose_reply", "newcomer", "compact"}


def strike(world: World, fault: Fault, process: Process) -> None:
    """Cause a fault now, of this process or of a server that it uses."""
    world.struck.append(fault)
    world.sim.note(process, f"FAULT {fault.kind} {fault.seconds:.3f}")
    seconds = 0.0 if fault.kind in MOMENTARY else fault.seconds
    world.oracles.disturb(process if fault.kind in OF_ONE else None, seconds, fault.kind)
    happens: Strike = world.simulated.faults.get(fault.kind) or globals()[fault.kind]
    happens(world, fault, process)


# Processes


def pause(world: World, fault: Fault, process: Process) -> None:
    for each in world.sim.processes if world.plan.backend == "memory" else [process]:
        world.sim.pause(each)
        world.sim.after(fault.seconds, world.sim.resume, each)


def kill(world: World, fault: Fault, process: Process) -> None:
    """Kill a process (SIGKILL). If its host fails as well, servers notice the end of its connections much later."""
    host_too = fault.choice % 3 == 0
    for sock in world.network.of(process):
        sock.dies(host_too)
    world.sim.kill(process, "its host dies" if host_too else "SIGKILL")


def close(world: World, fault: Fault, process: Process) -> None:
    world.close(process)


def newcomer(world: World, fault: Fault, process: Process) -> None:
    """Let a new worker acquire one of the names now, in addition to the plan of its process."""
    name = "ab"[fault.choice % 2]
    if kind := world.kinds.get(name):
        timeout = 0.0 if fault.choice % 3 else 0.5
        fair = kind == "lock" and fault.choice % 5 < 2
        operation = Operation(kind, [name], 2.0, 0.0, 0.05, 0.01, timeout, fair, permits=world.permits)
        world.begin(process, [operation], f"n{fault.nth}")


# The network


def part(world: World, fault: Fault, process: Process) -> None:
    for server in world.servers if fault.choice % 2 else [world.server(fault)]:
        world.network.part(process, server, fault.seconds)


def part_all(world: World, fault: Fault, process: Process) -> None:
    for each in world.sim.processes:
        for server in world.servers:
            world.network.part(each, server, fault.seconds)


def cut(world: World, fault: Fault, process: Process) -> None:
    if sockets := world.network.of(process):
        silently = fault.choice % 7 == 0 and world.plan.profile != "cuts"
        random.Random(fault.choice).choice(sockets).cut(silently=silently)


def cut_all(world: World, fault: Fault, process: Process) -> None:
    for sock in world.network.of(process):
        sock.cut()


def lose_reply(world: World, fault: Fault, process: Process) -> None:
    """Cut the connections to one server. The server still executes the requests that were sent."""
    for sock in world.network.of(process, world.server(fault)):
        sock.cut()
        sock.loses = False


def late_request(world: World, fault: Fault, process: Process) -> None:
    """Delay the request that is being sent to one server. The client may give up before it arrives."""
    world.network.part(process, world.server(fault), fault.seconds)


def late_reply(world: World, fault: Fault, process: Process) -> None:
    """Delay the replies to the requests that were sent. Let no later data arrive until a lease may have expired."""
    ttl = world.plan.processes[0].ttl
    late = 0.15 * ttl  # a request may take a fifth of the ttl

    def part(seconds: float) -> None:
        for server in world.servers:
            world.network.part(process, server, seconds)

    part(late)
    world.sim.after(late, part, ttl + fault.seconds)
    world.oracles.disturb(process, late + ttl + fault.seconds, fault.kind)


# Servers


def stop_server(world: World, fault: Fault, process: Process) -> None:
    server = world.server(fault)
    server.stop()
    world.sim.after(fault.seconds, server.go_on)


def restart(world: World, fault: Fault, process: Process) -> None:
    """End a server that keeps its data, and start it again."""
    server = world.server(fault)
    if server.up:
        server.end(forgets=False)
        world.sim.after(fault.seconds, server.start)


def forget(world: World, fault: Fault, process: Process) -> None:
    """End a server, which loses its data. Of several servers only one at a time may lose data, as Redlock requires."""
    server = world.server(fault)
    if world.group.decides(server):
        world.oracles.excuse(None)
    elif not all(each.up and world.sim.time - each.started > 12 for each in world.servers):
        return
    if server.up:
        server.end(forgets=True)
        world.sim.after(fault.seconds, server.start)


def flush_scripts(world: World, fault: Fault, process: Process) -> None:
    world.server(fault).lose_scripts()


def step_clock(world: World, fault: Fault, process: Process) -> None:
    if world.group.keeper("a"):
        ahead = fault.choice % 2
        if ahead:
            world.oracles.excuse(None)
        for server in world.servers:
            server.step += fault.seconds if ahead else -fault.seconds
            server.went_back = server.went_back or not ahead


# Operators


def evict(world: World, fault: Fault, process: Process) -> None:
    """Delete the key of a lock on one server."""
    name = "ab"[fault.choice % 2]
    if server := world.group.keeper(name):
        world.oracles.excuse(name if server.keeps_tokens else None)
        for claim in server.holders(world.key(name)):
            world.event_of("forced", claim)
        server.delete(world.key(name))


def force(world: World, fault: Fault, process: Process) -> None:
    world.force(process, "ab"[fault.choice % 2])
