"""Scores samples in processes of their own, while others are still sampled."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.rewards.answer import Answer
from megatune.rl.rewards.kinds import KINDS, load_reward
from megatune.rl.rewards.member import LocalMember, Member, MemberDiedError, NotLoadedError, ProcessMember
from megatune.rl.samples import Sample

if TYPE_CHECKING:
    from megatune.config.rl.settings import RewardRole
    from megatune.rl.rewards.judge import ModelAsk

FAILURES_IN_A_ROW = 64  # of one domain: then it is the reward that is broken, and training on zeros must not go on

JUDGING_SECONDS = 0.01  # between looks at what judges say


@dataclass(slots=True)
class DomainCounts:
    """What became of the samples of one domain, since the start of the run.

    Attributes:
        scored: samples that came back, those below, too.
        errors: without a score because the reward raised, its process died, or it could not be had.
        timeouts: without a score because the reward took too long.
        last_failure: what the latest of either said; "" where there was none.
        seconds: that rewards took, summed over processes.
    """

    scored: int = 0
    errors: int = 0
    timeouts: int = 0
    last_failure: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class _Domain:
    """A domain's processes: each has a thread here that hands it samples and ends it when it takes too long."""

    make: Callable[[], Member]
    workers: int
    limit: float
    waiting: queue.SimpleQueue[Sample | None] = field(default_factory=queue.SimpleQueue)
    threads: list[threading.Thread] = field(default_factory=list)
    members: set[Member] = field(default_factory=set)
    pending: int = 0
    failures_in_a_row: int = 0
    counts: DomainCounts = field(default_factory=DomainCounts)


@dataclass(frozen=True, slots=True)
class _Scored:
    sample: Sample
    reply: dict[str, Any]
    seconds: float


class RewardPool:
    """Scores samples of every domain by the domain's reward.

    A sample that is handed in comes back from `collect` with `score` and `details` set: `details["correct"]` is 1 or 0
    (what accuracies and difficulty masks are of; `score` is what is trained on), and `details["error"]` says what went
    wrong where the reward raised, timed out or died twice: the score is 0 then, correct 0, and the pool goes on with a
    new process. Not for several threads at once.

    Args:
        rewards: domain -> its reward; `workers` processes each (of those that compute no more than there are cores),
            started as they are needed.
        asks: domain -> what asks the model of an llm_judge whose judge_model_type is "inference" or "cluster". It may
            come later: `pool.asks[domain] = ask`. Its engines work within `submit` and `collect`, in the caller's
            thread.
        log_dir: what the processes print goes there, into reward-DOMAIN.log; None: to this process's stderr.
        limit: seconds that one sample may take; None: `timeout` of the reward's arguments, or of its kind.

    Raises:
        MegatuneError: (SETTINGS) an unknown kind, or arguments that a kind does not take; (UNAVAILABLE) a library that
            a kind needs is not installed.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardRole],
        *,
        asks: Mapping[str, ModelAsk] | None = None,
        log_dir: Path | None = None,
        limit: float | None = None,
    ) -> None:
        self.asks = dict(asks or {})
        self._domains: dict[str, _Domain] = {}
        self._done: queue.SimpleQueue[_Scored] = queue.SimpleQueue()
        self._log_dir, self._closed = log_dir, threading.Event()
        findings: list[Finding] = []
        code = ExitCode.SETTINGS
        for name, role in rewards.items():
            arguments = dict(role.arguments)
            if role.kind == "llm_judge":
                arguments["ask"] = partial(self._asked, name)
            try:
                reward = load_reward(role.kind, role.function, arguments)  # a process loads its own: this is to see
            except MegatuneError as error:
                findings += [replace(each, where=each.where or f"rewards.{name}") for each in error.findings]
                code = error.exit_code
                continue
            kind = KINDS[role.kind]
            make = partial(self._process, name, role) if kind.in_process else partial(LocalMember, reward)
            computes = kind.in_process and role.arguments.get("use_local") is not False
            workers = min(role.workers, len(os.sched_getaffinity(0))) if computes else role.workers
            seconds = limit or float(role.arguments.get("timeout") or kind.limit)
            self._domains[name] = _Domain(make, max(workers, 1), seconds)
        if findings:
            raise MegatuneError(findings, code)

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
            is_judging = any(self._domains[name].pending for name in self.asks)
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

    def close(self) -> None:
        """End all processes, with whatever they still do. Samples that are pending are forgotten."""
        self._closed.set()
        for ask in self.asks.values():
            ask.close()
        for domain in self._domains.values():
            for _ in domain.threads:
                domain.waiting.put(None)
            for member in tuple(domain.members):
                member.end()
        for domain in self._domains.values():
            for thread in domain.threads:
                thread.join(timeout=5.0)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, wait: float) -> list[Sample]:
        """Return what is done, waiting for the first for so many seconds."""
        samples: list[Sample] = []
        while self.pending:
            try:
                scored = self._done.get(timeout=wait) if wait > 0 and not samples else self._done.get_nowait()
            except queue.Empty:
                break
            samples.append(self._settled(scored))
        return samples

    def _judge(self, *, wait: bool) -> None:
        """Let the judges of this run work on."""
        for ask in set(self.asks.values()):
            ask.pump(wait=wait)

    def _asked(self, domain: str, messages: list[dict[str, str]]) -> str:
        return self.asks[domain](messages)

    def _process(self, domain: str, role: RewardRole) -> Member:
        setup = role.kind, role.function, role.arguments
        if self._log_dir is None:
            return ProcessMember(setup, None)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        with open(self._log_dir / f"reward-{domain}.log", "ab") as log:
            return ProcessMember(setup, log)

    def _serve(self, domain: _Domain) -> None:
        member: Member | None = None
        while (sample := domain.waiting.get()) is not None and not self._closed.is_set():
            start = time.monotonic()
            # A process may be killed by others, for want of memory: that is not the sample's, unless it happens again.
            for is_last in (False, True):
                reply, is_over = {}, True
                try:
                    if member is None:
                        member = domain.make()
                        domain.members.add(member)
                    reply = member.score(answer_of(sample), domain.limit)
                except TimeoutError:
                    reply = {"error": f"the reward took longer than {domain.limit:g} seconds", "timeout": True}
                except MemberDiedError as error:
                    reply, is_over = {"error": str(error)}, is_last or isinstance(error, NotLoadedError)
                except Exception as error:  # whatever it is, this sample must come back
                    reply = {"error": f"{type(error).__name__}: {error}"}
                else:
                    break
                if member is not None:
                    member.end()
                    domain.members.discard(member)
                    member = None
                if is_over or self._closed.is_set():
                    break
            self._done.put(_Scored(sample, reply, time.monotonic() - start))
        if member is not None:
            member.end()

    def _settled(self, scored: _Scored) -> Sample:
        """Write what a reward said into its sample, and count it."""
        sample, reply = scored.sample, scored.reply
        domain = self._domains[sample.problem.domain]
        domain.pending -= 1
        counts = domain.counts
        counts.scored += 1
        counts.seconds += scored.seconds
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


def answer_of(sample: Sample) -> Answer:
    """Return a sample as a reward sees it."""
    problem, response = sample.problem, sample.response
    return Answer(
        text=sample.text,
        prompt=problem.prompt,
        messages=tuple(problem.messages),
        row=problem.row,
        tag=problem.tag,
        num_tokens=len(response.response_ids),
        finish=response.finish,
    )
