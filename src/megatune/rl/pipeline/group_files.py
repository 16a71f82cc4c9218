"""Groups as JSON has them: in checkpoints, and in dumps that are replayed."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatune.rl.pipeline.groups import Group
from megatune.rl.samples import Problem, Response, Sample


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
