"""Asks a model of this run to judge: threads of the reward pool ask, and the driver's lets its engines sample."""

from __future__ import annotations

import hashlib
import itertools
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatune.data.encode import load_tokenizer
from megatune.rl.prompts import encode_prompts, prompt_writer
from megatune.rl.rewards.answer import RewardError
from megatune.rl.rewards.judge import ModelAsk
from megatune.rl.samples import Request, Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.rl.rollout import Generating, RolloutSettings
    from megatune.config.rl.settings import InferRole, RewardRole, RLSettings

INSTRUCTION_TOKENS = 512  # of a judge's prompt, without question and response
WAIT_SECONDS = 1.0  # of a thread, between looks whether the run ends


class _Answer:
    """What one thread waits for."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._response: Response | None = None

    def give(self, response: Response) -> None:
        self._response = response
        self._event.set()

    def wait(self, seconds: float) -> Response | None:
        self._event.wait(seconds)
        return self._response


class JudgeEngines(Protocol):
    """What is used of `pipeline.engines.Engines`."""

    @property
    def number(self) -> int: ...

    def submit(self, requests: Sequence[Sequence[Request]]) -> None: ...

    def step(self, *, wait: bool = True) -> list[Response]: ...


class EngineAsk:
    """A `ModelAsk` of engines. Threads wait for their answers; only who pumps touches the engines.

    Args:
        context: tokens of a prompt and its answer at most.
        stop_token_ids: what ends an answer; (): what the engines know.
        template: as `prompt_writer` takes it.
    """

    def __init__(
        self,
        engines: JudgeEngines,
        tokenizer: PreTrainedTokenizerBase,
        generating: Generating,
        context: int,
        stop_token_ids: tuple[int, ...] = (),
        template: str | None = None,
    ) -> None:
        self._engines, self._tokenizer = engines, tokenizer
        self._generating, self._context = generating, context
        self._write, self._stop = prompt_writer(template, tokenizer), stop_token_ids
        self._numbers = itertools.count()
        self._asked: queue.SimpleQueue[tuple[Request, _Answer]] = queue.SimpleQueue()
        self._waiting: dict[str, _Answer] = {}
        self._closed = threading.Event()

    def __call__(self, messages: list[dict[str, str]]) -> str:
        """See `ModelAsk`.

        Raises:
            RewardError: the question is too long for the model.
        """
        answer = _Answer()
        self._asked.put((self._request(next(self._numbers), messages), answer))
        while (response := answer.wait(WAIT_SECONDS)) is None:
            if self._closed.is_set():
                raise RewardError("the run ends")
        return str(self._tokenizer.decode(response.response_ids.tolist(), skip_special_tokens=True)).strip()

    def pump(self, *, wait: bool) -> None:
        """See `ModelAsk`."""
        new: list[list[Request]] = [[] for _ in range(self._engines.number)]
        while not self._asked.empty():
            request, answer = self._asked.get()
            self._waiting[request.id] = answer
            new[len(self._waiting) % len(new)].append(request)
        if any(new):
            self._engines.submit(new)
        if self._waiting:
            for response in self._engines.step(wait=wait):
                self._waiting.pop(response.id).give(response)

    def close(self) -> None:
        """See `ModelAsk`."""
        self._closed.set()

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
            stop_token_ids=self._stop,
            stop_strings=tuple(generating.stop_strings),
        )


def judge_context(rollout: RolloutSettings, judge: InferRole) -> int:
    """Return the tokens that a judge reads and writes at most: a prompt, a response, and what it is asked."""
    return rollout.longest_sequence + INSTRUCTION_TOKENS + judge.generating_args.max_tokens


def asks_of(settings: RLSettings, engines: Mapping[str, JudgeEngines]) -> dict[str, ModelAsk]:
    """Return what asks the judge of each domain that has one in this run.

    Args:
        engines: of the judges, by their roles' names.

    Raises:
        MegatuneError: INPUT, where a judge has no tokenizer, or that has no chat template.
    """
    judges = judges_of(settings.rewards, settings.reward_model)
    asks: dict[str, ModelAsk] = {}
    for judge in judges.values():
        if judge.name not in asks:
            tokenizer = load_tokenizer(judge.model_name_or_path)
            context = judge_context(settings.rollout, judge)
            asks[judge.name] = EngineAsk(engines[judge.name], tokenizer, judge.generating_args, context)
    return {domain: asks[judge.name] for domain, judge in judges.items()}


def judges_of(rewards: Mapping[str, RewardRole], reward_model: InferRole | None) -> dict[str, InferRole]:
    """Return which role judges for which domain; those that share one share its engines, too."""
    judges = {domain: role.judge for domain, role in rewards.items() if role.judge is not None}
    if reward_model is not None:
        shared = [domain for domain, role in rewards.items() if role.arguments.get("judge_model_type") == "cluster"]
        judges |= dict.fromkeys(shared, reward_model)
    return judges
