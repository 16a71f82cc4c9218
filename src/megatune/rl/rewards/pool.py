"""Scores samples in processes of their own, on all machines of the run, while others are still sampled."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

JUDGING_SECONDS = 0.01  # between looks at what judges say


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
    waiting: queue.SimpleQueue[Sample | None] = field(default_factory=queue.SimpleQueue)
    threads: list[threading.Thread] = field(default_factory=list)
    idle: queue.SimpleQueue[Worker] = field(default_factory=queue.SimpleQueue)
    busy: set[Worker] = field(default_factory=set)
    pending: int = 0
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

    A sample that is handed in comes back from `collect` with `score` and `details` set: `details["correct"]` is 1 or 0
    (what accuracies and difficulty masks are of; `score` is what is trained on), and `details["error"]` says what went
    wrong where the reward raised, timed out or died twice: the score is 0 then, correct 0, and the pool goes on with a
    new process. Not for several threads at once.

    Args:
        rewards: domain -> its reward; `workers` processes each (of those that compute no more than there are cores),
            started as they are needed.
        clients: domain -> what asks the model of an llm_judge whose judge_model_type is "inference" or "cluster". It
            may come later. Its engines work within `submit` and `collect`, in the caller's thread.
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
        self._done: queue.SimpleQueue[tuple[Sample, dict[str, Any]]] = queue.SimpleQueue()
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
    def pending(self) -> int:
        """Samples that were handed in and not collected."""
        return sum(domain.pending for domain in self._domains.values())

    @property
    def counts(self) -> dict[str, DomainCounts]:
        """By domain."""
        return {name: domain.counts for name, domain in self._domains.items()}

    def submit(self, samples: Iterable[Sample]) -> None:
        """Take samples to score; returns at once. `sample.problem.domain` says which reward."""
        for sample in samples:
            domain = self._domains[sample.problem.domain]
            domain.pending += 1
            domain.waiting.put(sample)
            if len(domain.threads) < min(domain.workers, domain.pending):
                # One that waits for a service keeps nobody from ending.
                thread = threading.Thread(target=self._serve, args=(domain,), daemon=True)
                domain.threads.append(thread)
                thread.start()
        self._judge(wait=False)

    def collect(self, timeout: float = 0.0) -> list[Sample]:
        """Return samples that were scored since the last call, in the order in which they were done.

        Args:
            timeout: seconds to wait until there is at least one; returns at once where nothing is pending.

        Raises:
            MegatuneError: (UNAVAILABLE) a domain's last FAILURES_IN_A_ROW samples all failed; whatever the engines of
                a judge raise.
        """
        until = time.monotonic() + timeout
        self._judge(wait=False)
        samples = self._take(0.0)
        while not samples and self.pending and (left := until - time.monotonic()) > 0:
            self._judge(wait=True)
            is_judging = any(self._domains[name].pending for name in self.clients)
            samples = self._take(min(left, JUDGING_SECONDS) if is_judging else left)
        return samples

    def score(self, samples: Iterable[Sample]) -> list[Sample]:
        """Score samples and return them, in their order; nothing else may be pending."""
        samples = list(samples)
        assert not self.pending, "other samples are pending"
        self.submit(samples)
        while self.pending:
            self.collect(timeout=60.0)
        return samples

    def __exit__(self, *error: object) -> None:
        """End all processes, with whatever they still do. Samples that are pending are forgotten."""
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

    def _take(self, wait: float) -> list[Sample]:
        """Return what is done, waiting for the first for so many seconds."""
        samples: list[Sample] = []
        while self.pending:
            try:
                scored = self._done.get(timeout=wait) if wait > 0 and not samples else self._done.get_nowait()
            except queue.Empty:
                break
            samples.append(self._settled(*scored))
        return samples

    def _judge(self, *, wait: bool) -> None:
        """Let the judges of this run work on."""
        for client in set(self.clients.values()):
            client.pump(wait=wait)

    def _asked(self, domain: str, messages: list[dict[str, str]]) -> str:
        return self.clients[domain](messages, self._domains[domain].limit)

    def _serve(self, domain: _Domain) -> None:
        """Score samples, in a thread of their domain."""
        while (sample := domain.waiting.get()) is not None and not self._closed:
            self._score(domain, sample)

    def _score(self, domain: _Domain, sample: Sample) -> None:
        reply: dict[str, Any] = {"error": "the run ends"}
        # A process may be killed by others, for want of memory: that is not the sample's, unless it happens again.
        for is_last in (False, True):
            if self._closed:
                break
            try:
                reply = self._answered(domain, answer_of(sample))
            except WorkerDiedError as error:
                reply = {"error": str(error)}
                if not is_last and not isinstance(error, NotLoadedError):
                    continue
            except TimeoutError:
                reply = {"error": f"the reward took longer than {domain.limit:g} seconds", "timeout": True}
            except Exception as error:  # whatever it is, this sample must come back
                reply = {"error": f"{type(error).__name__}: {error}"}
            break
        self._done.put((sample, reply))

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

    def _settled(self, sample: Sample, reply: Mapping[str, Any]) -> Sample:
        """Write what a reward said into its sample, and count it."""
        domain = self._domains[sample.problem.domain]
        domain.pending -= 1
        counts = domain.counts
        counts.scored += 1
        failure = reply.get("error")
        if failure is None:
            domain.failures_in_a_row = 0
            sample.score = reply["score"]
            sample.details = {**reply["details"], "correct": reply["correct"]}
            return sample
        sample.score, sample.details = 0.0, {"correct": 0.0, "error": failure}
        domain.failures_in_a_row += 1
        counts.timeouts += bool(reply.get("timeout"))
        counts.errors += not reply.get("timeout")
        counts.last_failure = f"{sample.problem.domain}, problem {sample.problem.id}: {failure}"
        if domain.failures_in_a_row >= FAILURES_IN_A_ROW:
            what = f"the reward of {sample.problem.domain} failed for {domain.failures_in_a_row} samples in a row"
            raise MegatuneError(Finding(what, f"problem {sample.problem.id}", failure), ExitCode.UNAVAILABLE)
        return sample


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
