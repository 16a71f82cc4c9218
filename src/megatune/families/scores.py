"""Reward models: Transformers' ...ForSequenceClassification with one label, a score in place of the output layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatune.architecture import Architecture
from megatune.errors import ExitCode, Finding, MegatuneError

STAGE = "rm"
SCORER = "scorer"  # in place of a stage: of a role that scores with a reward model as it is
_TEXT_ONLY = "reward models are made from language models that read text only"
_CLASSIFIER = "ForSequenceClassification"


def num_labels(config: Mapping[str, Any]) -> int:
    """Return how many scores a config.json's model puts out for a sequence; 0 of a language model."""
    if not any(str(name).endswith(_CLASSIFIER) for name in config.get("architectures") or ()):
        return 0
    # Transformers writes the names of labels, and none where there are two.
    return int(config.get("num_labels") or len(config.get("id2label") or (0, 1)))


def score_problems(config: Mapping[str, Any], *, has_vision: bool) -> Iterator[tuple[str, str]]:
    """Yield what keeps a classifier from being a reward model, and why."""
    count = num_labels(config)
    if count and has_vision:
        yield f"it is a {config['architectures'][0]}", _TEXT_ONLY
    elif count > 1:
        yield f"{config['architectures'][0]} has {count} labels", "a reward model has one, the score of an answer"


def as_trained(architecture: Architecture, stage: str, where: str) -> Architecture:
    """Return the model that a stage trains, made of the one that it starts from: with stage rm a reward model; with
    SCORER the reward model that it is.

    Raises:
        MegatuneError: SETTINGS, when the stage cannot train it, or it scores nothing.
    """
    if stage == STAGE:
        if architecture.vision is not None or not architecture.has_classifier:
            what = f"stage rm with a {architecture.model_type}"
            why = "Transformers has no sequence classification of this family, in which a reward model could be saved"
            why = why if architecture.vision is None else _TEXT_ONLY
            raise MegatuneError(Finding(what, where, why, "name a language model of another family"), ExitCode.SETTINGS)
        return replace(architecture, num_labels=1, tie_word_embeddings=False)
    if stage == SCORER and not architecture.num_labels:
        what, why = "it is a language model", "a reward model has a score in place of the output layer"
        fix = "name one that `megatune rm` has trained, or a published ...ForSequenceClassification with one label"
        raise MegatuneError(Finding(what, where, why, fix), ExitCode.SETTINGS)
    if architecture.num_labels and stage != SCORER:
        what, why = f"stage {stage} with a reward model", "it has a score in place of the output layer"
        fix = "write stage: rm, or name a language model"
        raise MegatuneError(Finding(what, where, why, fix), ExitCode.SETTINGS)
    return architecture


def as_saved(config: Mapping[str, Any], class_name: str, pad_token_id: int) -> dict[str, Any]:
    """Return the config.json of a reward model, made of that of the model it was trained from.

    Args:
        class_name: of Transformers' classifiers of this family.
        pad_token_id: Transformers reads the score at the last token that is another one.
    """
    kept = {key: value for key, value in config.items() if key != "num_labels"}
    return {
        **kept,
        "architectures": [class_name],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": pad_token_id,
    }
