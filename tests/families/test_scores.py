"""Reward models and classifiers: which families have one, and what their config.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_sizes import tiny_config
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from megatune.errors import ExitCode, MegatuneError, with_article
from megatune.families import FAMILIES, load_architecture
from megatune.families.scores import SCORER, as_saved

LANGUAGE_MODELS = sorted(name for name, family in FAMILIES.items() if family.vision is None)
SCORED = [name for name in LANGUAGE_MODELS if FAMILIES[name].constants.get("has_classifier", True)]


def refused(
    folder: Path, config: dict[str, Any], stage: str | None = None, num_labels: int | None = None
) -> tuple[ExitCode, str]:
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MegatuneError) as raised:
        load_architecture(folder, stage, num_labels)
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
    assert text.startswith(
        f"stage rm with {with_article(family)}\n    why: Transformers has no sequence classification"
    )


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
    named = saved | {"id2label": {"0": "quality"}, "label2id": {"quality": 0}}
    assert as_saved(named, class_name, pad_token_id=7) == named, "names of labels stay"


def test_other_stages_refuse_a_reward_model(tmp_path: Path) -> None:
    saved = as_saved(tiny_config("qwen3").to_dict(), "Qwen3ForSequenceClassification", pad_token_id=0)
    assert refused(tmp_path, saved, "dpo") == (
        ExitCode.SETTINGS,
        "stage dpo with a model that has 1 score\n"
        "    why: it has no output layer, and cannot generate text\n"
        "    fix: write stage: rm, or name a language model",
    )


@pytest.mark.parametrize(
    ("stage", "count", "found"),
    [
        (
            "rm", None,
            "stage rm with a model that has 2 scores\n"
            "    why: a reward model has one, the score of an answer\n"
            "    fix: write stage: cls with num_labels: 2, or name a language model",
        ),
        (
            "cls", 3,
            "num_labels 3 with a model that has 2 scores\n"
            "    why: existing scores keep their number\n"
            "    fix: write num_labels: 2, or name a language model, for which new scores are created",
        ),
        (
            "sft", None,
            "stage sft with a model that has 2 scores\n"
            "    why: it has no output layer, and cannot generate text\n"
            "    fix: write stage: cls, or name a language model",
        ),
        (
            SCORER, None,
            "it has 2 scores\n"
            "    why: a reward model has one score in place of the output layer\n"
            "    fix: name one that `megatune rm` has trained, "
            "or a published ...ForSequenceClassification with one label",
        ),
    ],
)  # fmt: skip
def test_a_classifier_of_two_kinds_is_trained_as_one(tmp_path: Path, stage: str, count: int | None, found: str) -> None:
    config = tiny_config("llama").to_dict() | {"architectures": ["LlamaForSequenceClassification"]}  # of two labels
    assert refused(tmp_path, config, stage, count) == (ExitCode.SETTINGS, found)
    assert load_architecture(tmp_path, "cls", 2) == load_architecture(tmp_path)


def test_names_and_problem_type_of_a_classifier_are_saved(tmp_path: Path) -> None:
    """Names stay where the model had as many; a language model's are those that Transformers gives."""
    own = tiny_config("qwen3").to_dict()
    saved = as_saved(own, "Qwen3ForSequenceClassification", 7, 3, "multi_label_classification")
    named = saved | {"id2label": {"0": "bad", "1": "fair", "2": "good"}}
    again = as_saved(named, "Qwen3ForSequenceClassification", 7, 3, None)
    for config, names in ((saved, ["LABEL_0", "LABEL_1", "LABEL_2"]), (again, ["bad", "fair", "good"])):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = AutoConfig.from_pretrained(tmp_path)
        assert [*found.id2label.values()] == names
        assert found.label2id == {name: number for number, name in enumerate(names)}
        assert (found.num_labels, found.problem_type) == (3, "multi_label_classification")
        assert load_architecture(tmp_path).num_labels == 3


@pytest.mark.parametrize("family", ["qwen3_vl", "mistral3", "gemma3"])
def test_vision_language_models_have_none(tmp_path: Path, family: str) -> None:
    assert refused(tmp_path, tiny_config(family).to_dict(), "rm") == (
        ExitCode.SETTINGS,
        f"stage rm with {with_article(family)}\n"
        "    why: models with scores are made from language models that read text only\n"
        "    fix: name a language model of another family",
    )
