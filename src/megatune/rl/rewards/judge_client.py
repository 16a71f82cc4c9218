"""Asks a model of this run to judge: threads of the reward pool wait, and the driver's lets its engines sample."""

from __future__ import annotations

import hashlib
import itertools
import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
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
    """What is used of `pipeline.engines.Engines`."""

    @property
    def number(self) -> int: ...

    def submit(self, requests: Sequence[Sequence[Request]]) -> None: ...

    def step(self, *, wait: bool = True) -> list[Response]: ...


class JudgeClient:
    """Asks a model of this run. Threads wait for their answers; only who pumps touches the engines.

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
        self._asked: queue.SimpleQueue[tuple[Request, Future[Response]]] = queue.SimpleQueue()
        self._waiting: dict[str, Future[Response]] = {}
        self._closed = False

    def __call__(self, messages: list[dict[str, str]], limit: float) -> str:
        """Wait for what the model says, for at most `limit` seconds.

        Raises:
            RewardError: the question is too long for the model, or the run ends.
            TimeoutError: there is no answer; it may be lost.
        """
        number, answer = next(self._numbers), Future[Response]()
        self._asked.put((self._request(number, messages), answer))
        try:
            if self._closed:
                raise CancelledError
            response = answer.result(limit)
        except CancelledError as error:
            raise RewardError("the run ends") from error
        except TimeoutError as error:
            answer.cancel()
            raise TimeoutError(f"the judge has not answered within {limit:g} seconds") from error
        return str(self._tokenizer.decode(response.response_ids.tolist(), skip_special_tokens=True)).strip()

    def pump(self, *, wait: bool) -> None:
        """Let the model's engines work on, with whatever was asked."""
        new: list[list[Request]] = [[] for _ in range(self._engines.number)]
        self._waiting = {id_: answer for id_, answer in self._waiting.items() if not answer.done()}
        while not self._asked.empty():
            request, answer = self._asked.get()
            self._waiting[request.id] = answer
            new[len(self._waiting) % len(new)].append(request)
        if any(new):
            self._engines.submit(new)
        if self._waiting:
            for response in self._engines.step(wait=wait):
                answered = self._waiting.pop(response.id, None)
                if answered is not None and answered.set_running_or_notify_cancel():
                    answered.set_result(response)

    def close(self) -> None:
        """Let nobody wait any longer."""
        self._closed = True
        while not self._asked.empty():
            self._asked.get()[1].cancel()
        for answer in self._waiting.values():
            answer.cancel()

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
