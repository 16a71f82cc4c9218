"""Asks a model of this run to judge."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatune.data.encode import load_tokenizer
from megatune.rl.prompts import encode_prompts, prompt_writer
from megatune.rl.rewards.answer import RewardError
from megatune.rl.rollout.engine import INSTRUCTION_TOKENS
from megatune.rl.samples import Request, Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.rl.rollout import Generating, RolloutSettings
    from megatune.config.rl.settings import InferRole, RewardRole, RLSettings


class JudgeEngines(Protocol):
    """What is used of `pipeline.roles.EngineGroup`."""

    async def generate(self, requests: Sequence[Request]) -> list[Response]: ...


class JudgeClient:
    """Asks a model of this run.

    Args:
        context: tokens of a prompt and its answer at most.
    """

    def __init__(
        self, engines: JudgeEngines, tokenizer: PreTrainedTokenizerBase, generating: Generating, context: int
    ) -> None:
        self._engines, self._tokenizer = engines, tokenizer
        self._generating, self._context = generating, context
        self._write, self._numbers = prompt_writer(None, tokenizer), itertools.count()

    async def __call__(self, messages: list[dict[str, str]]) -> str:
        """Return what the model says; ask again where the engines have to sleep meanwhile.

        Raises:
            RewardError: the question is too long for the model.
        """
        request = self._request(next(self._numbers), messages)
        while True:
            for response in await self._engines.generate([request]):
                if response.finish != "abort":
                    return response.texts[-1].strip()

    def _request(self, number: int, messages: list[dict[str, str]]) -> Request:
        generating = self._generating
        ids = np.asarray(encode_prompts([self._write(messages)], self._tokenizer)[0], np.int64)
        if len(ids) + generating.max_tokens > self._context:
            raise RewardError(f"the judge would have to read {len(ids):,} tokens, its context is {self._context:,}")
        return Request(
            id=f"judge-{number}",
            prompt_ids=ids,
            seed=int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=7).digest()),  # whenever it is asked
            max_new_tokens=generating.max_tokens,
            temperature=generating.temperature if generating.do_sample else 0.0,
            top_p=generating.top_p,
            top_k=generating.top_k,
            repetition_penalty=generating.repetition_penalty,
            stop_strings=tuple(generating.stop_strings),
        )


def judge_context(rollout: RolloutSettings, judge: InferRole) -> int:
    """Return the tokens that a judge reads and writes at most: a prompt, a response, and what it is asked."""
    return rollout.longest_sequence + INSTRUCTION_TOKENS + judge.generating_args.max_tokens


def judge_clients(settings: RLSettings, engines: Mapping[str, JudgeEngines]) -> dict[str, JudgeClient]:
    """Return what asks the judge of each domain that has one in this run.

    Args:
        engines: of the judges, by their roles' names.

    Raises:
        MegatuneError: INPUT, where a judge has no tokenizer, or that has no chat template.
    """
    judges = judges_of(settings.rewards, settings.reward_model)
    asks: dict[str, JudgeClient] = {}
    for judge in judges.values():
        if judge.name not in asks:
            tokenizer = load_tokenizer(judge.model_name_or_path)
            context = judge_context(settings.rollout, judge)
            asks[judge.name] = JudgeClient(engines[judge.name], tokenizer, judge.generating_args, context)
    return {domain: asks[judge.name] for domain, judge in judges.items()}


def judges_of(rewards: Mapping[str, RewardRole], reward_model: InferRole | None) -> dict[str, InferRole]:
    """Return which role judges for which domain; those that share one share its engines, too."""
    judges = {domain: role.judge for domain, role in rewards.items() if role.judge is not None}
    if reward_model is not None:
        shared = [domain for domain, role in rewards.items() if role.arguments.get("judge_model_type") == "cluster"]
        judges |= dict.fromkeys(shared, reward_model)
    return judges
