"""Declared and imported distributions agree: what is imported is declared, and what is declared is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Modules that go by another name than their distribution.
NAMES = {"yaml": "pyyaml", "megatron": "megatron-core", "PIL": "pillow", "mlflow": "mlflow-skinny"}
# What a distribution is needed by that imports nothing of it by name.
NEEDED_BY = {
    "tensorboard": "torch.utils.tensorboard",
    "accelerate": "transformers",
    "liger-kernel": "transformers.integrations.liger",
    "triton": "megatron.core",
}
BROUGHT_BY_USERS = {"vllm", "sglang", "langdetect"}  # engines have a build for each device; a rule of one reward
# What records tests/swift_golden runs in an environment of ms-swift; of Transformer Engine there is a stand-in; a
# benchmark measures LLaMA-Factory's package where a user has put it.
OTHER_SYSTEMS = {"swift", "torchvision", "transformer-engine", "llamafactory"}
PINNED_BY_TORCH = {"triton"}
TOOLS = {"pytest-xdist", "ruff", "mypy", "ipykernel"}  # of the Makefile; what runs the cells of a notebook


def declared(requirements: Iterable[str]) -> set[str]:
    return {_name(re.match(r"[\w.-]+", requirement)[0]) for requirement in requirements}  # type: ignore[index]


def _name(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


def imported(folder: str) -> tuple[set[str], set[str]]:
    """Distributions whose modules the files of a folder import, and the modules."""
    # Tests and benchmarks import from each other.
    beside = {"benchmarks"} if folder == "src" else {"tests", "benchmarks"}
    own = {"megatune", *(path.stem for one in beside for path in (ROOT / one).rglob("*") if path.suffix != ".md")}
    modules: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module)
    first = {module.partition(".")[0] for module in modules} - own - set(sys.stdlib_module_names)
    return {_name(NAMES.get(module, module)) for module in first}, modules


def test_what_the_package_imports_is_declared() -> None:
    optional = set().union(*(declared(extra) for name, extra in EXTRAS.items() if name not in ("dev", "benchmarks")))
    assert not imported("src")[0] - declared(PROJECT["dependencies"]) - optional - BROUGHT_BY_USERS


def test_what_is_declared_is_imported() -> None:
    found, modules = imported("src")
    needed = {name for name, module in NEEDED_BY.items() if module in modules}
    assert not declared(PROJECT["dependencies"]) - found - needed
    assert declared(EXTRAS["modelscope"]) <= found


def test_tests_and_benchmarks_import_what_their_extras_declare() -> None:
    package = declared(PROJECT["dependencies"])
    tests, dev = imported("tests")[0], declared(EXTRAS["dev"])
    skipped_without = declared(EXTRAS["modelscope"])
    assert not tests - package - dev - skipped_without - OTHER_SYSTEMS
    stubs = {name for name in dev if name.startswith("types-") and name.removeprefix("types-") in package}
    assert not dev - tests - stubs - TOOLS - imported("src")[0]  # what the package imports where it is asked for
    found, modules = imported("benchmarks")
    extras = declared([*EXTRAS["benchmarks"], *EXTRAS["benchmarks-gpu"]])
    assert not found - package - extras - OTHER_SYSTEMS
    assert not extras - found - {name for name, module in NEEDED_BY.items() if module in modules}


def test_the_page_of_the_install_has_a_reason_of_each() -> None:
    page = (
        (ROOT / "docs" / "install.md").read_text(encoding="utf-8").partition("## Dependencies")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| ([\w-]+)(?: \*)? \| (.+) \|$", page, re.MULTILINE)
    reasons = {_name(name): reason for name, reason in rows if name != "package"}
    assert reasons.keys() == declared(PROJECT["dependencies"])
    assert all(reasons.values())


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    """Of torch and Megatron-Core constraints.txt has them: one build, and one version, is at hand."""
    lines = (ROOT / "versions" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    oldest = {_name(line.partition("==")[0]): line.partition("==")[2] for line in lines if "==" in line}
    pinned = pinned_for("3.11")
    bounds = {
        _name(match[1]): match[2]
        for requirement in PROJECT["dependencies"]
        if (match := re.match(r"([\w.-]+)>=([\w.]+)", requirement))
    }
    assert bounds.keys() == declared(PROJECT["dependencies"]) - PINNED_BY_TORCH
    del bounds["torch"]
    wrong = {name: bound for name, bound in bounds.items() if Version((pinned | oldest)[name]) != Version(bound)}
    assert not wrong


def test_the_newest_versions_are_within_the_bounds() -> None:
    lines = (ROOT / "versions" / "newest.txt").read_text(encoding="utf-8").splitlines()
    newest = {_name(one.name): str(one.specifier)[2:] for one in map(Requirement, lines[1:])}
    asked = {_name(one.name): one.specifier for one in map(Requirement, PROJECT["dependencies"])}
    assert newest.keys() <= asked.keys()
    assert not {name: version for name, version in newest.items() if version not in asked[name]}


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_requirement_is_pinned(python: str) -> None:
    """To one version, within its bounds."""
    pinned, requirements = (
        pinned_for(python),
        [*PROJECT["dependencies"], *(one for each in EXTRAS.values() for one in each)],
    )
    asked = [
        one for one in map(Requirement, requirements) if one.marker is None or one.marker.evaluate(environment(python))
    ]
    assert not {_name(one.name) for one in asked if pinned.get(_name(one.name), "none") not in one.specifier}


def pinned_for(python: str) -> dict[str, str]:
    """Version of each package that constraints.txt has for a Python; no package has two."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if "==" in line]
    chosen = [one for one in found if one.marker is None or one.marker.evaluate(environment(python))]
    assert len({_name(one.name) for one in chosen}) == len(chosen)
    return {_name(one.name): str(one.specifier).removeprefix("==") for one in chosen}


def environment(python: str) -> dict[str, str]:
    return {"python_version": python, "platform_system": "Linux", "sys_platform": "linux"}
