"""Dockerfiles: what they copy is there, and their versions are those of pyproject.toml and constraints.txt."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
KNOWN = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "ENTRYPOINT"}


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, lines that continue joined, with what ARG gives put in."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found, arguments = [], {}
    for line in joined.splitlines():
        word, _, rest = line.partition(" ")
        if word == "ARG":
            name, _, value = rest.partition("=")
            arguments[name] = value
        found.append((word, re.sub(r"\$\{(\w+)\}", lambda name: arguments[name[1]], rest)))
    return found


def copied(found: list[tuple[str, str]]) -> list[str]:
    return [source for word, rest in found if word == "COPY" for source in rest.split()[:-1]]


def is_sent(path: str) -> bool:
    """Return whether .dockerignore lets a path into the build; the last rule that fits it decides."""
    sent = True
    for rule in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if fnmatch(path, rule.removeprefix("!")):
            sent = rule.startswith("!")
    return sent


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_dockerfiles(path: Path) -> None:
    found = instructions(path.read_text(encoding="utf-8"))
    assert {word for word, _ in found} <= KNOWN
    bases = [rest for word, rest in found if word == "FROM"]
    assert len(bases) == 1
    python = re.fullmatch(r"python:(\d+\.\d+)-[\w-]+", bases[0])
    assert python
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{python[1]}.0")
    assert not [source for source in copied(found) if not (ROOT / source).exists() or not is_sent(source)]
    # What pip is given, or the build reads: pyproject.toml names the others.
    needed = {"pyproject.toml", "constraints.txt", "src", PROJECT["readme"], *PROJECT["license-files"]}
    assert set(copied(found)) == needed
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    runs = [rest for word, rest in found if word == "RUN"]
    for name, version in (pair for run in runs for pair in re.findall(r"([\w.-]+)==([\w.]+)", run)):
        assert pinned[name] == version
    assert any(re.fullmatch(r"pip install --no-cache-dir -c constraints\.txt \.", run) for run in runs)
    (entry,) = (json.loads(rest) for word, rest in found if word == "ENTRYPOINT")
    assert entry[0] in PROJECT["scripts"]


def test_there_is_one_for_each_device() -> None:
    assert [path.name for path in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]
    assert "+cpu" not in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_the_parser() -> None:
    text = "# a\nFROM python:3.11-slim\nARG TORCH=2.1\nRUN pip install \\\n    torch==${TORCH}\nCOPY a b ./\n"
    found = instructions(text)
    assert found[2] == ("RUN", "pip install  torch==2.1")
    assert copied(found) == ["a", "b"]
    assert not is_sent("tests")
