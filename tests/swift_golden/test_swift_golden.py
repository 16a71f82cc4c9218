"""Command lines of Megatron-SWIFT train the tokens that ms-swift trains: 3,426 cases that ms-swift encoded itself."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Hashable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))  # the modules of this folder, which run without pytest, too

from cases import CASES  # noqa: E402
from covering import covering  # noqa: E402
from models import make_models  # noqa: E402
from ours import Case, Result, difference, encode  # noqa: E402

PAGE = (FOLDER.parents[1] / "docs" / "migrate-from-megatron-swift.md").read_text(encoding="utf-8")
# The differences that are left, by the case's name and flags, each with what the page says of it.
REASONS = {
    r"--template mistral_nemo": "`--template mistral_nemo`",
    r"--agent_template seed_oss": "`--agent_template`",
    r"--loss_scale (default\+)?(hermes|react|qwen|agentflan|alpha_umi)": "`--loss_scale hermes`",
    r"v4 .*ignore_empty_think\+hermes": "`--loss_scale hermes`",
    r"/sft/.*--use_chat_template false": "`--use_chat_template false`",
    r"^(format/(messages|alpaca)|agent/(14|18|22)-\w+|kto/null)/kto/": "a row of KTO without an answer or a label",
    r"^kto/one/": "a KTO row next to one with the same answer",
    r"^tools/(as-(mixed-)?list/\S+|openai/sft/(Qwen2.5|Meta-Llama)\S+)/v3": "`null` in tools",
    r"^(tools/objects|picture/parts)/\S+/v3": "objects and lists as content",
    r"^picture/pt/Qwen2": "a picture in a round that stage pt leaves out",
    r"^vision/template-((qwen|chatml)/sft|qwen2(_5)?_vl/sft/Qwen3)": "images with another model's template",
    r"^picture/cut-(left|right)-12/": "pictures of more tokens than `max_length`",
}


def group(case: Case) -> str:
    return str(case["name"].partition("/")[0])


def values(case: Case) -> frozenset[Hashable]:
    """What a covering run has at least once: each place in a product, and with both versions each model, stage and
    flag."""
    version, flags = case["version"], re.split(r" (?=--)", " ".join(case["flags"]))
    parts = case["name"].split("/")
    return frozenset([*parts, *((version, each) for each in [*parts[-3:-1], *flags])])


def chosen(name: str) -> list[Case]:
    """Return the cases of a group that a covering run has."""
    cases = [case for case in CASES if group(case) == name]
    return [cases[place] for place in covering([values(case) for case in cases])]


def described(case: Case) -> str:
    return " ".join((case["name"], *case["flags"]))


@pytest.fixture(scope="module")
def golden() -> dict[str, Result]:
    """The results of ms-swift, by the name of the case."""
    names = ("3", "4", "4-families")
    files = [gzip.decompress((FOLDER / f"golden-{name}.jsonl.gz").read_bytes()) for name in names]
    results = [json.loads(line) for file in files for line in file.splitlines()]
    return {result.pop("name"): result for result in results}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


def test_the_golden_files_have_every_case(golden: dict[str, Result]) -> None:
    assert Counter(case["name"] for case in CASES) == Counter(golden.keys())
    assert len(CASES) == 3426


@pytest.mark.extended("others")
@pytest.mark.parametrize("part", ["every value", "others"])
@pytest.mark.parametrize("name", sorted({group(case) for case in CASES}))
def test_the_same_tokens_are_trained(
    name: str, part: str, golden: dict[str, Result], models: Path, tmp_path: Path
) -> None:
    cases = chosen(name)
    if part == "others":
        cases = [case for case in CASES if group(case) == name and case not in cases]
    differing = {}
    for number, case in enumerate(cases):
        (folder := tmp_path / f"{number}").mkdir()
        if found := difference(golden[case["name"]], encode(case, models, folder)):
            differing[described(case)] = found
    explained = {described(case) for case in cases if any(re.search(pattern, described(case)) for pattern in REASONS)}
    assert {what: why for what, why in differing.items() if what not in explained} == {}
    # A reason that hid cases that are equal would hide a fault, too.
    assert explained - set(differing) == set()


def test_every_reason_is_on_the_page() -> None:
    assert [reason for reason in REASONS.values() if reason not in PAGE] == []
    patterns = [pattern for pattern in REASONS if not any(re.search(pattern, described(case)) for case in CASES)]
    assert patterns == []
