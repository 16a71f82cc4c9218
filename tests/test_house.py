"""The house of the project: imports point down its floors, and everyone keeps to the rules of the rooms."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "megatune"

# A room imports from rooms below it, and from itself. "" is the package's own __init__.py, with the version.
FLOORS = {
    7: {"__main__"},
    6: {"cli"},
    5: {"rehearse", "ui"},
    4: {"rl", "doctor"},
    3: {"training", "generation", "verify"},
    2: {"bridge", "objectives", "demo"},
    1: {"engine", "data", "plan"},
    0: {"config", "half_precision", "launch"},
    # Families know of no settings; rules of settings ask them which names a model has.
    -1: {
        "families",
        "errors",
        "references",
        "architecture",
        "encoders",
        "rope_scaling",
        "figure",
        "pages",
        "progress",
        "processes",
        "hub",
        "",
    },
}
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms}
WITHOUT_TORCH = {"launch", "plan", "config"} | FLOORS[-1]
MOST_LINES = 500
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:home|root|work|farm|opt|tmp|Users)/[A-Za-z]")


class Import(NamedTuple):
    """One imported module, absolute, and where."""

    place: str  # "src/megatune/cli/main.py:7"
    room: str  # of the importing file
    module: str  # "megatune.engine.step"


def room_of(module: str) -> str:
    """The room of a module of this package: "megatune.engine.step" -> "engine"."""
    return [*module.split("."), ""][1]


def imports_of(source: str, module: str, place: str, *, is_package: bool) -> Iterator[Import]:
    """Every import of a source text, wherever it stands: in functions and under TYPE_CHECKING, too."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            kept = len(parts) - node.level + is_package
            base = ".".join([*(parts[:kept] if node.level else []), *([node.module] if node.module else [])])
            names = [base]
            if base == "megatune":  # `from megatune import engine` names a room, `__version__` does not
                names = [f"megatune.{alias.name}" if is_room(alias.name) else base for alias in node.names]
        elif isinstance(node, ast.Call) and _called(node.func) == "import_module":
            names = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
        yield from (Import(f"{place}:{node.lineno}", room_of(module), name) for name in names)


def _called(function: ast.expr) -> str:
    """The last part of the name of what is called; "" where that is no name."""
    return getattr(function, "attr", "") or getattr(function, "id", "")


def is_room(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(_read_imports())


def _read_imports() -> Iterator[Import]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        yield from imports_of(
            path.read_text(encoding="utf-8"), module, str(path.relative_to(ROOT)), is_package=is_package
        )


def upward(found: Import) -> str | None:
    """What is wrong with an import by the floors; None where nothing is."""
    if found.module.split(".")[0] != "megatune" or room_of(found.module) == found.room:
        return None
    target = room_of(found.module)
    for room in (found.room, target):
        if room not in FLOOR_OF:
            return (
                f"{found.place}: the room {room!r} has no floor: give it one in the design and in {Path(__file__).name}"
            )
    here, there = FLOOR_OF[found.room], FLOOR_OF[target]
    if there < here or (here == there == -1):
        return None
    return f"{found.place}: {found.room} (floor {here}) imports {target} (floor {there}): {found.module}"


def test_imports_point_down() -> None:
    imports = list(all_imports())
    assert {found.room for found in imports} >= {"cli", "training", "bridge", "engine", "data", "config"}
    assert not (wrong := [problem for found in imports if (problem := upward(found))]), "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import megatune.cli.main", "engine (floor 1) imports cli (floor 6)"),
        ("from megatune import bridge", "engine (floor 1) imports bridge (floor 2)"),
        ("def f():\n    from megatune.data.rows import TokenRows", "engine (floor 1) imports data (floor 1)"),
        ("if TYPE_CHECKING:\n    from megatune.training import loop", "engine (floor 1) imports training (floor 3)"),
        ("from ..training.loop import train", "engine (floor 1) imports training (floor 3)"),
        ("import importlib\nimportlib.import_module('megatune.cli')", "engine (floor 1) imports cli (floor 6)"),
    ],
)
def test_the_rule_finds(source: str, problem: str) -> None:
    found = list(imports_of(source, "megatune.engine.step", "step.py", is_package=False))
    assert [text for each in found if (text := upward(each)) and problem in text and text.startswith("step.py:")]


def test_the_rule_allows() -> None:
    source = (
        "import torch\nfrom megatune import __version__\nfrom .layers import norm\nfrom megatune.config import load"
    )
    found = list(imports_of(source, "megatune.engine.step", "step.py", is_package=False))
    assert len(found) == 4
    assert not [text for each in found if (text := upward(each))]


class WithoutTypes(ast.NodeTransformer):
    """Removes what only a type checker imports: it never runs."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if getattr(node.test, "id", "") == "TYPE_CHECKING" else self.generic_visit(node)


def cycles(imported: dict[str, set[str]]) -> list[str]:
    """The names that import themselves, by way of others."""

    def reached(name: str) -> set[str]:
        found: set[str] = set()
        new = {name}
        while new:
            new = {other for each in new for other in imported.get(each, set())} - found
            found |= new
        return found

    return [name for name in imported if name in reached(name)]


def test_no_cycles_inside_of_data() -> None:
    """The folders and modules of data/ can be put in an order in which each imports earlier ones only."""
    imported: dict[str, set[str]] = {}
    for module, targets in imports_between_files().items():
        if module.startswith("megatune.data."):
            name = ".".join(module.split(".")[:3])
            imported.setdefault(name, set()).update(".".join(each.split(".")[:3]) for each in targets)
            imported[name].discard(name)
    assert len(imported["megatune.data.sources"]) > 3
    assert not (wrong := cycles(imported)), wrong
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


@cache
def imports_between_files() -> dict[str, set[str]]:
    """The modules that each module imports when it runs, in functions, too."""
    files = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        tree = WithoutTypes().visit(ast.parse(path.read_text(encoding="utf-8")))
        targets: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):  # which may name a module, or what is in one
                assert not node.level, f"{path}:{node.lineno}: write the whole name"
                named = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= named & files.keys() or {str(node.module)}
        found[module] = {each for each in targets & files.keys() if each != module}
    return found


def test_no_circles_between_files() -> None:
    imported = imports_between_files()
    assert "megatune.errors" in imported["megatune.cli.main"]
    # Its table names the modules of the verbs, which it imports by these names.
    verbs = {module for module in imported if module.startswith("megatune.cli.")} - {"megatune.cli.main"}
    imported = imported | {"megatune.cli.main": imported["megatune.cli.main"] | verbs}
    assert not (found := sorted(cycles(imported))), f"files that import each other: {found}"


def test_only_the_engine_imports_megatron() -> None:
    found = [each for each in all_imports() if each.module.split(".")[0] == "megatron"]
    assert found
    assert not (wrong := [f"{each.place}: {each.room}" for each in found if each.room != "engine"]), "\n".join(wrong)


def test_rooms_without_torch() -> None:
    wrong = [
        f"{each.place}: {each.room} imports {each.module}"
        for each in all_imports()
        if each.room in WITHOUT_TORCH and each.module.split(".")[0] in ("torch", "transformers", "megatron", "datasets")
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_without_torch_when_they_run() -> None:
    modules = sorted(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).with_suffix("").parts[0] in WITHOUT_TORCH
    )
    assert "megatune.config.load" in modules
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def written_files() -> list[Path]:
    """Everything that people of this project write."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    ).stdout.split("\n")  # fmt: skip
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_no_file_is_too_long() -> None:
    files = [path for path in written_files() if path.suffix == ".py"]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert len(lines) > 50
    wrong = [f"{path.relative_to(ROOT)}: {count} lines" for path, count in lines.items() if count > MOST_LINES]
    assert not wrong, "\n".join(wrong)


def test_no_machine_paths() -> None:
    wrong = []
    for path in written_files():
        if path.suffix in (".py", ".md", ".yaml", ".toml", ".txt", ".sh", "") and path.name != "LICENSE":
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if MACHINE_PATH.search(line):
                    wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)
