"""A wheel and a source distribution hold the whole package and nothing else, and run where the repository is not."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
# ROLL's own path, in the command line that its users know.
ROLL = "megatune rl --config_path examples/"


def tree(folder: Path) -> set[str]:
    """Files of the package, by their paths in a wheel."""
    files = (path for path in (folder / "src" / "megatune").rglob("*") if path.is_file())
    return {path.relative_to(folder / "src").as_posix() for path in files if "__pycache__" not in path.parts}


def build(what: str, source: Path, target: Path) -> Path:
    target.mkdir()
    command = [sys.executable, "-c", BUILD, f"build_{what}", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True, timeout=120)
    (built,) = target.iterdir()
    return built


def packaged(wheel: Path) -> dict[str, str]:
    """Files of a wheel: its own with their content, the package's with none."""
    with zipfile.ZipFile(wheel) as archive:
        names = [info.filename for info in archive.infolist() if not info.is_dir()]
        return {name: archive.read(name).decode() if ".dist-info/" in name else "" for name in names}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository: setuptools builds beside the sources."""
    folder = tmp_path_factory.mktemp("repository") / "megatune"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "out", "shared")
    return Path(shutil.copytree(ROOT, folder, ignore=ignored))


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return build("wheel", source, source.parent / "wheel")


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    files = packaged(wheel)
    assert {name for name in files if ".dist-info/" not in name} == tree(ROOT)
    assert any(name.endswith("licenses/LICENSE") for name in files)
    scripts = next(content for name, content in files.items() if name.endswith("entry_points.txt"))
    assert "megatune = megatune.cli.main:main" in scripts


def test_what_the_wheel_asks_for_is_what_the_tests_run_with(wheel: Path) -> None:
    metadata = next(content for name, content in packaged(wheel).items() if name.endswith("METADATA"))
    asked = [Requirement(line) for line in Parser().parsestr(metadata).get_all("Requires-Dist") or ()]
    always = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    assert always
    wrong = {str(one): version(one.name) for one in always if not one.specifier.contains(version(one.name), True)}
    assert not wrong


def test_the_source_distribution_builds_the_same_wheel(source: Path, wheel: Path) -> None:
    archive = build("sdist", source, source.parent / "sdist")
    with tarfile.open(archive) as files:
        files.extractall(source.parent / "unpacked", filter="data")
    (unpacked,) = (source.parent / "unpacked").iterdir()
    assert {path.name for path in unpacked.iterdir()} == {
        "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "src",
    }  # fmt: skip
    rebuilt = build("wheel", unpacked, source.parent / "rebuilt")
    assert packaged(rebuilt).keys() == packaged(wheel).keys()


def test_messages_name_nothing_that_only_the_repository_has() -> None:
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = {id(node.body[0].value) for node in ast.walk(module)
                      if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)}  # fmt: skip
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}" for node in ast.walk(module)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
            and any(f"{folder}/" in node.value.replace(ROLL, "") for folder in ("examples", "tests", "benchmarks"))
        ]  # fmt: skip
    assert not found, "\n".join(found)


@pytest.mark.extended
def test_an_installed_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, to which the packages that the wheel asks for are lent."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True, timeout=60)
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=120)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    lent = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "lent.pth").write_text("\n".join(lent), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str) -> str:
        command = [str(tmp_path / "env" / "bin" / "megatune"), *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = [str(python), "-c", "import megatune; print(megatune.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(packages)
    run("demo-model", "--family", "deepseek_v3", "--layers", "2", "--hidden", "32", "--output", "model")
    rows = [{"instruction": f"Count to {number}.", "output": " ".join(map(str, range(number)))} for number in range(8)]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: model\ndataset: rows.json\noutput_dir: out\nmax_steps: 1\nreport_to: none\n"
        "cutoff_len: 64\nper_device_train_batch_size: 2\n",
        encoding="utf-8",
    )
    run("train", "run.yaml")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "学习率" in run("explain", "learning_rate", "--language", "zh")
    assert "Qwen3-8B" in run("plan", "Qwen/Qwen3-8B", "--gpus", "8", "--gpu", "H100")
