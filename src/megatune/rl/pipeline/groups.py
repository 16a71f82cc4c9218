"""Groups of responses to one prompt: their requests, and their JSON form in checkpoints and recorded rollouts."""

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
    """The responses to one problem.

    The samples are a function of the run's seed, `number`, `attempt` and the weights, whatever else is in flight.

    Attributes:
        number: unique in the run.
        index: position of the problem in the order of its domain, over all epochs.
        size: number of responses.
        attempt: how often the group was regenerated because it was too old.
        responses: by sample; a partial one, to be continued, has finish "abort".
        samples: scored samples, in the order of the group.
        ended: samples that have a score while others take further turns, by sample.
        longest: maximum number of tokens of a response, including observations.
    """

    problem: Problem
    number: int
    index: int
    size: int
    attempt: int = 0
    responses: dict[int, Response] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    ended: dict[int, Sample] = field(default_factory=dict)
    longest: int = 0

    @property
    def oldest_version(self) -> int | None:
        """Oldest version of the weights that sampled any token; None before the first token."""
        return min((version for each in self.responses.values() for _, version in each.versions), default=None)

    @property
    def scores(self) -> np.ndarray:
        """Scores of the samples that have one, fp64."""
        return np.array([sample.score for sample in self.samples if sample.has_score], np.float64)

    def add_response(self, response: Response) -> None:
        """Store a finished response, or the part of an aborted one."""
        if response.finish != "abort" or len(response.response_ids):
            self.responses[sample_index(response.id)] = response

    def use_row_answer(self, longest: int) -> None:
        """Use the row's own answer as every response."""
        ids = self.problem.answer_ids
        assert ids is not None, "read with the problems"
        finish: Literal["stop", "length"] = "stop" if len(ids) <= longest else "length"
        zeros = np.zeros(min(len(ids), longest), np.float32)
        for index in range(self.size):
            name = f"answer-{self.number}-{index}-{self.attempt}"
            self.responses[index] = Response(name, ids[:longest], zeros, finish, ())

    def next_attempt(self) -> Group:
        """Return the group without responses, with new random numbers."""
        return Group(self.problem, self.number, self.index, self.size, self.attempt + 1)


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Builds the requests of a run, or of its validations.

    Attributes:
        response_length: maximum number of tokens of a response.
        kind: "train" or "eval", which have different random numbers and request ids.
    """

    generating: Generating
    seed: int
    response_length: int
    kind: str = "train"
    stop_token_ids: tuple[int, ...] = ()

    def requests(self, group: Group) -> list[Request]:
        """Return a request for each missing response; it continues the partial response if there is one."""
        found = [(index, group.responses.get(index)) for index in range(group.size)]
        return [self._request(group, *each) for each in found if each[1] is None or each[1].finish == "abort"]

    def _request(self, group: Group, index: int, part: Response | None) -> Request:
        generating = self.generating
        greedy = not generating.do_sample or generating.temperature == 0
        so_far: dict[str, Any] = {}
        if part is not None:
            so_far = {name: getattr(part, name) for name in ("response_ids", "log_probs", "versions", "observed")}
        return Request(
            id=f"{self.kind}-{group.number}-{index}-{group.attempt}",
            prompt_ids=group.problem.prompt_ids,
            seed=seed_of(self.seed, self.kind, group.number, index, group.attempt),
            max_new_tokens=self.response_length,
            temperature=0.0 if greedy else generating.temperature,
            top_p=generating.top_p,
            top_k=max(0, generating.top_k),
            repetition_penalty=generating.repetition_penalty,
            stop_token_ids=self.stop_token_ids,
            stop_strings=tuple(generating.stop_strings),
            images=group.problem.images,
            **so_far,
        )


def sample_index(request_id: str) -> int:
    """Return the index in its group of a request's sample."""
    return int(request_id.split("-")[2])


def seed_of(*words: int | str) -> int:
    """Return a seed of 63 bits that is a function of all words, the same on every machine."""
    numbers = [word if isinstance(word, int) else int.from_bytes(word.encode()) for word in words]
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def group_record(group: Group, routing: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return a group as JSON-serializable values, without its problem, which `index` identifies.

    Args:
        routing: receives the experts of the responses by id; they can be gigabytes and go to a file of arrays.
    """
    for response in group.responses.values():
        if response.routing is not None:
            routing[response.id] = response.routing
    return {
        "number": group.number,
        "index": group.index,
        "size": group.size,
        "attempt": group.attempt,
        "longest": group.longest,
        "responses": [[place, _response_record(response)] for place, response in group.responses.items()],
        "samples": [
            {"text": sample.text, "score": sample.score, "details": sample.details} for sample in group.samples
        ],
    }


def group_from_record(record: Mapping[str, Any], problem: Problem, routing: Mapping[str, np.ndarray]) -> Group:
    """Return the group of a record; `routing` is filled by `group_record`."""
    group = Group(problem, record["number"], record["index"], record["size"], record["attempt"])
    group.longest = record.get("longest", 0)
    responses = [*record["responses"], *record.get("parts", ())]  # an older version stored partial ones apart
    group.responses = {place: _response_from(response, routing) for place, response in responses}
    group.samples = [
        Sample(problem, group.number, group.responses[place], sample["text"], sample["score"], sample["details"])
        for place, sample in enumerate(record["samples"])
    ]
    return group


def _response_record(response: Response) -> dict[str, Any]:
    """Return a response as JSON-serializable values; floats survive bit for bit."""
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
    """Return arrays as the content of an .npz file for `read_arrays`."""
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file, {} if there is no file."""
    if not path.exists():
        return {}
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)
