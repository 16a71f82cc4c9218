"""Scores samples, on all machines of the run, while others are still sampled."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.rewards.answer import Answer, Unscored
from megatune.rl.rewards.judge import Ask, Judge
from megatune.rl.rewards.kinds import ENVIRONMENT, KINDS, load_reward
from megatune.rl.rewards.task import Job, Scorer, WorkerDiedError, failure_of, reply_of
from megatune.rl.samples import Sample

if TYPE_CHECKING:
    from megatune.config.rl.settings import RewardRole

_AT_ONCE = 32  # answers that a process takes at the most
FAILURES_IN_A_ROW = 64  # of one domain: then it is the reward that is broken, and training on zeros must not go on


@dataclass(slots=True)
class _Domain:
    """How the samples of one domain are scored, and how many at a time.

    Attributes:
        workers: places, each of which scores some answers, one after the other.
        most: answers that a place takes at once.
        late_is_wrong: see `Kind`.
        waiting: with what gets their replies.
        serving: places that are taken.
        counts: of samples without a score since the start of the run: "errors", where the reward raised, its process
            died or it could not be had, and "timeouts", where it took too long.
    """

    score: Callable[[Sequence[Answer]], Awaitable[list[dict[str, Any]]]]
    workers: int
    most: int
    late_is_wrong: bool
    waiting: deque[tuple[Answer, asyncio.Future[dict[str, Any]]]] = field(default_factory=deque)
    serving: set[asyncio.Task[None]] = field(default_factory=set)
    failures_in_a_row: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def dispatch(self) -> None:
        """Let free places take what waits: fewer at once as less is left, so that all of them end together."""
        while len(self.serving) < self.workers and self.waiting:
            share = max(1, min(self.most, len(self.waiting) // (2 * self.workers)))
            taken = [self.waiting.popleft() for _ in range(share)]
            if asked := [each for each in taken if not each[1].done()]:  # somebody still wants it
                serving = asyncio.ensure_future(self._serve(asked))
                self.serving.add(serving)
                serving.add_done_callback(self._note_end)

    async def _serve(self, asked: Sequence[tuple[Answer, asyncio.Future[dict[str, Any]]]]) -> None:
        try:
            replies = await self.score([answer for answer, _ in asked])
        except Exception as error:  # whatever it is, these samples must have a reply
            replies = [failure_of(error)] * len(asked)
        for (_, future), reply in zip(asked, replies, strict=True):
            if not future.done():
                future.set_result(reply)

    def _note_end(self, serving: asyncio.Task[None]) -> None:
        self.serving.discard(serving)
        if not serving.cancelled():  # as the run ends
            self.dispatch()


class RewardPool:
    """Scores samples of every domain by the domain's reward.

    `score` sets `score` and `details` of a sample: `details["correct"]` is 1 or 0 (what accuracies and difficulty masks
    are of; `score` is what is trained on), and `details["error"]` says what went wrong where the reward raised, timed
    out or its process died twice: the score is 0 then, correct 0, and the pool goes on. Where only the answer can be
    what takes too long, it is `details["late"]`, and the score counts.

    Args:
        rewards: domain -> its reward; at most `workers` samples are scored at a time (by those that compute no more
            than there are cores).
        scorer: scores an answer in a process of its own, such as `task.ray_scorer`. Judges need none.
        log_dir: what the processes print goes there, into reward-DOMAIN.log; None: to their stderr.
        limit: seconds that one sample may take; None: `timeout` of the reward's arguments, or of its kind.
        machines: that score.

    Attributes:
        clients: domain -> what asks the model of an llm_judge whose judge_model_type is "inference" or "cluster".

    Raises:
        MegatuneError: see `load_rewards`.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardRole],
        scorer: Scorer,
        *,
        log_dir: Path | None = None,
        limit: float | None = None,
        machines: int = 1,
    ) -> None:
        self.clients: dict[str, Ask] = {}
        self._domains: dict[str, _Domain] = {}
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        cores = len(os.sched_getaffinity(0)) * machines  # machines of a cluster are alike
        folder, path = os.getcwd(), tuple(os.path.abspath(each) for each in sys.path)
        for name, (role, reward) in load_rewards(rewards, self._ask).items():
            kind, log = KINDS[role.kind], log_dir and log_dir.absolute() / f"reward-{name}.log"
            seconds = limit or float(role.arguments.get("timeout") or kind.limit)
            job = Job(name, role.kind, role.function, role.arguments, folder, path, log)
            is_judge = isinstance(reward, Judge)
            own: Any = partial(_asked, reward, seconds) if is_judge else partial(_scored, scorer, job, seconds)
            if isinstance(reward, Unscored):
                own = partial(_unscored, reward)
            computes = not is_judge and role.arguments.get("use_local") is not False
            workers = max(1, min(role.workers, cores) if computes else role.workers)
            late_is_wrong = kind.late_is_wrong and ENVIRONMENT not in role.arguments
            self._domains[name] = _Domain(own, workers, 1 if is_judge else _AT_ONCE, late_is_wrong)

    @property
    def counts(self) -> dict[str, Counter[str]]:
        """Samples without a score, by domain: how many are "errors", and how many "timeouts"."""
        return {name: domain.counts for name, domain in self._domains.items()}

    async def score(self, sample: Sample) -> None:
        """Score a sample by the reward of `sample.problem.domain`. Whoever is cancelled leaves it without a score.

        Raises:
            MegatuneError: (UNAVAILABLE) a domain's last FAILURES_IN_A_ROW samples all failed.
        """
        domain, loop = self._domains[sample.problem.domain], asyncio.get_running_loop()
        reply = loop.create_future()
        domain.waiting.append((answer_of(sample), reply))
        loop.call_soon(domain.dispatch)  # together with the others of its group
        self.settle(sample, await reply)

    async def _ask(self, domain: str, messages: list[dict[str, str]]) -> str:
        return await self.clients[domain](messages)

    def settle(self, sample: Sample, reply: Mapping[str, Any]) -> None:
        """Write what a reward said into its sample, and count it.

        Raises:
            MegatuneError: see `score`.
        """
        domain, failure = self._domains[sample.problem.domain], reply.get("error")
        if failure is None:
            domain.failures_in_a_row = 0
            sample.score = reply["score"]
            sample.details = {**reply["details"], "correct": reply["correct"]}
            return
        is_late = bool(reply.get("timeout"))
        what = "late" if is_late and domain.late_is_wrong else "error"
        sample.score, sample.details = 0.0, {"correct": 0.0, what: failure}
        domain.failures_in_a_row += 1
        domain.counts["timeouts" if is_late else "errors"] += 1
        if domain.failures_in_a_row >= FAILURES_IN_A_ROW:
            what = f"the reward of {sample.problem.domain} failed for {domain.failures_in_a_row} samples in a row"
            raise MegatuneError(Finding(what, f"problem {sample.problem.id}", failure), ExitCode.UNAVAILABLE)


def load_rewards(
    rewards: Mapping[str, RewardRole], ask: Callable[[str, list[dict[str, str]]], Awaitable[str]] | None = None
) -> dict[str, tuple[RewardRole, Any]]:
    """Load the reward of every domain.

    Args:
        ask: asks the judge of a domain.

    Raises:
        MegatuneError: (SETTINGS) an unknown kind, or arguments that a kind does not take; (UNAVAILABLE) a library that
            a kind needs is not installed. With all of them.
    """
    found: dict[str, tuple[RewardRole, Any]] = {}
    findings: list[Finding] = []
    code = ExitCode.SETTINGS
    for name, role in rewards.items():
        own = {"ask": partial(ask or _nobody, name)} if role.kind == "llm_judge" else {}
        try:
            found[name] = role, load_reward(role.kind, role.function, {**role.arguments, **own})
        except MegatuneError as error:
            findings += [replace(each, where=each.where or f"rewards.{name}") for each in error.findings]
            code = error.exit_code
    if findings:
        raise MegatuneError(findings, code)
    return found


async def _nobody(domain: str, messages: list[dict[str, str]]) -> str:
    raise AssertionError(f"the judge of {domain} is asked before the run starts")


async def _scored(
    scorer: Scorer, job: Job, limit: float, answers: Sequence[Answer], tries: int = 2
) -> list[dict[str, Any]]:
    """Score by a process; of several answers whose process has ended, each is scored alone. It may be killed by others,
    for want of memory: that is not the answer's, unless it happens again."""
    try:
        return await scorer(job, answers, limit)
    except (TimeoutError, WorkerDiedError) as error:
        if len(answers) > 1:
            return [(await _scored(scorer, job, limit, [each]))[0] for each in answers]
        if isinstance(error, TimeoutError):
            return [_late(limit)]
        return await _scored(scorer, job, limit, answers, tries - 1) if tries > 1 else [failure_of(error)]


async def _unscored(reward: Unscored, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    return [reply_of(reward(answer)) for answer in answers]


async def _asked(judge: Judge, limit: float, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Score by another model."""
    (answer,) = answers
    try:
        return [reply_of(await asyncio.wait_for(judge(answer), limit))]
    except TimeoutError:
        return [_late(limit)]


def _late(limit: float) -> dict[str, Any]:
    return {"error": f"the reward took longer than {limit:g} seconds", "timeout": True}


def answer_of(sample: Sample) -> Answer:
    """Return a sample as a reward sees it."""
    problem, response = sample.problem, sample.response
    return Answer(
        text=sample.turns[-1] if sample.turns else sample.text,
        prompt=problem.prompt,
        messages=tuple(problem.messages),
        row=problem.row,
        tag=problem.tag,
        ids=response.response_ids,
        finish=response.finish,
        turns=sample.turns or (sample.text,),
    )
