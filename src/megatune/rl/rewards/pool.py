"""Scores samples on all machines of the run, while others are still being sampled."""

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
from megatune.rl.rewards.task import RewardSpec, Scorer, WorkerDiedError, error_reply, verdict_reply
from megatune.rl.samples import Sample

if TYPE_CHECKING:
    from megatune.config.rl.settings import RewardRole

_MAX_BATCH = 32  # answers per call of a process
MAX_CONSECUTIVE_FAILURES = 64  # of one domain; then its reward is broken, and the run must not continue


@dataclass(slots=True)
class _Domain:
    """The queue and the workers of one domain.

    Attributes:
        score: scores a batch of answers.
        workers: maximum number of concurrent batches.
        max_batch: maximum number of answers per batch.
        timeout_is_wrong: see `RewardKind`.
        waiting: queued answers with the futures of their replies.
        serving: tasks of the current batches.
        counts: samples without a score since the start of the run: "errors", if the reward raised or its process died,
            and "timeouts".
    """

    score: Callable[[Sequence[Answer]], Awaitable[list[dict[str, Any]]]]
    workers: int
    max_batch: int
    timeout_is_wrong: bool
    waiting: deque[tuple[Answer, asyncio.Future[dict[str, Any]]]] = field(default_factory=deque)
    serving: set[asyncio.Task[None]] = field(default_factory=set)
    consecutive_failures: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def dispatch(self) -> None:
        """Start batches for free workers; they get smaller as the queue shrinks, so that all workers end together."""
        while len(self.serving) < self.workers and self.waiting:
            share = max(1, min(self.max_batch, len(self.waiting) // (2 * self.workers)))
            taken = [self.waiting.popleft() for _ in range(share)]
            if batch := [each for each in taken if not each[1].done()]:  # without cancelled ones
                serving = asyncio.ensure_future(self._serve(batch))
                self.serving.add(serving)
                serving.add_done_callback(self._note_end)

    async def _serve(self, batch: Sequence[tuple[Answer, asyncio.Future[dict[str, Any]]]]) -> None:
        try:
            replies = await self.score([answer for answer, _ in batch])
        except Exception as error:  # of any kind: these samples need a reply
            replies = [error_reply(error)] * len(batch)
        for (_, future), reply in zip(batch, replies, strict=True):
            if not future.done():
                future.set_result(reply)

    def _note_end(self, serving: asyncio.Task[None]) -> None:
        self.serving.discard(serving)
        if not serving.cancelled():  # cancelled at the end of the run
            self.dispatch()


class RewardPool:
    """Scores samples with the rewards of their domains.

    `score` sets `score` and `details` of a sample. `details["correct"]` is 1 or 0, for accuracies and difficulty masks.
    If the reward raised, timed out, or its process died twice, `details["error"]` is the reason, score and correct are
    0, and the pool continues. If only the answer can cause a timeout, the key is "late" instead, and the score counts.

    Args:
        rewards: domain -> its reward; at most `workers` samples are scored at a time (no more than cores, if the reward
            computes locally).
        scorer: scores answers in another process, such as `task.ray_scorer`; judges do not use it.
        log_dir: folder of reward-DOMAIN.log, the output of the processes; None for their stderr.
        limit: time limit of a sample in seconds; None for `timeout` of the reward's arguments, or of its kind.
        machines: number of machines that score.

    Attributes:
        clients: domain -> the client of an llm_judge whose judge_model_type is "inference" or "cluster".

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
            spec = RewardSpec(name, role.kind, role.function, role.arguments, folder, path, log)
            is_judge = isinstance(reward, Judge)
            score: Any = partial(_judge, reward, seconds) if is_judge else partial(_score, scorer, spec, seconds)
            if isinstance(reward, Unscored):
                score = partial(_unscored, reward)
            computes = not is_judge and role.arguments.get("use_local") is not False
            workers = max(1, min(role.workers, cores) if computes else role.workers)
            timeout_is_wrong = kind.timeout_is_wrong and ENVIRONMENT not in role.arguments
            self._domains[name] = _Domain(score, workers, 1 if is_judge else _MAX_BATCH, timeout_is_wrong)

    @property
    def counts(self) -> dict[str, Counter[str]]:
        """Numbers of samples without a score, by domain: "errors" and "timeouts"."""
        return {name: domain.counts for name, domain in self._domains.items()}

    async def score(self, sample: Sample) -> None:
        """Score a sample with the reward of its domain; if cancelled, it has no score.

        Raises:
            MegatuneError: (UNAVAILABLE) a domain's last MAX_CONSECUTIVE_FAILURES samples all failed.
        """
        domain, loop = self._domains[sample.problem.domain], asyncio.get_running_loop()
        reply = loop.create_future()
        domain.waiting.append((answer_from_sample(sample), reply))
        loop.call_soon(domain.dispatch)  # together with the other samples of its group
        self.apply_reply(sample, await reply)

    async def _ask(self, domain: str, messages: list[dict[str, str]]) -> str:
        return await self.clients[domain](messages)

    def apply_reply(self, sample: Sample, reply: Mapping[str, Any]) -> None:
        """Store a reward's reply in its sample, and count failures.

        Raises:
            MegatuneError: see `score`.
        """
        domain, failure = self._domains[sample.problem.domain], reply.get("error")
        if failure is None:
            domain.consecutive_failures = 0
            sample.score = reply["score"]
            sample.details = {**reply["details"], "correct": reply["correct"]}
            return
        is_late = bool(reply.get("timeout"))
        what = "late" if is_late and domain.timeout_is_wrong else "error"
        sample.score, sample.details = 0.0, {"correct": 0.0, what: failure}
        domain.consecutive_failures += 1
        domain.counts["timeouts" if is_late else "errors"] += 1
        if domain.consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
            what = f"the reward of {sample.problem.domain} failed for {domain.consecutive_failures} samples in a row"
            raise MegatuneError(Finding(what, f"problem {sample.problem.id}", failure), ExitCode.UNAVAILABLE)


def load_rewards(
    rewards: Mapping[str, RewardRole], ask: Callable[[str, list[dict[str, str]]], Awaitable[str]] | None = None
) -> dict[str, tuple[RewardRole, Any]]:
    """Load the reward of every domain.

    Args:
        ask: sends a prompt to the judge of a domain.

    Raises:
        MegatuneError: with all findings: (SETTINGS) an unknown kind or argument; (UNAVAILABLE) a missing package.
    """
    found: dict[str, tuple[RewardRole, Any]] = {}
    findings: list[Finding] = []
    code = ExitCode.SETTINGS
    for name, role in rewards.items():
        own = {"ask": partial(ask or _no_judge, name)} if role.kind == "llm_judge" else {}
        try:
            found[name] = role, load_reward(role.kind, role.function, {**role.arguments, **own})
        except MegatuneError as error:
            findings += [replace(each, where=each.where or f"rewards.{name}") for each in error.findings]
            code = error.exit_code
    if findings:
        raise MegatuneError(findings, code)
    return found


async def _no_judge(domain: str, messages: list[dict[str, str]]) -> str:
    raise AssertionError(f"the judge of {domain} is asked before the run starts")


async def _score(
    scorer: Scorer, spec: RewardSpec, limit: float, answers: Sequence[Answer], tries: int = 2
) -> list[dict[str, Any]]:
    """Score answers in a process. If it dies, each answer is scored alone, and tried once more, because another process
    may have caused it by using up the memory."""
    try:
        return await scorer(spec, answers, limit)
    except (TimeoutError, WorkerDiedError) as error:
        if len(answers) > 1:
            return [(await _score(scorer, spec, limit, [each]))[0] for each in answers]
        if isinstance(error, TimeoutError):
            return [_timeout_reply(limit)]
        return await _score(scorer, spec, limit, answers, tries - 1) if tries > 1 else [error_reply(error)]


async def _unscored(reward: Unscored, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    return [verdict_reply(reward(answer)) for answer in answers]


async def _judge(judge: Judge, limit: float, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Score an answer with a judge."""
    (answer,) = answers
    try:
        return [verdict_reply(await asyncio.wait_for(judge(answer), limit))]
    except TimeoutError:
        return [_timeout_reply(limit)]


def _timeout_reply(limit: float) -> dict[str, Any]:
    return {"error": f"the reward took longer than {limit:g} seconds", "timeout": True}


def answer_from_sample(sample: Sample) -> Answer:
    """Return a sample as the input of a reward."""
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
