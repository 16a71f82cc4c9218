"""The thread of vLLM's backend, which needs no vLLM; what vLLM computes is in tests/rl/test_rollout_vllm.py."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from megatune.generation.options import Sampling
from megatune.generation.prompt import Prompt
from megatune.generation.vllm import VllmBackend


class _Endless:
    """Answers that never end."""

    engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))
    generation = GenerationConfig()

    def __init__(self) -> None:
        self.begun: list[str] = []

    def add(self, id_: str, *_: Any) -> None:
        self.begun.append(id_)

    def step(self) -> list[tuple[str, Any]]:
        time.sleep(0.01)
        return [(id_, SimpleNamespace(text="a", token_ids=[1], finish_reason=None)) for id_ in self.begun]

    def abort(self, ids: list[str]) -> None:
        self.begun = [id_ for id_ in self.begun if id_ not in ids]

    def close(self) -> None:
        pass


def test_an_answer_ends_when_it_is_stopped_and_when_the_backend_is_closed() -> None:
    vllm, heard = _Endless(), list[str]()
    backend = VllmBackend(vllm)  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as threads:
        stopped = threads.submit(
            backend.write, Prompt([1, 2]), Sampling(), heard.append, is_stopped=lambda: len(heard) > 2
        )
        open_ended = threads.submit(backend.write, Prompt([3]), Sampling())
        reply = stopped.result(60)
        assert (len(reply.text) > 2, reply.stopped, len(vllm.begun)) == (True, False, 1)
        backend.close()
        with pytest.raises(RuntimeError, match="closed before the answer was complete"):
            open_ended.result(60)
