"""Groups as JSON has them: in checkpoints, and in dumps that are replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatune.rl.pipeline.groups import Group
from megatune.rl.samples import Problem, Response, Sample


def group_record(group: Group) -> dict[str, Any]:
    """Return all of a group but its problem, whose place in the data it has."""
    return {
        "number": group.number,
        "index": group.index,
        "size": group.size,
        "attempt": group.attempt,
        "parts": [[place, _response_record(part)] for place, part in group.parts.items()],
        "responses": [[place, _response_record(response)] for place, response in group.responses.items()],
        "samples": [
            {"text": sample.text, "score": sample.score, "details": sample.details} for sample in group.samples
        ],
    }


def group_from(record: Mapping[str, Any], problem: Problem) -> Group:
    """Return the group of a record."""
    group = Group(problem, record["number"], record["index"], record["size"], record["attempt"])
    group.parts = {place: _response_from(part) for place, part in record["parts"]}
    group.responses = {place: _response_from(response) for place, response in record["responses"]}
    group.samples = [
        Sample(problem, group.number, group.responses[place], sample["text"], sample["score"], sample["details"])
        for place, sample in enumerate(record["samples"])
    ]
    return group


def _response_record(response: Response) -> dict[str, Any]:
    """Floats are written such that they are read with the same bits."""
    found = {
        "id": response.id,
        "response_ids": response.response_ids.tolist(),
        "log_probs": response.log_probs.astype(np.float64).tolist(),
        "finish": response.finish,
        "versions": [list(each) for each in response.versions],
    }
    if response.routing is not None:
        found["routing"] = response.routing.tolist()
    return found


def _response_from(record: Mapping[str, Any]) -> Response:
    routing = record.get("routing")
    return Response(
        record["id"],
        np.array(record["response_ids"], np.int64),
        np.array(record["log_probs"], np.float32),
        record["finish"],
        tuple((first, version) for first, version in record["versions"]),
        None if routing is None else np.array(routing, np.int16),
    )
