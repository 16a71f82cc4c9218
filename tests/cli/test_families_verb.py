"""`megatune families`: what it says comes from declarations and from the page of parity, and is true of both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatune.cli.main import main
from megatune.families import FAMILIES
from megatune.families.evidence import MEASURED, evidence_of
from megatune.verify.results import GRADIENT_TOLERANCE, LOGITS_TOLERANCE, LOSS_TOLERANCE

sys.path.append(str(Path(__file__).parents[1] / "parity"))
from parity_table import DOCUMENT, summary


def test_figures_are_those_of_the_page():
    """MEGATUNE_WRITE_PARITY writes both."""
    assert MEASURED.read_text(encoding="utf-8") == summary(DOCUMENT.read_text(encoding="utf-8"))


def test_every_family_is_proved_where_it_is_cut():
    for each in evidence_of(FAMILIES):
        proved = " ".join(each.layouts)
        assert "1" in each.layouts, each.model_type
        assert each.adapted, each.model_type
        assert all(cut in proved for cut in ("tp2 sp", "pp2", "packed")), each.model_type
        assert "ep2" in proved or not FAMILIES[each.model_type].experts, each.model_type
        assert each.worst["logits"] <= LOGITS_TOLERANCE
        assert each.worst["loss"] <= LOSS_TOLERANCE
        assert each.worst["gradients"] <= GRADIENT_TOLERANCE


def test_json_has_what_declarations_say(capsys):
    assert main(["families", "--json"]) == 0
    found = {each["model_type"]: each for each in json.loads(capsys.readouterr().out)}
    assert list(found) == sorted(FAMILIES)
    assert all(found[name]["media"] == (family.vision is not None) for name, family in FAMILIES.items())
    assert found["gpt_oss"]["quantized"] == ["mxfp4"]
    assert found["kimi_k2"]["quantized"] == ["fp8"]
    assert {name for name in found if not found[name]["torch_dist"]} == {"gemma4", "gemma4_text"}
    assert {"in_proj_qkvz", "in_proj_ba", "out_proj"} <= {*found["qwen3_next"]["adapted"]}


def test_families_are_listed_and_one_is_detailed(capsys):
    assert main(["families"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : len(FAMILIES) + 1]] == sorted(FAMILIES)
    assert main(["families", "gpt_oss"]) == 0
    assert "ep2 etp2 tp2 sp" in capsys.readouterr().out


@pytest.mark.parametrize(("word", "said"), [("gptoss", "did you mean gpt_oss?"), ("gemma3n", "is not supported")])
def test_an_unknown_type_is_refused(capsys, word, said):
    assert main(["families", word]) == 66
    assert said in capsys.readouterr().err
