"""One group from its prompt to its scores: sampled, scored, and sampled further where an environment answers, whose
words are tokens between two turns of the model."""

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
from megatune.rl.pipeline.groups import Group, Sampling
from megatune.rl.pipeline.roles import EngineGroup
from megatune.rl.prompts import prompt_writer
from megatune.rl.rewards.pool import RewardPool
from megatune.rl.samples import Problem, Response, Sample, texts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION, _TURN, _OBSERVATION = "a question", "a turn of the model", "an observation"

# (problem, its response so far, what was observed) -> the response with the observation, which goes on
Extend = Callable[[Problem, Response, str], Response]


class Sampler:
    """Samples and scores any number of groups at once.

    Args:
        decode: ids of tokens, int64 -> text, without special tokens, of responses that come without texts: those of
            an earlier process.
        extend: writes what an environment observes.

    Attributes:
        takes_answers: the rows' own answers are the responses of groups that begin now.
    """

    takes_answers = False

    def __init__(
        self,
        engines: EngineGroup,
        pool: RewardPool,
        sampling: Sampling,
        decode: Callable[[np.ndarray], str],
        extend: Extend,
    ) -> None:
        self._engines, self._pool, self._sampling = engines, pool, sampling
        self._decode, self._extend = decode, extend
        self._is_open = asyncio.Event()
        self.resume()

    async def finish(self, group: Group) -> None:
        """Sample what a group lacks and score it, until all of its responses have ended.

        Raises:
            MegatuneError: see `RewardPool.score`.
        """
        group.longest = self._sampling.response_length
        if self.takes_answers:
            group.answer(group.longest)
        while True:
            while requests := self._sampling.requests(group):
                await self._is_open.wait()
                for response in await self._engines.generate(requests):
                    group.note(response)
            await self._score(group)
            if group.samples:
                return

    async def pause(self) -> None:
        """Let the engines sample nothing; groups keep what they have, and are still scored."""
        self._is_open.clear()
        await self._engines.abort()

    def resume(self) -> None:
        """Let groups be sampled again, from where they were."""
        self._is_open.set()

    async def _score(self, group: Group) -> None:
        group.samples = [group.ended.get(place) or self._sample(group, place) for place in range(group.size)]
        asked = [sample for place, sample in enumerate(group.samples) if place not in group.ended]
        await asyncio.gather(*map(self._pool.score, asked))
        self._go_on(group)

    def _sample(self, group: Group, place: int) -> Sample:
        response = group.responses[place]
        *turns, text = response.texts or texts_of(response, self._decode)
        return Sample(group.problem, group.number, response, text, turns=tuple(turns))

    def _go_on(self, group: Group) -> None:
        """Write observations behind the turns that an environment has answered. A response that has no room for one and
        a token ends before it, and is scored as one that is cut off; the group has no samples until all have ended."""
        observed = {
            place: sample.details[OBSERVATION]
            for place, sample in enumerate(group.samples)
            if OBSERVATION in sample.details
        }
        if not observed:
            group.ended = {}
            return
        group.ended = {place: sample for place, sample in enumerate(group.samples) if place not in observed}
        group.samples = []
        for place, text in observed.items():
            response = group.responses[place]
            longer = self._extend(group.problem, response, text)
            if len(longer.response_ids) < group.longest:
                group.parts[place] = longer
                del group.responses[place]
            else:
                group.responses[place] = replace(response, finish="length")


# (how, "train" or "eval") -> what samples and scores so
MakeSampler = Callable[[Generating, str], Sampler]


def sampler_maker(settings: RLSettings, engines: EngineGroup, pool: RewardPool, source: Path) -> MakeSampler:
    """Return what makes the samplers of a run.

    Args:
        source: the folder of the model that is sampled from.
    """
    tokenizer, rollout = load_tokenizer(source), settings.rollout
    lengths = {"train": rollout.max_response_length, "eval": rollout.val_max_response_length}
    stops = stop_tokens(source, tokenizer.eos_token_id)
    decode, extend = partial(tokenizer.decode, skip_special_tokens=True), turn_writer(settings, tokenizer)

    def make(generating: Generating, kind: str) -> Sampler:
        sampling = Sampling(generating, settings.run.seed, lengths[kind], kind, stops)
        return Sampler(engines, pool, sampling, decode, extend)

    return make


async def sample_all(problems: Sequence[Problem], sampler: Sampler, generating: Generating) -> list[Group]:
    """Sample and score num_return_sequences responses to every problem, in their order. A problem's random numbers are
    the same in every validation."""
    size = max(1, generating.num_return_sequences)
    groups = [Group(problem, place, place, size) for place, problem in enumerate(problems)]
    await asyncio.gather(*map(sampler.finish, groups))
    return groups


def turn_writer(settings: RLSettings, tokenizer: PreTrainedTokenizerBase) -> Extend:
    """Return what writes observations: as messages of the user's in the prompt's template; as they are after a prompt
    that is text, or whose template takes one question.

    The template is asked once for what stands between a turn and the next: it writes a conversation of known texts.
    The writer raises MegatuneError (INPUT), where the template writes none of several turns.
    """
    rollout, data = settings.rollout, settings.data
    default = rollout.global_template or data.template

    @lru_cache
    def around(tag: str) -> tuple[str, str]:
        """Return what stands before an observation, after the turn's text, and what stands behind it."""
        write = prompt_writer((rollout.tag_to_template or {}).get(tag, default), tokenizer)
        said = [(_QUESTION, "user"), (_TURN, "assistant"), (_OBSERVATION, "user")]
        try:
            text = write([{"role": role, "content": content} for content, role in said])
        except RowError as error:
            if error.code == "not-one-question":
                return "", ""
            raise _writes_no_turns(str(error)) from error
        before, found, after = text.partition(_TURN)[2].partition(_OBSERVATION)
        if not found:
            raise _writes_no_turns("it leaves messages out")
        return before, after

    def extend(problem: Problem, response: Response, observation: str) -> Response:
        is_text = [each["content"] for each in problem.messages] in ([], [problem.prompt])
        before, after = ("", "") if is_text else around(problem.tag)
        ended = str(tokenizer.decode([int(response.response_ids[-1])]))
        # The token that has ended the turn is what the template ends it with.
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


def _writes_no_turns(why: str) -> MegatuneError:
    what = "the prompt's template does not write a conversation of several turns"
    return MegatuneError(Finding(what, "environment", why, "write template: NAME of one that does"), ExitCode.INPUT)
