"""Reward models: which families have one, and what their config.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_sizes import tiny_config
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from megatune.errors import ExitCode, MegatuneError
from megatune.families import FAMILIES, load_architecture
from megatune.families.scores import as_saved

LANGUAGE_MODELS = sorted(name for name, family in FAMILIES.items() if family.vision is None)
SCORED = [name for name in LANGUAGE_MODELS if FAMILIES[name].constants.get("has_classifier", True)]


def refused(folder: Path, config: dict[str, Any], stage: str | None = None) -> tuple[ExitCode, str]:
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MegatuneError) as raised:
        load_architecture(folder, stage)
    return raised.value.exit_code, str(raised.value).removeprefix(f"{folder / 'config.json'}: ")


def test_language_models_have_one_in_transformers() -> None:
    found = {name for name, family in FAMILIES.items() if family.vision is None}
    assert {
        name
        for name in found
        if (FAMILIES[name].computed_as or name) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    } == {*SCORED}


@pytest.mark.parametrize("family", sorted({*LANGUAGE_MODELS} - {*SCORED}))
def test_others_are_refused(family: str, tmp_path: Path) -> None:
    code, text = refused(tmp_path, tiny_config(family).to_dict(), "rm")
    assert code == ExitCode.SETTINGS
    assert text.startswith(f"stage rm with a {family}\n    why: Transformers has no sequence classification")


@pytest.mark.parametrize("family", SCORED)
def test_what_is_saved_is_read_as_a_reward_model(family: str, tmp_path: Path) -> None:
    class_name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[FAMILIES[family].computed_as or family]
    saved = as_saved(tiny_config(family, tie_word_embeddings=True).to_dict(), class_name, pad_token_id=7)
    (tmp_path / "config.json").write_text(json.dumps(saved))
    found = AutoConfig.from_pretrained(tmp_path)
    assert (found.num_labels, found.pad_token_id) == (1, 7)
    architecture = load_architecture(tmp_path)
    assert (architecture.num_labels, architecture.tie_word_embeddings) == (1, False)
    assert load_architecture(tmp_path, "rm") == architecture
    names = {tensor.name for weight in FAMILIES[family].weight_map(architecture) for tensor in weight.hf}
    assert "score.weight" in names
    assert "lm_head.weight" not in names
    assert as_saved(saved, class_name, pad_token_id=7) == saved


def test_other_stages_refuse_a_reward_model(tmp_path: Path) -> None:
    saved = as_saved(tiny_config("qwen3").to_dict(), "Qwen3ForSequenceClassification", pad_token_id=0)
    assert refused(tmp_path, saved, "dpo") == (
        ExitCode.SETTINGS,
        "stage dpo with a reward model\n"
        "    why: it has a score in place of the output layer\n"
        "    fix: write stage: rm, or name a language model",
    )


def test_a_classifier_of_several_kinds_is_no_reward_model(tmp_path: Path) -> None:
    config = tiny_config("llama").to_dict() | {"architectures": ["LlamaForSequenceClassification"]}  # of two labels
    code, text = refused(tmp_path, config)
    assert code == ExitCode.INPUT
    assert text.startswith(
        "LlamaForSequenceClassification has 2 labels\n    why: a reward model has one, the score of an answer"
    )


@pytest.mark.parametrize("family", ["qwen3_vl", "mistral3", "gemma3"])
def test_vision_language_models_have_none(tmp_path: Path, family: str) -> None:
    assert refused(tmp_path, tiny_config(family).to_dict(), "rm") == (
        ExitCode.SETTINGS,
        f"stage rm with a {family}\n"
        "    why: reward models are made from language models that read text only\n"
        "    fix: name a language model of another family",
    )
