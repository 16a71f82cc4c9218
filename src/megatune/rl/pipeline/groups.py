"""The responses to one prompt: which requests they take, what came back, and how JSON has them: in checkpoints, and in
dumps that are replayed."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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
        if response.finish != "abort":
            self.responses[place] = response
            self.parts.pop(place, None)
        elif len(response.response_ids):
            self.parts[place] = response

    def answer(self, longest: int) -> None:
        """Let the row's own answer be every response."""
        ids = self.problem.answer_ids
        assert ids is not None, "read with the problems"
        finish: Literal["stop", "length"] = "stop" if len(ids) <= longest else "length"
        nothing = np.zeros(min(len(ids), longest), np.float32)
        for place in range(self.size):
            own = f"answer-{self.number}-{place}-{self.attempt}"
            self.responses[place] = Response(own, ids[:longest], nothing, finish, ())

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
            so_far = {name: getattr(part, name) for name in ("response_ids", "log_probs", "versions", "observed")}
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


def group_record(group: Group, routing: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return all of a group but its problem, whose place in the data it has.

    Args:
        routing: gets the experts of its responses, by their ids: they are gigabytes, and go to a file of arrays.
    """
    for response in (*group.parts.values(), *group.responses.values()):
        if response.routing is not None:
            routing[response.id] = response.routing
    return {
        "number": group.number,
        "index": group.index,
        "size": group.size,
        "attempt": group.attempt,
        "longest": group.longest,
        "parts": [[place, _response_record(part)] for place, part in group.parts.items()],
        "responses": [[place, _response_record(response)] for place, response in group.responses.items()],
        "samples": [
            {"text": sample.text, "score": sample.score, "details": sample.details} for sample in group.samples
        ],
    }


def group_from(record: Mapping[str, Any], problem: Problem, routing: Mapping[str, np.ndarray]) -> Group:
    """Return the group of a record; `routing` is what `group_record` gave."""
    group = Group(problem, record["number"], record["index"], record["size"], record["attempt"])
    group.longest = record.get("longest", 0)
    group.parts = {place: _response_from(part, routing) for place, part in record["parts"]}
    group.responses = {place: _response_from(response, routing) for place, response in record["responses"]}
    group.samples = [
        Sample(problem, group.number, group.responses[place], sample["text"], sample["score"], sample["details"])
        for place, sample in enumerate(record["samples"])
    ]
    return group


def _response_record(response: Response) -> dict[str, Any]:
    """Floats are written such that they are read with the same bits."""
    return {
        "id": response.id,
        "response_ids": response.response_ids.tolist(),
        "log_probs": response.log_probs.astype(np.float64).tolist(),
        "finish": response.finish,
        "versions": [list(each) for each in response.versions],
        **({"observed": [list(each) for each in response.observed]} if response.observed else {}),
    }


def _response_from(record: Mapping[str, Any], routing: Mapping[str, np.ndarray]) -> Response:
    return Response(
        record["id"],
        np.array(record["response_ids"], np.int64),
        np.array(record["log_probs"], np.float32),
        record["finish"],
        tuple((first, version) for first, version in record["versions"]),
        routing.get(record["id"]),
        tuple((start, stop) for start, stop in record.get("observed", ())),
    )


def arrays_file(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return arrays as a file of NumPy's; `read_arrays` reads it."""
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file, none where there is none."""
    if not path.exists():
        return {}
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)
