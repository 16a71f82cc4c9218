"""Clients of judges that run as engines of this run."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatune.data.encode import load_tokenizer
from megatune.rl.prompts import encode_prompts, prompt_writer
from megatune.rl.rewards.answer import RewardError
from megatune.rl.rollout.checks import INSTRUCTION_TOKENS
from megatune.rl.samples import Request, Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.rl.rollout import Generating, RolloutSettings
    from megatune.config.rl.settings import InferRole, RLSettings


class JudgeEngines(Protocol):
    """The used part of `pipeline.roles.EngineGroup`."""

    async def generate(self, requests: Sequence[Request]) -> list[Response]: ...


class JudgeClient:
    """Sends prompts to a judge of this run.

    Args:
        context: maximum number of tokens of a prompt and its answer.
    """

    def __init__(
        self, engines: JudgeEngines, tokenizer: PreTrainedTokenizerBase, generating: Generating, context: int
    ) -> None:
        self._engines, self._tokenizer = engines, tokenizer
        self._generating, self._context = generating, context
        self._write, self._numbers = prompt_writer(None, tokenizer), itertools.count()

    async def __call__(self, messages: list[dict[str, str]]) -> str:
        """Return the reply; ask again if the request is aborted because the engines must sleep.

        Raises:
            RewardError: the prompt is too long for the model.
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
            seed=int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=7).digest()),  # independent of the order
            max_new_tokens=generating.max_tokens,
            temperature=generating.temperature if generating.do_sample else 0.0,
            top_p=generating.top_p,
            top_k=generating.top_k,
            repetition_penalty=generating.repetition_penalty,
            stop_strings=tuple(generating.stop_strings),
        )


def judge_context(rollout: RolloutSettings, judge: InferRole) -> int:
    """Return a judge's maximum number of tokens: of a prompt, a response, its instructions and its answer."""
    return rollout.longest_sequence + INSTRUCTION_TOKENS + judge.generating_args.max_tokens


def judge_clients(settings: RLSettings, engines: Mapping[str, JudgeEngines]) -> dict[str, JudgeClient]:
    """Return the client of each domain that has a judge in this run.

    Args:
        engines: of the judges, by role name.

    Raises:
        MegatuneError: INPUT, if a judge has no tokenizer or chat template.
    """
    judges = settings.judges
    clients: dict[str, JudgeClient] = {}
    for judge in judges.values():
        if judge.name not in clients:
            tokenizer = load_tokenizer(judge.model_name_or_path)
            context = judge_context(settings.rollout, judge)
            clients[judge.name] = JudgeClient(engines[judge.name], tokenizer, judge.generating_args, context)
    return {domain: clients[judge.name] for domain, judge in judges.items()}
