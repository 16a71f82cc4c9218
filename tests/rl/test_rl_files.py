"""Files as ROLL's users have them, run: their own algorithms, rewards and templates, with tiny models on one process.

vLLM and SGLang are replaced by the built-in engine: they cannot be installed beside this project (docs/rl-rollouts.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from local_roles import run_file
from roll_small import FILES, RESPONSE, family_of, has_judge, make_judge, make_talker, words, write_rows

from megatune.config.dialects.roll import read_roll

LIMIT = 280.0
OFTEN = ("colocated_vllm_packing", "qwen2_5_7b_dynamic_batching")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("models")

    @cache
    def of(make: Callable[[str, Path], Path], family: str) -> Path:
        return make(family, folder / f"{family} {make.__name__}")

    return of


@pytest.mark.extended(*(path.stem for path in FILES.glob("*.yaml") if path.stem not in OFTEN))
@pytest.mark.parametrize("name", sorted(path.stem for path in FILES.glob("*.yaml")))
def test_a_file_runs(pool, made, tmp_path, name):
    path, steps = FILES / f"{name}.yaml", 2
    rows = write_rows(path, tmp_path / "rows.jsonl")
    model = made(make_talker, family_of(path))
    judge = made(make_judge, "qwen2") if has_judge(path) else model
    typed = words(path, model, judge, rows, tmp_path / "out", steps=steps)
    settings = read_roll(path, typed).require_valid()
    asked = read_roll(path).require_valid()
    assert settings.algorithm == asked.algorithm, "every switch is the file's"
    pool.run(1, run_file, settings, limit=LIMIT)
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    records = [line for line in lines if "reward" in line]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert math.isfinite(record["loss"])
        assert record["grad_norm"] > 0
        assert 1 < record["response_length"] <= RESPONSE
    assert any(record["reward"] > 0 for record in records)
    assert any("eval_accuracy" in line for line in lines) == (settings.validation is not None)
