"""The documents as a site: every page has its place, nothing it links is missing, and translations are current."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TRANSLATIONS = runpy.run_path(str(ROOT / "docs" / "translations.py"))


def _pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages_of(each)


def test_every_page_has_one_place_in_the_navigation() -> None:
    named = list(_pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    there = {page.name for page in (ROOT / "docs").glob("*.md")} | {"index.md", "CONTRIBUTING.md", "AGENTS.md"}
    assert len(named) == len(set(named))
    assert set(named) == there, "mkdocs.yml has the navigation"


def _build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("material", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = _build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    front = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "train/" in front
    assert not re.findall(r"""<(?:script|link)[^>]* (?:src|href)=["']?https?:""", front), "it needs another host"
    assert (tmp_path / "site" / "repository" / "examples" / "rl" / "addition.yaml.txt").is_file()


def test_what_a_page_links_and_is_not_there_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md"):
        (tmp_path / name).write_text(f"# {name}\n\n[train](docs/train.md)\n", encoding="utf-8")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    (tmp_path / "mkdocs.yml").write_text(
        yaml.safe_dump({**settings, "nav": ["index.md", "CONTRIBUTING.md", "AGENTS.md"]})
    )
    shutil.copy(ROOT / "docs" / "site_pages.py", tmp_path / "docs")
    wrong = "# Train\n\n[a](#nowhere), [b](nobody.md), [c](../src/none.py), [d](../README.md#nothing)\n"
    (tmp_path / "docs" / "train.md").write_text(wrong, encoding="utf-8")
    done = _build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    for part in ("train.md", "#nowhere", "nobody.md", "src/none.py", "#nothing"):
        assert part in done.stderr


@pytest.mark.parametrize("page", TRANSLATIONS["pages"](), ids=lambda page: page.name)
def test_chinese_pages_are_of_the_present_english_ones(page: Path) -> None:
    """Where this fails, the English changed: bring the Chinese up to date, then run docs/translations.py --accept."""
    assert not list(TRANSLATIONS["stale"](page))
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 300
    english = page.with_name(page.name.replace(".zh.md", ".md")).read_text(encoding="utf-8")
    pattern = re.compile(r"^```(?:bash\n|\n(?=megatune ))(.*?)^```", re.DOTALL | re.MULTILINE)
    typed = [
        [re.sub(r" +# .*", "", line) for line in "".join(pattern.findall(each)).splitlines()]
        for each in (english, text)
    ]
    assert typed[0] == typed[1], "both have the same commands"


def test_a_section_that_changed_is_named(tmp_path: Path) -> None:
    stale, accept = TRANSLATIONS["stale"], TRANSLATIONS["accept"]
    for function in (stale, accept):
        function.__globals__["DOCS"] = tmp_path
    english, chinese = tmp_path / "a.md", tmp_path / "a.zh.md"
    english.write_text("# A\n\nOne.\n\n```\n# no heading\n```\n\n## B\n\nTwo.\n")
    chinese.write_text("# 甲\n\n一。\n\n## 乙\n\n二。\n")
    accept(chinese)
    assert not list(stale(chinese))
    english.write_text(english.read_text().replace("Two", "Three"))
    assert list(stale(chinese)) == ["a.zh.md: '乙' is not of the present text of 'B'"]
