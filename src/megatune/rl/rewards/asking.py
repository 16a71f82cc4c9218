"""Asks a model of this run to judge: several threads of the reward pool share its engines."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatune.rl.prompts import encode_prompt, prompt_writer
from megatune.rl.samples import Request, Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.rl.settings import Generating, InferRole, RewardRole

WAIT_SECONDS = 0.005  # for others that ask, before a step: so that their requests are sampled together


class JudgeEngines(Protocol):
    """Engines with the same weights (`pipeline.engines.Engines`, as far as it is used here)."""

    @property
    def number(self) -> int:
        """How many there are."""
        ...

    def submit(self, requests: Sequence[Sequence[Request]]) -> None:
        """Take requests, by engine."""
        ...

    def step(self) -> list[list[Response]]:
        """Sample on, and return what was finished, by engine."""
        ...


class EngineAsk:
    """An `Ask` of engines: whichever thread waits for its answer lets all of them sample on.

    Args:
        template: as `prompt_writer` takes it.
        stop_token_ids: what ends an answer.
    """

    def __init__(
        self,
        engines: JudgeEngines,
        tokenizer: PreTrainedTokenizerBase,
        generating: Generating,
        stop_token_ids: tuple[int, ...],
        template: str | None = None,
    ) -> None:
        self._engines, self._tokenizer, self._generating = engines, tokenizer, generating
        self._write, self._stop = prompt_writer(template, tokenizer), stop_token_ids
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._done: dict[str, Response] = {}

    def __call__(self, messages: list[dict[str, str]]) -> str:
        """Return what the model says."""
        number = next(self._numbers)
        request = self._request(number, messages)
        with self._lock:
            own = number % self._engines.number
            self._engines.submit([[request] if each == own else [] for each in range(self._engines.number)])
        while True:
            time.sleep(WAIT_SECONDS)
            with self._lock:
                if request.id not in self._done:
                    self._done |= {response.id: response for each in self._engines.step() for response in each}
                response = self._done.pop(request.id, None)
            if response is not None:
                return str(self._tokenizer.decode(response.response_ids.tolist(), skip_special_tokens=True)).strip()

    def _request(self, number: int, messages: list[dict[str, str]]) -> Request:
        generating = self._generating
        return Request(
            id=f"judge-{number}",
            prompt_ids=np.asarray(encode_prompt(self._write(messages), self._tokenizer), dtype=np.int64),
            seed=number,
            max_new_tokens=generating.max_new_tokens,
            temperature=generating.temperature if generating.do_sample else 0.0,
            top_p=generating.top_p,
            top_k=generating.top_k,
            repetition_penalty=generating.repetition_penalty,
            stop_token_ids=self._stop,
            stop_strings=generating.stop_strings,
        )


def judges_of(rewards: Mapping[str, RewardRole], reward_model: InferRole | None) -> dict[str, InferRole]:
    """Return which role judges for which domain; those that share one share its engines, too."""
    judges = {domain: role.judge for domain, role in rewards.items() if role.judge is not None}
    if reward_model is not None:
        shared = [domain for domain, role in rewards.items() if role.arguments.get("judge_model_type") == "cluster"]
        judges |= dict.fromkeys(shared, reward_model)
    return judges
