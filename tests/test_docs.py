"""The pages: generated ones are current, links lead somewhere, and keys are real ones."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest

from megatune.config.dialects.dialect import LLAMAFACTORY
from megatune.config.dialects.roll_reader import TOP

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", ["settings.md", "settings.zh.md", "rl-settings.md", "rl-settings.zh.md"])
def test_settings_page_is_current(name: str) -> None:
    render = runpy.run_path(str(ROOT / "docs" / "generate_settings.py"))["render"]
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == render(name), "run docs/generate_settings.py"


@pytest.mark.parametrize("page", ["LLAMAFACTORY_PAGE", "SWIFT_PAGE"])
def test_tables_of_other_systems_are_current(page: str) -> None:
    found = runpy.run_path(str(ROOT / "docs" / "generate_migration.py"))
    assert found[page].read_text(encoding="utf-8") == found["render"](found[page]), "run docs/generate_migration.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [name for name in targets if "://" not in name and not (page.parent / name).exists()]
    assert not missing
    named = re.findall(r"`((?:tests|examples|benchmarks|docs|src)/[\w./-]+)`", page.read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / name).exists()]


FILES = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_names_that_a_page_cites_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    cited = set(re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|md|toml))`", text)) - {"modeling_X.py"}  # of Transformers
    assert not [name for name in cited if not any(f"/{file}".endswith(f"/{name}") for file in FILES)]
    for name, file in re.findall(r"`(\w+)` in\s+`([\w./-]+\.py)`", text):
        assert re.search(rf"\b{name}\b", (ROOT / file).read_text(encoding="utf-8")), f"{name} is not in {file}"


def test_each_promise_of_security_names_tests_that_are_there() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 10
    for promise, _, tests in rows:
        files = re.findall(r"`(tests/[\w/]+\.py)`", tests)
        assert files, promise
        assert not [file for file in files if not re.search(r"^def test_", (ROOT / file).read_text(), re.MULTILINE)]
        for name, file in re.findall(r"`(\w+)` in `([\w./]+)`", tests):
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{name} is not in {file}"


def test_pages_that_sources_cite_are_there() -> None:
    cited = {
        name
        for file in FILES
        if file.endswith(".py") and file.startswith(("src/", "tests/"))
        for name in re.findall(r"\b(?:docs/[\w-]+|[A-Z]{3,})\.md\b", (ROOT / file).read_text(encoding="utf-8"))
    }
    assert not [name for name in cited - {"README.md"} if name not in FILES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_of_settings_files(page: Path) -> None:
    """The keys in YAML blocks are real ones; test_doc_commands.py runs the command lines."""
    for yaml in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        knows = TOP.names.__contains__ if page.name.startswith("rl") else LLAMAFACTORY.knows
        assert not [key for key in re.findall(r"^(\w+):", yaml, re.MULTILINE) if not knows(key)]


def test_keys_to_write_instead_of_others_are_real() -> None:
    text = (ROOT / "docs" / "migrate-from-others.md").read_text(encoding="utf-8").partition("## verl")[0]
    cells = re.findall(r"^\| `.* \| (.*) \|$", text, re.MULTILINE)
    keys = [key for cell in cells for key in re.findall(r"`([a-z_]+)(?:: [^`]*)?`", cell)]
    assert len(keys) > 20
    assert not [key for key in keys if not LLAMAFACTORY.knows(key) and key not in ("dpo", "kto")]


def test_table_of_models_in_readme_is_the_planner_s() -> None:
    found = runpy.run_path(str(ROOT / "docs" / "generate_readme.py"))
    text = found["PAGE"].read_text(encoding="utf-8")
    assert text == found["render"](text), "run docs/generate_readme.py"
    assert [row.model for row in found["rows_of"](text)] == list(found["MODELS"])


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 100


def test_evidence_names_tests_that_are_there() -> None:
    text = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 35
    for feature, _, evidence in rows:
        assert re.findall(r"`(?:tests/[\w/.]+|make [\w-]+)`|\]\(", evidence), feature
