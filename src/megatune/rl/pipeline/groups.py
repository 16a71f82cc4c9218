"""The responses to one prompt: which requests they take, and what came back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatune.config.rl.rollout import Generating
from megatune.rl.samples import Problem, Request, Response, Sample


@dataclass(slots=True)
class Group:
    """Samples of one problem.

    What is sampled is a function of the run's seed, `number`, `attempt` and the weights, whatever else is in flight.

    Attributes:
        number: unique in the run.
        index: of the problem in the order of its domain, over all epochs.
        size: responses.
        attempt: how often it was sampled again, because it was too old.
        parts: by sample: what an aborted request had.
        responses: by sample: those that are finished.
        samples: with scores, in the order of the group.
        ended: by sample: those with a score, while others take further turns.
        longest: most tokens of a response, which observations leave room in.
    """

    problem: Problem
    number: int
    index: int
    size: int
    attempt: int = 0
    parts: dict[int, Response] = field(default_factory=dict)
    responses: dict[int, Response] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    ended: dict[int, Sample] = field(default_factory=dict)
    longest: int = 0

    @property
    def oldest_version(self) -> int | None:
        """Of the weights that have sampled any of its tokens; None before the first."""
        found = [*self.responses.values(), *self.parts.values()]
        return min((version for response in found for _, version in response.versions), default=None)

    @property
    def scores(self) -> np.ndarray:
        """Of the samples that have one, fp64."""
        return np.array([sample.score for sample in self.samples if sample.has_score], np.float64)

    def note(self, response: Response) -> None:
        """Take a response, or the part of one that was aborted."""
        place = place_of(response.id)
        if (before := self.parts.get(place)) is not None:  # engines know nothing of observations
            response = replace(response, observed=before.observed)
        if response.finish != "abort":
            self.responses[place] = response
            self.parts.pop(place, None)
        elif len(response.response_ids):
            self.parts[place] = response

    def again(self) -> Group:
        """Return the group with nothing sampled, and other random numbers."""
        return Group(self.problem, self.number, self.index, self.size, self.attempt + 1)


@dataclass(frozen=True, slots=True)
class Sampling:
    """What requests of a run, or of its validations, have in common.

    Attributes:
        kind: "train" or "eval": they have different random numbers, and names.
        response_length: most tokens of a response.
    """

    generating: Generating
    seed: int
    response_length: int
    kind: str = "train"
    stop_token_ids: tuple[int, ...] = ()

    def requests(self, group: Group) -> list[Request]:
        """Return a request for each response that is missing, which goes on with its part."""
        return [self._request(group, place) for place in range(group.size) if place not in group.responses]

    def _request(self, group: Group, place: int) -> Request:
        generating, part = self.generating, group.parts.get(place)
        greedy = not generating.do_sample or generating.temperature == 0
        so_far: dict[str, Any] = {}
        if part is not None:
            so_far = {"response_ids": part.response_ids, "log_probs": part.log_probs, "versions": part.versions}
        return Request(
            id=f"{self.kind}-{group.number}-{place}-{group.attempt}",
            prompt_ids=group.problem.prompt_ids,
            seed=seed_of(self.seed, self.kind, group.number, place, group.attempt),
            max_new_tokens=self.response_length,
            temperature=0.0 if greedy else generating.temperature,
            top_p=generating.top_p,
            top_k=max(0, generating.top_k),
            repetition_penalty=generating.repetition_penalty,
            stop_token_ids=self.stop_token_ids,
            stop_strings=tuple(generating.stop_strings),
            shown=group.problem.shown,
            **so_far,
        )


def place_of(request_id: str) -> int:
    """Return a request's place in its group."""
    return int(request_id.split("-")[2])


def seed_of(*words: int | str) -> int:
    """Return 63 random bits that depend on all words, the same on every machine."""
    numbers = [word if isinstance(word, int) else int.from_bytes(word.encode()) for word in words]
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
