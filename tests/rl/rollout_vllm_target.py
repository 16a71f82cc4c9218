"""Runs vLLM as rollout engine: log-probabilities against Transformers after updates, a stale head, an abort."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatune.config.rl.rollout import Generating
from megatune.config.rl.settings import InferRole
from megatune.errors import MegatuneError
from megatune.rl.rollout.load import load_engine
from megatune.rl.rollout.mismatch import Mismatch, check_mismatch, mismatch_of
from megatune.rl.samples import Request, Response

TEMPERATURE = 0.8


def some_requests(count: int, tokens: int) -> list[Request]:
    drawn = np.random.default_rng(0)
    return [
        Request(
            str(each), drawn.integers(5, 200, 3 + each), each, tokens, TEMPERATURE, top_p=0.9 if each % 2 else 1.0,
            top_k=50 if each % 3 == 0 else 0, stop_token_ids=(4,),
        )
        for each in range(count)
    ]  # fmt: skip


def update(engine: Any, folder: Path, version: int) -> None:
    """In buckets of two tensors."""
    weights = list(load_file(folder / "model.safetensors").items())
    engine.begin_update(version, len(weights))
    for start in range(0, len(weights), 2):
        engine.update(dict(weights[start : start + 2]))
    engine.commit_update(version)


def drained(engine: Any, requests: Sequence[Request]) -> dict[str, Response]:
    engine.submit(requests)
    found: dict[str, Response] = {}
    while len(found) < len(requests):
        found |= {response.id: response for response in engine.step()}
    return found


def measured(engine: Any, folder: Path) -> Mismatch:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    requests = some_requests(8, 16)
    responses, ours = drained(engine, requests), []
    for request in requests:
        ids = torch.tensor(np.concatenate([request.prompt_ids, responses[request.id].response_ids]))
        start = len(request.prompt_ids)
        with torch.no_grad():
            log_probs = (model(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        ours.append(log_probs[start - 1 : -1].gather(1, ids[start:, None])[:, 0].numpy())
    found = mismatch_of(ours, [responses[request.id].log_probs for request in requests], "fp32")
    assert found is not None
    return found


def refused(function: Callable[..., None], *arguments: Any) -> str:
    """What a function says of why it raises."""
    try:
        function(*arguments)
    except MegatuneError as error:
        return str(error)
    raise AssertionError("nothing was wrong")


def check(engine: Any, folder: Path) -> None:
    check_mismatch(measured(engine, folder), "fp32", engine.version)


def main(first: Path, second: Path, *, is_dense: bool) -> None:
    """Check everything in one process, since vLLM takes long to start; of a model with experts updates alone."""
    role = InferRole(
        device_mapping=[0], model_name_or_path=str(first), engine="vllm", dtype="fp32",
        generating_args=Generating(temperature=TEMPERATURE),
        config={"enforce_eager": True},
    )  # fmt: skip
    engine = load_engine(role, seed=1, max_running=8, context=128)
    assert engine.version == -1, "weights are dummies"
    engine._can_sleep = True  # a CPU has no memory to free, but vLLM keeps what it is told of each part
    for version, folder in ((1, first), (2, second)):
        engine._is_shared = version == 2  # as workers in other processes take weights
        engine.sleep(version)
        engine.wake("weights")
        update(engine, folder, version)
        assert engine._engine.is_sleeping(), "its cache sleeps on"
        engine.wake("cache")
        assert not engine._engine.is_sleeping()
        check(engine, folder)
    assert "does not sample from version 2" in refused(check, engine, first)
    if is_dense:
        check_rest(engine, first)
    print("done")


def check_rest(engine: Any, first: Path) -> None:
    """Aborts, a stale head, an update that is not whole."""
    assert drained(engine, some_requests(1, 12))["0"].versions == ((0, 2),)
    # A part goes on.
    engine.submit(some_requests(1, 100))
    engine.step()
    (part,) = engine.abort()
    assert part.finish == "abort"
    assert len(part.response_ids) == len(part.log_probs) > 0
    # An output layer that the update does not reach, as it is without the mend.
    head = engine._engine.model_executor.driver_worker.worker.model_runner.model.lm_head
    method, head.quant_method = (
        head.quant_method,
        SimpleNamespace(apply=head.quant_method.apply, process_weights_after_loading=lambda layer: None),
    )
    update(engine, first, 3)
    assert "does not sample from version 3" in refused(check, engine, first)
    head.quant_method = method
    update(engine, first, 4)
    check(engine, first)
    # An update that is not whole.
    weights = load_file(first / "model.safetensors")
    engine.begin_update(5, len(weights))
    engine.update({name: weights[name] for name in list(weights)[1:]})
    assert "1 of" in refused(engine.commit_update, 5)
    assert engine.version == -1


if __name__ == "__main__":
    main(Path(sys.argv[2]), Path(sys.argv[3]), is_dense=sys.argv[1] == "qwen3")
