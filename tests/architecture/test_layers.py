"""The layers of the code: which module may import which."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from multilock.registry import OURS
from tests.architecture.imports import ROOT, imports_of, module_name, sources

# A module may import modules of its own layer and of earlier layers.
BASE = ("validity", "timers", "runtime", "ticking_thread", "no_pickling", "thread_pool", "interrupts", "messages")
PROCESS = ("living_clients", "fork", "exit", "hard_fence")
WATCHING = ("watchdog", "renewal_threads", "loss_watches", "sessions", "callbacks", "scopes")
REPORTS = ("losses", "notices", "push_outages", "subscribers", "emit")
ASKING = ("blocking", "local_queue", "acquire", "background_cancel", "release", "lease_to_caller", "closing")
LAYERS = [
    {"system", "timing"},
    {"errors", "model", "lease", "names", "identity", "api_mistakes", "values", "events"},
    {"kernel", "kernel.worker", "kernel.inside_backend", "log_thread", "dialling"},
    {"backend"},
    {*(f"kernel.{name}" for name in BASE + PROCESS)},
    {"kernel.holding", "kernel.lock_options"},
    {*(f"kernel.{name}" for name in WATCHING + REPORTS)},
    {*(f"kernel.{name}" for name in ASKING)},
    {"kernel.election_state", "kernel.term", "kernel.leader_changes", "kernel.candidacy"},
    {"kernel.client"},
    {"config", "keywords", "urls", "registry", "options", "database_guard"},
    {"lock", "threading_lock", "shared", "lock_all", "election", "client", "aio", "decorate"},
    {"__init__"},
    {"cli", "testing", "contrib", "__main__"},
]

CORE = [path for path in sources("multilock") if not {"cli", "testing", "contrib"} & set(path.parts)]
PRODUCT = [*(path for path in sources("multilock") if "testing" not in path.parts), *sources("backends")]
BACKENDS = sorted({ours.module for ours in OURS.values()})

# Backends may import only these modules of multilock. The module `log_thread` is needed because threads of a backend
# must not call log handlers.
FOR_BACKENDS = {
    "multilock",
    *(
        f"multilock.{name}"
        for name in ("backend", "names", "options", "system", "timing", "log_thread", "values", "dialling")
    ),
}
SEAM = {"threading", "queue", "time", "random", "select", "selectors", "sched", "concurrent", "_thread"}
LIBRARIES = {
    "multilock_redis": {"redis"},
    "multilock_etcd": {"grpc", "google"},
    "multilock_consul": {"consul"},
    "multilock_zookeeper": {"kazoo"},
    "multilock_postgresql": {"psycopg"},
}

HEAVY = ["asyncio", "secrets", "importlib.metadata", "typing_extensions", "urllib.request", "tomllib", "subprocess"]


def each_of(paths: Iterable[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make one test that applies a rule to each of these files. A failure names the module that broke the rule."""

    def decorate(rule: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            for path in paths:
                try:
                    rule(path)
                except AssertionError as broken:
                    broken.add_note(f"in {module_name(path)}")
                    raise

        test.__name__, test.__doc__ = rule.__name__, rule.__doc__
        return test

    return decorate


def layer_of(module: str) -> int:
    parts = module.split(".")[1:] or ["__init__"]
    name = ".".join(parts[:2] if parts[0] == "kernel" else parts[:1])
    [layer] = [number for number, names in enumerate(LAYERS) if name in names]
    return layer


@each_of(CORE)
def test_a_module_imports_only_its_own_layer_and_those_below(path: Path) -> None:
    module = module_name(path)
    later = {
        name for name in imports_of(path) if name.split(".")[0] == "multilock" and layer_of(name) > layer_of(module)
    }
    # The package loads the asyncio face only on first use, and finds a backend's module by its name.
    assert later == set()


def test_no_two_modules_import_each_other() -> None:
    graph = {module_name(path): imports_of(path, everywhere=False) for path in CORE}
    graph["multilock"].discard("multilock")
    list(graphlib.TopologicalSorter(graph).static_order())


def test_the_picture_in_contributing_shows_these_layers() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    picture = page.partition("## Layers\n")[2].partition("```text")[2].partition("```")[0]
    assert [set(row.replace("/", ".").split()) for row in picture.split("▼")] == LAYERS[::-1]


@each_of(CORE)
def test_the_core_imports_no_backend_and_nothing_outside_the_standard_library(path: Path) -> None:
    foreign = {name.split(".")[0] for name in imports_of(path)} - sys.stdlib_module_names - {"multilock"}
    assert foreign == set()


@each_of(CORE)
def test_only_the_asyncio_face_imports_asyncio(path: Path) -> None:
    if not module_name(path).startswith("multilock.aio"):
        assert "asyncio" not in imports_of(path)


@each_of(sources("backends"))
def test_a_backend_imports_the_interface_its_own_library_and_itself(path: Path) -> None:
    package = module_name(path).split(".")[0]
    allowed = sys.stdlib_module_names | {package} | LIBRARIES.get(package, set())
    names = {name for name in imports_of(path) if name.split(".")[0] not in allowed}
    assert names - FOR_BACKENDS == set()


@each_of(PRODUCT)
def test_only_the_module_for_system_calls_imports_threads_queues_clocks_and_random_numbers(path: Path) -> None:
    used = {name.split(".")[0] for name in imports_of(path)} & SEAM
    # multilock.cli.launch is a separate program, which cannot import `multilock.system`.
    allowed = {"multilock.system": SEAM, "multilock.cli.launch": {"time"}}
    assert used <= allowed.get(module_name(path), set())


@each_of(PRODUCT)
def test_only_the_supervised_worker_starts_threads(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if module_name(path) not in ("multilock.system", "multilock.kernel.worker"):
        assert not re.search(r"system\.Thread\b|\bThread\(|start_new_thread|ThreadPoolExecutor|\bTimer\(", text)


@each_of(PRODUCT)
def test_the_product_does_not_import_its_test_kit(path: Path) -> None:
    """Only the command ``multilock compare`` imports from the test kit: it runs `multilock.testing.compare`."""
    if module_name(path) != "multilock.cli.compare":
        assert not any(name.startswith("multilock.testing") for name in imports_of(path))


def test_importing_multilock_imports_no_heavy_and_no_third_party_module() -> None:
    program = (
        "import sys; before = set(sys.modules); import multilock; "
        "print(*sorted(name for name in set(sys.modules) - before))"
    )
    run = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=False)
    if run.returncode:  # this installation may need the module site, which -S skips
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert [name for name in HEAVY if name in loaded] == []
    assert {name.split(".")[0] for name in loaded} - sys.stdlib_module_names == {"multilock"}


@each_of(sources("multilock", "backends"))
def test_every_module_has_a_docstring_and_a_list_of_exports(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith('"""')
    assert "\n__all__" in text or "\nif __name__ == " in text  # a program has no exports


@each_of([*CORE, *sources("backends")])
def test_only_the_log_thread_calls_log_handlers(path: Path) -> None:
    """A handler may block, but most threads of multilock must not be delayed. `multilock.log_thread` calls the
    handlers."""
    text = path.read_text(encoding="utf-8")
    assert "isEnabledFor(" not in text, "it takes the lock of the logging module: ask logger.wants()"
    if module_name(path) != "multilock.log_thread":
        for call in re.findall(r"getLogger\([^)]*\)\S*", text):
            assert ".addHandler(" in call or ".addFilter(" in call, call


@each_of(sources("multilock", "backends"))
def test_the_state_of_a_lease_is_changed_in_one_file(path: Path) -> None:
    """Only the transitions of a lease change its state, and each transition defines the states before and after it."""
    changes = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "stage" and not isinstance(node.ctx, ast.Load)
    ]
    assert bool(changes) == (module_name(path) == "multilock.kernel.holding")
