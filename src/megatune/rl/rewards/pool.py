"""Scores samples in processes of their own, on all machines of the run, while others are still sampled."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.rewards.answer import Answer, Reward
from megatune.rl.rewards.kinds import KINDS, load_reward
from megatune.rl.rewards.process import NotLoadedError, RewardWorker, Setup, WorkerDiedError, judged
from megatune.rl.samples import Sample

if TYPE_CHECKING:
    from megatune.config.rl.settings import RewardRole
    from megatune.rl.rewards.judge_client import JudgeClient

FAILURES_IN_A_ROW = 64  # of one domain: then it is the reward that is broken, and training on zeros must not go on


class Worker(Protocol):
    """Scores one answer at a time; see `RewardWorker`."""

    def score(self, answer: Answer, limit: float) -> dict[str, Any]: ...

    def end(self) -> None: ...


# Starts a worker on some machine: (setup, its log) -> the worker.
Host = Callable[[Setup, Path | None], Worker]


@dataclass(slots=True)
class DomainCounts:
    """What became of the samples of one domain, since the start of the run.

    Attributes:
        scored: samples that came back, those below, too.
        errors: without a score because the reward raised, its process died, or it could not be had.
        timeouts: without a score because the reward took too long.
        last_failure: what the latest of either said; "" where there was none.
    """

    scored: int = 0
    errors: int = 0
    timeouts: int = 0
    last_failure: str = ""


@dataclass(slots=True)
class _Domain:
    """A domain's threads: each takes a worker, hands it a sample, and ends it when it takes too long."""

    start: Callable[[], Worker]
    workers: int
    limit: float
    waiting: queue.SimpleQueue[tuple[Sample, Future[dict[str, Any]]] | None] = field(default_factory=queue.SimpleQueue)
    threads: list[threading.Thread] = field(default_factory=list)
    idle: queue.SimpleQueue[Worker] = field(default_factory=queue.SimpleQueue)
    busy: set[Worker] = field(default_factory=set)
    pending: set[Future[dict[str, Any]]] = field(default_factory=set)
    failures_in_a_row: int = 0
    counts: DomainCounts = field(default_factory=DomainCounts)


class _ServiceWorker:
    """A reward that waits for a service: it needs no process, and keeps its limits itself."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    def score(self, answer: Answer, limit: float) -> dict[str, Any]:
        return judged(self._reward, answer)

    def end(self) -> None:
        pass


class RewardPool(AbstractContextManager["RewardPool"]):
    """Scores samples of every domain by the domain's reward.

    `score` sets `score` and `details` of a sample: `details["correct"]` is 1 or 0 (what accuracies and difficulty masks
    are of; `score` is what is trained on), and `details["error"]` says what went wrong where the reward raised, timed
    out or died twice: the score is 0 then, correct 0, and the pool goes on with a new process.

    Args:
        rewards: domain -> its reward; `workers` processes each (of those that compute no more than there are cores),
            started as they are needed.
        clients: domain -> what asks the model of an llm_judge whose judge_model_type is "inference" or "cluster". It
            may come later.
        log_dir: what the processes print goes there, into reward-DOMAIN.log; None: to this process's stderr.
        limit: seconds that one sample may take; None: `timeout` of the reward's arguments, or of its kind.
        hosts: start processes, by turns; None: on this machine alone.

    Raises:
        MegatuneError: see `load_rewards`.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardRole],
        *,
        clients: Mapping[str, JudgeClient] | None = None,
        log_dir: Path | None = None,
        limit: float | None = None,
        hosts: Sequence[Host] | None = None,
    ) -> None:
        self.clients = dict(clients or {})
        self._domains: dict[str, _Domain] = {}
        self._closed = False
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        hosts = hosts or [RewardWorker]
        cores = len(os.sched_getaffinity(0)) * len(hosts)  # machines of a cluster are alike
        for name, (role, reward) in load_rewards(rewards, self._asked).items():
            kind, log = KINDS[role.kind], log_dir and log_dir / f"reward-{name}.log"
            start: Callable[[], Worker] = partial(_ServiceWorker, reward)
            if kind.in_process:
                setup = role.kind, role.function, role.arguments
                start = partial(_started, itertools.cycle(hosts), setup, log)
            computes = kind.in_process and role.arguments.get("use_local") is not False
            workers = max(1, min(role.workers, cores) if computes else role.workers)
            seconds = limit or float(role.arguments.get("timeout") or kind.limit)
            self._domains[name] = _Domain(start, workers, seconds)

    @property
    def counts(self) -> dict[str, DomainCounts]:
        """By domain."""
        return {name: domain.counts for name, domain in self._domains.items()}

    async def score(self, sample: Sample) -> None:
        """Score a sample by the reward of `sample.problem.domain`. Whoever is cancelled leaves it without a score.

        Raises:
            MegatuneError: (UNAVAILABLE) a domain's last FAILURES_IN_A_ROW samples all failed.
        """
        domain, reply = self._domains[sample.problem.domain], Future[dict[str, Any]]()
        domain.pending.add(reply)
        reply.add_done_callback(domain.pending.discard)
        domain.waiting.put((sample, reply))
        if len(domain.threads) < min(domain.workers, len(domain.pending)):
            # One that waits for a service keeps nobody from ending.
            thread = threading.Thread(target=self._serve, args=(domain,), daemon=True)
            domain.threads.append(thread)
            thread.start()
        found = await asyncio.wrap_future(reply)
        self._settle(domain, sample, found)

    def __exit__(self, *error: object) -> None:
        """End all processes, with whatever they still do. Nobody is told of samples that are pending."""
        self._closed = True
        for client in self.clients.values():
            client.close()
        for domain in self._domains.values():
            for _ in domain.threads:
                domain.waiting.put(None)
            for worker in tuple(domain.busy):  # its thread ends with it
                worker.end()
        for domain in self._domains.values():
            for thread in domain.threads:
                thread.join(timeout=5.0)
            while not domain.idle.empty():
                domain.idle.get().end()

    def _asked(self, domain: str, messages: list[dict[str, str]]) -> str:
        return self.clients[domain](messages, self._domains[domain].limit)

    def _serve(self, domain: _Domain) -> None:
        """Score samples, in a thread of their domain."""
        while (asked := domain.waiting.get()) is not None and not self._closed:
            sample, reply = asked
            if reply.set_running_or_notify_cancel():
                reply.set_result(self._reply(domain, sample))

    def _reply(self, domain: _Domain, sample: Sample) -> dict[str, Any]:
        # A process may be killed by others, for want of memory: that is not the sample's, unless it happens again.
        for is_last in (False, True):
            if self._closed:
                break
            try:
                return self._answered(domain, answer_of(sample))
            except WorkerDiedError as error:
                if is_last or isinstance(error, NotLoadedError):
                    return {"error": str(error)}
            except TimeoutError:
                return {"error": f"the reward took longer than {domain.limit:g} seconds", "timeout": True}
            except Exception as error:  # whatever it is, this sample must have a reply
                return {"error": f"{type(error).__name__}: {error}"}
        return {"error": "the run ends"}

    def _answered(self, domain: _Domain, answer: Answer) -> dict[str, Any]:
        """Let a worker score an answer; one that does not is ended."""
        try:
            worker = domain.idle.get_nowait()
        except queue.Empty:
            worker = domain.start()
        domain.busy.add(worker)
        try:
            if self._closed:
                raise TimeoutError
            reply = worker.score(answer, domain.limit)
        except BaseException:
            worker.end()
            raise
        else:
            domain.idle.put(worker)
        finally:
            domain.busy.discard(worker)
        return reply

    def _settle(self, domain: _Domain, sample: Sample, reply: Mapping[str, Any]) -> None:
        """Write what a reward said into its sample, and count it."""
        counts = domain.counts
        counts.scored += 1
        failure = reply.get("error")
        if failure is None:
            domain.failures_in_a_row = 0
            sample.score = reply["score"]
            sample.details = {**reply["details"], "correct": reply["correct"]}
            return
        sample.score, sample.details = 0.0, {"correct": 0.0, "error": failure}
        domain.failures_in_a_row += 1
        counts.timeouts += bool(reply.get("timeout"))
        counts.errors += not reply.get("timeout")
        counts.last_failure = f"{sample.problem.domain}, problem {sample.problem.id}: {failure}"
        if domain.failures_in_a_row >= FAILURES_IN_A_ROW:
            what = f"the reward of {sample.problem.domain} failed for {domain.failures_in_a_row} samples in a row"
            raise MegatuneError(Finding(what, f"problem {sample.problem.id}", failure), ExitCode.UNAVAILABLE)


def load_rewards(
    rewards: Mapping[str, RewardRole], ask: Callable[[str, list[dict[str, str]]], str] | None = None
) -> dict[str, tuple[RewardRole, Reward]]:
    """Load the reward of every domain.

    Args:
        ask: asks the judge of a domain.

    Raises:
        MegatuneError: (SETTINGS) an unknown kind, or arguments that a kind does not take; (UNAVAILABLE) a library that
            a kind needs is not installed. With all of them.
    """
    found: dict[str, tuple[RewardRole, Reward]] = {}
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


def _nobody(domain: str, messages: list[dict[str, str]]) -> str:
    raise AssertionError(f"the judge of {domain} is asked before the run starts")


def _started(hosts: Iterator[Host], setup: Setup, log: Path | None) -> Worker:
    return next(hosts)(setup, log)


def answer_of(sample: Sample) -> Answer:
    """Return a sample as a reward sees it."""
    problem, response = sample.problem, sample.response
    return Answer(
        text=sample.turns[-1] if sample.turns else sample.text,
        prompt=problem.prompt,
        messages=tuple(problem.messages),
        row=problem.row,
        tag=problem.tag,
        token_ids=tuple(response.response_ids.tolist()),
        finish=response.finish,
        turns=sample.turns or (sample.text,),
    )
