"""The weight of the balancing loss that a run takes from its model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatune.architecture import Architecture, MixtureOfExperts
from megatune.config.derived import pooled_factor, with_model_defaults
from megatune.config.load import Loaded, dump, load

MOE = MixtureOfExperts(
    layers=(False,) + (True,) * 48, num_experts=128, router_topk=8, moe_ffn_hidden_size=768, aux_loss_coeff=0.001
)
DENSE = Architecture(
    model_type="qwen3", num_layers=49, hidden_size=2048, ffn_hidden_size=6144, num_attention_heads=32,
    num_query_groups=4, kv_channels=128, vocab_size=151936, max_position_embeddings=40960, norm_epsilon=1e-6,
    rotary_base=1e6,
)  # fmt: skip
SPARSE = replace(DENSE, moe=MOE)
BASE = ["model_name_or_path=m", "dataset=d", "output_dir=o"]


def completed(*words: str, architecture: Architecture = SPARSE) -> tuple[Loaded, list[str]]:
    loaded, lines = with_model_defaults(load(overrides=[*BASE, *words]), architecture)
    assert with_model_defaults(loaded, architecture) == (loaded, []), "what is complete stays"
    return loaded, lines


def weight(loaded: Loaded) -> float | None:
    return loaded.settings.experts.moe_aux_loss_coeff


@pytest.mark.parametrize(
    "words",
    [
        [],
        *([f"stage={stage}"] for stage in ("pt", "dpo", "kto", "rm")),
        ["moe_aux_loss_coeff=null"],
        ["finetuning_type=lora"],
    ],
)
def test_config_json_decides_where_no_weight_is_written(words: list[str]) -> None:
    """As mcore_adapter, LLaMA-Factory's Megatron path, and Megatron-SWIFT 3."""
    loaded, lines = completed(*words)
    assert weight(loaded) == 0.001
    assert lines == ["moe_aux_loss_coeff 0.001: router_aux_loss_coef of config.json"]
    assert loaded.check(SPARSE) == []
    (line,) = (line for line in dump(loaded.settings, loaded.origins).splitlines() if line.startswith("moe_aux_loss"))
    assert line.split() == ["moe_aux_loss_coeff:", "0.001", "#", "config.json"]


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_written_weight_wins(value: float) -> None:
    loaded, lines = completed(f"moe_aux_loss_coeff={value}")
    assert (weight(loaded), lines) == (value, [])
    assert loaded.origins["experts.moe_aux_loss_coeff"] == "override"


@pytest.mark.parametrize("kind", ["sinkhorn", "none"])
def test_balancing_without_a_loss_has_no_weight(kind: str) -> None:
    loaded, lines = completed(f"moe_router_load_balancing_type={kind}")
    assert (weight(loaded), lines, loaded.check(SPARSE)) == (0, [], [])


def test_a_model_without_experts_or_without_a_weight_has_none() -> None:
    assert weight(completed(architecture=DENSE)[0]) is None
    unsaid = replace(SPARSE, moe=replace(MOE, aux_loss_coeff=0.0))  # DeepSeek-V3
    loaded, lines = completed(architecture=unsaid)
    assert (weight(loaded), lines) == (0, [])


def test_a_weight_of_transformers_formula_is_converted_once() -> None:
    """tests/engine/test_moe_pooled_loss.py derives the factor."""
    loaded, (line,) = completed("moe_aux_loss_coef=0.006")
    assert weight(loaded) == pytest.approx(0.001)
    assert pooled_factor(MOE) == pytest.approx(1 / 6)
    assert line.startswith("moe_aux_loss_coef 0.006: moe_aux_loss_coeff 0.001, for Transformers' loss pools the 48 ")
    assert loaded.origins["experts.moe_aux_loss_coeff"] == "override"
    (written,) = (line for line in dump(loaded.settings, {}).splitlines() if line.startswith("moe_aux_loss_coeff"))
    assert weight(completed(written.split("#")[0].strip().replace(": ", "="))[0]) == pytest.approx(0.001)


@pytest.mark.parametrize("words", ["moe_aux_loss_coef=0.1", "moe_aux_loss_coeff=0.1"])
def test_a_written_weight_is_judged_as_it_was_written(words: str) -> None:
    name = words.partition("=")[0]
    (finding,) = completed(words, architecture=DENSE)[0].check(DENSE)
    assert finding.what == f"{name}: 0.1 with a dense model"
    (finding,) = completed(f"{name}=-1")[0].check(SPARSE)
    assert finding.what.startswith(name)
