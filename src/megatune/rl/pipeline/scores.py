"""Scores of reward models, computed for all samples of a step or a validation together after sampling. So scores are a
function of the samples and the layout, whatever was finished first, and the models may share any device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatune.config.rl.settings import REWARD_MODEL, ModelRole, RLSettings
from megatune.data.bad_rows import RowError
from megatune.data.encode import load_tokenizer
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture, read_config
from megatune.rl.pipeline.groups import Group
from megatune.rl.pipeline.roles import DeviceScheduler, ModelGroup
from megatune.rl.prompts import conversation_writer, encode_prompts
from megatune.rl.rewards.answer import Verdict
from megatune.rl.rewards.pool import RewardPool
from megatune.rl.rewards.task import error_reply, verdict_reply
from megatune.rl.samples import Problem, Rollouts, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCORE = "model_score"  # key in a sample's details


class ScoredText:
    """The input of a reward model: prompt and response as a conversation in its own chat template; without a template
    the policy's tokens, if both tokenizers have the same vocabulary.

    Args:
        policy: the policy's tokenizer.

    Raises:
        MegatuneError: INPUT, if the reward model has no tokenizer, or has no chat template and another vocabulary.
    """

    def __init__(self, role: ModelRole, policy: PreTrainedTokenizerBase) -> None:
        folder = role.settings.model.model_name_or_path
        assert folder is not None, "refused by the settings' checks"
        self._tokenizer = load_tokenizer(folder)
        self._write = conversation_writer(self._tokenizer) if self._tokenizer.chat_template else None
        self._padding = read_config(folder).get("pad_token_id")
        # The score is computed where the token after the text would be predicted.
        self._max_tokens = load_architecture(folder).max_position_embeddings - 1
        if self._write is None and self._tokenizer.get_vocab() != policy.get_vocab():
            what = f"{role.name}: the tokenizer has no chat template, and differs from the policy's"
            why = "the policy's tokens mean other texts to the reward model"
            fix = "add the template that it was trained with: chat_template.jinja"
            raise MegatuneError(Finding(what, folder, why, fix), ExitCode.INPUT)

    def tokens(self, sample: Sample) -> np.ndarray:
        """Return a sample's tokens up to the last one that is not padding, whose score it gets, as in Transformers:
        int64 [t].

        Raises:
            RowError: the template refuses the messages, or the text is longer than the model's context.
        """
        problem = sample.problem
        if self._write is not None:
            text = self._write([*problem.messages, {"role": "assistant", "content": sample.text}])
            ids = np.asarray(encode_prompts([text], self._tokenizer)[0], np.int64)
        else:
            ids = np.concatenate([problem.prompt_ids, sample.response.response_ids])
        (others,) = np.nonzero(ids != self._padding) if self._padding is not None else (np.arange(len(ids)),)
        ids = ids[: others[-1] + 1 if len(others) else 1]
        if len(ids) > self._max_tokens:
            detail = f"the reward model would have to read {len(ids):,} tokens, and reads {self._max_tokens:,}"
            raise RowError("too-long", "the response is too long", detail)
        return ids


def check_scored(settings: RLSettings, problems: Iterable[Problem], policy: PreTrainedTokenizerBase) -> None:
    """Refuse a reward model that cannot read the responses to its problems.

    Raises:
        MegatuneError: see `ScoredText`; SETTINGS, if prompts have images.
    """
    with_images = {problem.domain for problem in problems if problem.images is not None}
    for domain, role in settings.scorers.items():
        ScoredText(role, policy)
        if domain in with_images:
            what, fix = f"{role.name} has a reward model, and prompts have images", "score by another worker_cls"
            raise MegatuneError(Finding(what, role.name, "reward models read text only", fix), ExitCode.SETTINGS)


class RewardModels:
    """Adds the scores of reward models to the scores that samples have.

    Args:
        models: loaded models by role name, among them the reward models.
        policy: the policy's tokenizer.
    """

    def __init__(
        self,
        settings: RLSettings,
        scheduler: DeviceScheduler,
        models: Mapping[str, ModelGroup],
        pool: RewardPool,
        policy: PreTrainedTokenizerBase,
    ) -> None:
        self._settings, self._scheduler, self._pool = settings, scheduler, pool
        self._models = {domain: models[role.name] for domain, role in settings.scorers.items()}
        self._texts = {domain: ScoredText(role, policy) for domain, role in settings.scorers.items()}

    def __bool__(self) -> bool:
        return bool(self._models)

    def score(self, groups: Sequence[Group]) -> None:
        """Score the samples of domains that have a reward model, except samples whose reward failed.

        Raises:
            MegatuneError: see `RewardPool.score`.
        """
        samples = [sample for group in groups for sample in group.samples if sample.has_score]
        for domain, model in self._models.items():
            own = [sample for sample in samples if sample.problem.domain == domain]
            cut = self._settings.rewards[domain].truncated_score
            texts: list[tuple[Sample, np.ndarray]] = []
            for sample in own:
                if cut is not None and sample.response.finish == "length":
                    self._add(sample, cut)
                    continue
                try:
                    texts.append((sample, self._texts[domain].tokens(sample)))
                except RowError as error:
                    self._pool.apply_reply(sample, error_reply(error))
            if texts:
                self._scheduler.compute(model, "weights")
                # One more token is appended to each text; in a causal model the score before it does not depend on it.
                rollouts = Rollouts([np.append(ids, 0) for _, ids in texts], [len(ids) for _, ids in texts])
                for (sample, _), values in zip(texts, model.token_values("values", rollouts), strict=True):
                    self._add(sample, float(values[0]))

    def _add(self, sample: Sample, value: float) -> None:
        role, details = self._settings.rewards[sample.problem.domain], {**sample.details, SCORE: value}
        correct = float(details.pop("correct"))
        if role.kind == REWARD_MODEL:  # no other reward defines `correct`
            correct = float(value > 0)
        self._pool.apply_reply(
            sample, verdict_reply(Verdict(sample.score + role.score_weight * value, correct, details))
        )
