"""Reward models and classifiers: Transformers' ...ForSequenceClassification, which have scores instead of the output
layer; a reward model has one score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatune.architecture import Architecture
from megatune.errors import ExitCode, Finding, MegatuneError, with_article
from megatune.references import assign, ref, write

STAGE, CLASSES = "rm", "cls"
SCORER = "scorer"  # used as stage of a role that only scores with a reward model
_TEXT_ONLY = "models with scores are made from language models that read text only"
_CLASSIFIER = "ForSequenceClassification"


def num_labels(config: Mapping[str, Any]) -> int:
    """Return the number of scores of a config.json's model for a sequence; 0 for a language model."""
    if not any(str(name).endswith(_CLASSIFIER) for name in config.get("architectures") or ()):
        return 0
    # Transformers writes the names of labels, or nothing if there are two.
    return int(config.get("num_labels") or len(config.get("id2label") or (0, 1)))


def score_problems(config: Mapping[str, Any], *, has_vision: bool) -> Iterator[tuple[str, str]]:
    """Yield why a classifier is not supported, with reasons."""
    if num_labels(config) and has_vision:
        yield f"it is a {config['architectures'][0]}", _TEXT_ONLY


def as_trained(architecture: Architecture, where: str, stage: str, num_labels: int | None = None) -> Architecture:
    """Return the model that a stage trains, given the model that it starts from: for stage rm a reward model, for stage
    cls a classifier; for SCORER the reward model itself.

    Args:
        num_labels: number of a classifier's scores; None keeps those that it has.

    Raises:
        MegatuneError: SETTINGS, if the stage cannot train it, or it is not a reward model.
    """
    own = architecture.num_labels
    if stage in (STAGE, CLASSES):
        if architecture.vision is not None or not architecture.has_classifier:
            what = f"stage {stage} with {with_article(architecture.model_type)}"
            why = "Transformers has no sequence classification class for this family, so it could not be saved"
            why = why if architecture.vision is None else _TEXT_ONLY
            raise MegatuneError(Finding(what, where, why, "name a language model of another family"), ExitCode.SETTINGS)
        count = 1 if stage == STAGE else num_labels or own or 1
        if own not in (0, count):
            raise _other_scores(stage, own, count, where)
        return replace(architecture, num_labels=count, tie_word_embeddings=False)
    if stage == SCORER and own != 1:
        what = f"it has {own} scores" if own else "it is a language model"
        why = "a reward model has one score in place of the output layer"
        fix = "name one that `megatune rm` has trained, or a published ...ForSequenceClassification with one label"
        raise MegatuneError(Finding(what, where, why, fix), ExitCode.SETTINGS)
    if own and stage != SCORER:
        what = f"stage {stage} with a model that has {_scores(own)}"
        why = "it has no output layer, and cannot generate text"
        fix = f"{write('stage', STAGE if own == 1 else CLASSES)}, or name a language model"
        raise MegatuneError(Finding(what, where, why, fix), ExitCode.SETTINGS)
    return architecture


def _other_scores(stage: str, own: int, count: int, where: str) -> MegatuneError:
    if stage == STAGE:
        what, why = f"stage rm with a model that has {_scores(own)}", "a reward model has one, the score of an answer"
        fix = f"{write('stage', CLASSES)} with {assign('num_labels', own)}, or name a language model"
    else:
        what = f"{ref('num_labels', count)} with a model that has {_scores(own)}"
        why = "existing scores keep their number"
        fix = f"{write('num_labels', own)}, or name a language model, for which new scores are created"
    return MegatuneError(Finding(what, where, why, fix), ExitCode.SETTINGS)


def _scores(count: int) -> str:
    return f"{count} score{'s' * (count > 1)}"


def as_saved(
    config: Mapping[str, Any], class_name: str, pad_token_id: int, count: int = 1, problem_type: str | None = None
) -> dict[str, Any]:
    """Return the config.json of a model with scores, derived from that of the model it was trained from.

    Args:
        class_name: of Transformers' classifiers of this family.
        pad_token_id: Transformers reads the scores at the last token that differs from it.
        count: number of scores; their names are kept if the model had as many.
        problem_type: selects Transformers' loss; None leaves it unchanged.
    """
    kept = {key: value for key, value in config.items() if key != "num_labels"}
    names = {str(label): f"LABEL_{label}" for label in range(count)}
    if num_labels(config) == count:
        names = config.get("id2label") or names
    return {
        **kept,
        "architectures": [class_name],
        "id2label": names,
        "label2id": {name: int(label) for label, name in names.items()},
        "pad_token_id": pad_token_id,
        **({} if problem_type is None else {"problem_type": problem_type}),
    }
