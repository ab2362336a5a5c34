"""The house: which module may import which, read from the sources with ``ast``.

Imports point down only. Within the SDK each floor may import the floors beneath it, and nothing
beside it unless it is listed; the kernel stands apart and takes little from the SDK; nothing
imports the testing tools.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rebuno_sync

PACKAGE = Path(rebuno_sync.__file__).parent
ROOT = PACKAGE.name

#: The SDK from top to bottom; every module of it has its floor.
FLOORS: list[set[str]] = [
    {"serving.web_agent"},
    {"serving.flask_blueprint", "serving.server"},
    {"serving.gunicorn_hooks"},
    {"agent"},
    {"attempt", "processes"},
    {"inputs"},
    {"workers"},
    # Effects record through the context; the agent knows none of them.
    {"effects.llm_bridge", "effects.mcp"},
    {"effects.llm_clients"},
    {"effects.llm_httpx", "effects.llm_requests"},
    {"effects.llm_call"},
    {"effects.llm_stream"},
    {"effects.step", "effects.tool", "effects.llm", "effects.llm_live", "effects.mcp_connection"},
    {"effects.options", "effects.background"},
    {"context"},
    # Nothing imports these: an app switches them on.
    {"telemetry.opentelemetry", "telemetry.prometheus"},
    {"outcomes", "step_watches", "kernel_client"},
    {"decisions", "lease", "client", "agent_secrets", "claims"},
    {"transport", "signing"},
    {"connections", "wire"},
    {"errors"},
    # What knows nothing of Rebuno.
    {"slow_peers"},
    {"functions", "forks", "threads", "uwsgi", "logs", "observers"},
    {"event_stream", "live_text", "long_integers", "version"},
]
#: What the embedded kernel takes from the SDK; ``live_text`` is how the words of a model are read
#: from its stream, which the kernel's page shows as the command line does.
KERNEL_TAKES = {"errors", "wire", "signing", "version", "live_text", "slow_peers"}
#: Modules over this many lines need a reason in the list beneath.
LONGEST = 500
EXPLAINED: dict[str, str] = {
    "kernel.api": "every route of PROTOCOL 4 and 9, one method each",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in SOURCES.items()}


def imports(module: str, tree: ast.AST | None = None) -> Iterator[str]:
    """Every import in a module: ours by the name within the package, others as they are named.

    Names that ``rebuno_sync`` itself offers count as an import of the package, ``""``.
    """
    package = SOURCES[module].relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(tree or TREES[module]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _ours(alias.name) if _is_ours(alias.name) else alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = list(package[: len(package) - node.level + 1])
            elif _is_ours(node.module or ""):
                base = []
            else:
                yield node.module or ""
                continue
            if node.module:
                base += (node.module if node.level else _ours(node.module)).split(".")
            stem = ".".join(part for part in base if part)
            for alias in node.names:
                inner = f"{stem}.{alias.name}" if stem else alias.name
                yield inner if inner in SOURCES else stem


def _is_ours(name: str) -> bool:
    return name == ROOT or name.startswith(f"{ROOT}.")


def _ours(name: str) -> str:
    return name.removeprefix(ROOT).removeprefix(".")


def at_import(module: str) -> ast.Module:
    """What runs when a module is imported: no function bodies, nothing for type checkers only."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            if "TYPE_CHECKING" in ast.unparse(node.test):
                return None
            return self.generic_visit(node)

    stripped = Strip().visit(ast.parse(SOURCES[module].read_text("utf-8")))
    assert isinstance(stripped, ast.Module)
    return stripped


def own(module: str) -> set[str]:
    """The modules of this package that a module imports, wherever in it."""
    return {name for name in imports(module) if name in SOURCES}


def part(module: str) -> str:
    return module.partition(".")[0]


APART = ("kernel", "cli", "testing")
SDK = [m for m in SOURCES if m and part(m) not in APART and SOURCES[m].name != "__init__.py"]
FLOOR = {module: n for n, floor in enumerate(FLOORS) for module in floor}


def test_every_module_of_the_sdk_has_its_floor() -> None:
    assert set(SDK) <= set(FLOOR), "add new modules to FLOORS, where they belong"


@pytest.mark.parametrize("module", SDK)
def test_imports_point_down(module: str) -> None:
    for imported in own(module):
        assert imported in FLOOR, f"{module} imports {imported or ROOT}"
        assert FLOOR[imported] > FLOOR[module], f"{module} imports {imported}"


@pytest.mark.parametrize("module", [m for m in SOURCES if part(m) == "kernel"])
def test_the_kernel_takes_little(module: str) -> None:
    outside = {name for name in own(module) if part(name) != "kernel"}
    assert outside <= KERNEL_TAKES, f"{module} imports {outside - KERNEL_TAKES}"


@pytest.mark.parametrize("module", [m for m in SDK if part(m) == "effects"])
def test_effects_know_neither_agents_nor_servers(module: str) -> None:
    assert not {"agent", "workers", "inputs", "client"} & own(module)
    assert not {name for name in own(module) if part(name) == "serving"}


def test_the_agent_knows_no_effects_and_no_web_framework() -> None:
    for module in ("agent", "workers", "context"):
        assert not {name for name in own(module) if part(name) == "effects"}
        assert not {"flask", "werkzeug", "gunicorn"} & {part(name) for name in imports(module)}


@pytest.mark.parametrize("module", [m for m in SOURCES if part(m) != "testing"])
def test_nothing_imports_the_testing_tools(module: str) -> None:
    assert not {name for name in own(module) if part(name) == "testing"}


@pytest.mark.parametrize("module", [m for m in SOURCES if part(m) not in ("cli", "testing")])
def test_only_tools_stand_on_the_public_names(module: str) -> None:
    assert "" not in own(module), f"{module} imports from {ROOT} itself, which imports it"
    assert not {name for name in own(module) if part(name) == "cli"}


def test_no_circles() -> None:
    """Of imports that run when a module is imported."""
    graph = {m: {n for n in imports(m, at_import(m)) if n in SOURCES} - {m} for m in SOURCES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path[path.index(module) :], module))
        if module not in done:
            for imported in graph[module]:
                visit(imported, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def loaded_by_the_package() -> set[str]:
    """What ``import rebuno_sync`` loads of this package."""
    found, waiting = set(), [""]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += [n for n in imports(module, at_import(module)) if n in SOURCES]
            waiting += [p for p in _packages_of(module) if p in SOURCES]
    return found


def _packages_of(module: str) -> Iterator[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def test_importing_the_package_needs_the_standard_library_alone() -> None:
    loaded = loaded_by_the_package()
    assert {"agent", "context", "transport", "client", "effects.tool"} <= loaded
    assert not {m for m in loaded if part(m) in APART} | ({"connections"} & loaded)
    for module in loaded:
        foreign = {part(name) for name in imports(module, at_import(module)) if name not in SOURCES}
        assert foreign <= sys.stdlib_module_names, f"{module}: {foreign - sys.stdlib_module_names}"


def test_names_of_modules() -> None:
    for module, path in SOURCES.items():
        for name in module.split("."):
            assert not {"utils", "util", "common", "helpers", "misc"} & set(name.split("_")), path
            assert not name.startswith("_") or name == "__main__", path
            assert not name.startswith(("async_", "aio")), path


def test_sizes_of_modules() -> None:
    sizes = {module: len(path.read_text("utf-8").splitlines()) for module, path in SOURCES.items()}
    long = {module: lines for module, lines in sizes.items() if lines > LONGEST}
    assert set(long) <= set(EXPLAINED), long


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
