"""Samples and scores groups; if an environment answers a turn, appends the observation and samples the next turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatune.config.rl.rollout import Generating
from megatune.config.rl.settings import RLSettings
from megatune.data.bad_rows import RowError
from megatune.data.encode import load_tokenizer
from megatune.data.tokenizer_files import stop_tokens
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.environments import OBSERVATION
from megatune.rl.pipeline.groups import Group, RequestBuilder
from megatune.rl.pipeline.roles import EngineGroup
from megatune.rl.prompts import prompt_writer
from megatune.rl.rewards.pool import RewardPool
from megatune.rl.samples import Problem, Response, Sample, texts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION, _TURN, _OBSERVATION = "a question", "a turn of the model", "an observation"

# (problem, response so far, observation) -> the response with the observation, to be continued
Extend = Callable[[Problem, Response, str], Response]


class Sampler:
    """Samples and scores any number of groups concurrently.

    Args:
        decode: token ids, int64 -> text without special tokens, for responses without texts, from an earlier process.
        extend: appends an observation to a response.

    Attributes:
        takes_answers: whether new groups take the rows' own answers as responses.
    """

    takes_answers = False

    def __init__(
        self,
        engines: EngineGroup,
        pool: RewardPool,
        builder: RequestBuilder,
        decode: Callable[[np.ndarray], str],
        extend: Extend,
    ) -> None:
        self._engines, self._pool, self._builder = engines, pool, builder
        self._decode, self._extend = decode, extend
        self._is_open = asyncio.Event()
        self.resume()

    async def finish(self, group: Group) -> None:
        """Sample the missing responses of a group and score it, until all of its responses have ended.

        Raises:
            MegatuneError: see `RewardPool.score`.
        """
        group.longest = self._builder.response_length
        if self.takes_answers:
            group.use_row_answer(group.longest)
        while True:
            while requests := self._builder.requests(group):
                await self._is_open.wait()
                for response in await self._engines.generate(requests):
                    group.add_response(response)
            await self._score(group)
            if group.samples:
                return

    async def pause(self) -> None:
        """Stop sampling; groups keep their partial responses, and are still scored."""
        self._is_open.clear()
        await self._engines.abort()

    def resume(self) -> None:
        """Continue sampling, from the partial responses."""
        self._is_open.set()

    async def _score(self, group: Group) -> None:
        group.samples = [group.ended.get(index) or self._sample(group, index) for index in range(group.size)]
        unscored = [sample for index, sample in enumerate(group.samples) if index not in group.ended]
        await asyncio.gather(*map(self._pool.score, unscored))
        self._continue_turns(group)

    def _sample(self, group: Group, index: int) -> Sample:
        response = group.responses[index]
        *turns, text = response.texts or texts_of(response, self._decode)
        return Sample(group.problem, group.number, response, text, turns=tuple(turns))

    def _continue_turns(self, group: Group) -> None:
        """Append observations to the responses that an environment has answered, for their next turns.

        A response without room for the observation and one more token ends before it and is scored as truncated. The
        group has no samples until all of its responses have ended."""
        observed = {
            index: sample.details[OBSERVATION]
            for index, sample in enumerate(group.samples)
            if OBSERVATION in sample.details
        }
        if not observed:
            group.ended = {}
            return
        group.ended = {index: sample for index, sample in enumerate(group.samples) if index not in observed}
        group.samples = []
        for index, text in observed.items():
            response = group.responses[index]
            longer = self._extend(group.problem, response, text)
            fits = len(longer.response_ids) < group.longest
            group.responses[index] = longer if fits else replace(response, finish="length")


# (generating_args, "train" or "eval") -> a sampler
SamplerFactory = Callable[[Generating, str], Sampler]


def make_sampler_factory(settings: RLSettings, engines: EngineGroup, pool: RewardPool, source: Path) -> SamplerFactory:
    """Return the factory of a run's samplers.

    Args:
        source: the folder of the model to sample from.
    """
    tokenizer, rollout = load_tokenizer(source), settings.rollout
    lengths = {"train": rollout.max_response_length, "eval": rollout.val_max_response_length}
    stops = stop_tokens(source, tokenizer.eos_token_id)
    decode, extend = partial(tokenizer.decode, skip_special_tokens=True), observation_writer(settings, tokenizer)

    def make(generating: Generating, kind: str) -> Sampler:
        builder = RequestBuilder(generating, settings.run.seed, lengths[kind], kind, stops)
        return Sampler(engines, pool, builder, decode, extend)

    return make


async def sample_all(problems: Sequence[Problem], sampler: Sampler, generating: Generating) -> list[Group]:
    """Sample and score num_return_sequences responses to every problem, in order. A problem has the same random numbers
    in every validation."""
    size = max(1, generating.num_return_sequences)
    groups = [Group(problem, index, index, size) for index, problem in enumerate(problems)]
    await asyncio.gather(*map(sampler.finish, groups))
    return groups


def observation_writer(settings: RLSettings, tokenizer: PreTrainedTokenizerBase) -> Extend:
    """Return a function that appends observations to responses: as user messages in the prompt's template, or verbatim
    if the prompt is plain text or its template takes one question.

    The text between two turns is found once per template, by rendering a conversation of known texts. The function
    raises MegatuneError (INPUT) if the template does not support several turns.
    """
    rollout, data = settings.rollout, settings.data
    default = rollout.global_template or data.template

    @lru_cache
    def around(tag: str) -> tuple[str, str]:
        """Return the template's text between a turn and an observation, and the text after the observation."""
        write = prompt_writer((rollout.tag_to_template or {}).get(tag, default), tokenizer)
        said = [(_QUESTION, "user"), (_TURN, "assistant"), (_OBSERVATION, "user")]
        try:
            text = write([{"role": role, "content": content} for content, role in said])
        except RowError as error:
            if error.code == "not-one-question":
                return "", ""
            raise _single_turn_template(str(error)) from error
        before, found, after = text.partition(_TURN)[2].partition(_OBSERVATION)
        if not found:
            raise _single_turn_template("it leaves messages out")
        return before, after

    def extend(problem: Problem, response: Response, observation: str) -> Response:
        is_text = [each["content"] for each in problem.messages] in ([], [problem.prompt])
        before, after = ("", "") if is_text else around(problem.tag)
        ended = str(tokenizer.decode([int(response.response_ids[-1])]))
        # The token that ended the turn is also the one that the template ends it with.
        text = before.removeprefix(ended) + observation + after
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
        begun = len(response.response_ids)
        return replace(
            response,
            response_ids=np.concatenate([response.response_ids, ids]),
            log_probs=np.concatenate([response.log_probs, np.zeros(len(ids), np.float32)]),
            finish="abort",
            routing=None,
            observed=(*response.observed, (begun, begun + len(ids))),
        )

    return extend


def _single_turn_template(why: str) -> MegatuneError:
    what = "the prompt's template does not support conversations of several turns"
    return MegatuneError(Finding(what, "environment", why, "set template to one that does"), ExitCode.INPUT)
