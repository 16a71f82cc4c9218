"""Runs vLLM: log-probabilities against Transformers after updates, a stale head, an abort, adapters, and answers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatune.config.rl.rollout import Generating
from megatune.config.rl.settings import InferRole, SentAdapter
from megatune.errors import MegatuneError
from megatune.generation.options import Sampling
from megatune.generation.prompt import Prompt
from megatune.generation.vllm import VllmBackend, lora_arguments
from megatune.rl.rollout.mismatch import Mismatch, check_mismatch, mismatch_of
from megatune.rl.rollout.server import load_engine
from megatune.rl.samples import Request, Response
from megatune.rl.transport import Route, Sender

TEMPERATURE, ROUTE = 0.8, Route("file")


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
    sender = Sender(ROUTE, torch.device("cpu"))
    engine.connect(ROUTE, 0)
    engine.begin_update(version, len(weights))
    for start in range(0, len(weights), 2):
        engine.update(sender.pack(dict(weights[start : start + 2])))
    engine.commit_update(version)


def drained(engine: Any, requests: Sequence[Request]) -> dict[str, Response]:
    engine.submit(requests)
    found: dict[str, Response] = {}
    while len(found) < len(requests):
        found |= {response.id: response for response in engine.step()}
    return found


def measured(engine: Any, model: Any) -> Mismatch:
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
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    check_mismatch(measured(engine, model), "fp32", engine.version)


def main(first: Path, second: Path) -> None:
    """Check everything in one process, since vLLM takes long to start."""
    check_rest(experts(first, second), first)


def experts(first: Path, second: Path) -> Any:
    """Of a model with experts updates alone."""
    role = InferRole(
        device_mapping=[0], model_name_or_path=str(first), engine="vllm", dtype="fp32",
        generating_args=Generating(temperature=TEMPERATURE),
        config={"enforce_eager": True, "gpu_memory_utilization": None},
    )  # fmt: skip
    engine = load_engine(role, seed=1, max_running=8, context=128)
    assert engine.version == -1, "weights are dummies"
    assert engine._vllm.engine.vllm_config.cache_config.gpu_memory_utilization == role.memory_share == 0.9
    engine._can_sleep = True  # a CPU has no memory to free, but vLLM keeps what it is told of each part
    for version, folder in ((1, first), (2, second)):
        engine.sleep(version)
        engine.wake("weights")
        update(engine, folder, version)
        assert engine._vllm.engine.is_sleeping(), "its cache sleeps on"
        engine.wake("cache")
        assert not engine._vllm.engine.is_sleeping()
        check(engine, folder)
    assert "does not sample from version 2" in refused(check, engine, first)
    return engine


def check_rest(engine: Any, first: Path) -> None:
    """Aborts, a stale head, an update that is not whole."""
    assert drained(engine, some_requests(1, 12))["0"].versions == ((0, 2),)
    # A request that is aborted, to be continued below.
    engine.submit(some_requests(1, 100))
    engine.step()
    (part,) = engine.abort()
    assert part.finish == "abort"
    assert len(part.response_ids) == len(part.log_probs) > 0
    # An output layer that the update does not reach, as it is without the mend.
    head = engine._vllm.engine.model_executor.driver_worker.worker.model_runner.model.lm_head
    method, head.quant_method = (
        head.quant_method,
        SimpleNamespace(apply=head.quant_method.apply, process_weights_after_loading=lambda layer: None),
    )
    update(engine, first, 3)
    assert "does not sample from version 3" in refused(check, engine, first)
    head.quant_method = method
    update(engine, first, 4)
    check(engine, first)
    # The part continues with the new weights, and a stop string ends it.
    (request,) = some_requests(1, 100)
    words = tuple(AutoTokenizer.from_pretrained(first).decode([each]) for each in (300, 400, 500, 600))
    rest = drained(engine, [replace(request, response_ids=part.response_ids, log_probs=part.log_probs,
                                    versions=part.versions, stop_strings=words)])["0"]  # fmt: skip
    count = len(part.response_ids)
    assert rest.response_ids[:count].tolist() == part.response_ids.tolist()
    assert rest.versions == ((0, 2), (count, 4))
    assert len(rest.response_ids) == len(rest.log_probs) > count
    text = AutoTokenizer.from_pretrained(first).decode(rest.response_ids[count:])
    assert rest.finish == ("stop" if text.endswith(words) or rest.response_ids[-1] == 4 else "length")
    # An update that is not whole.
    weights = load_file(first / "model.safetensors")
    engine.begin_update(5, len(weights))
    engine.update(Sender(ROUTE, torch.device("cpu")).pack({name: weights[name] for name in list(weights)[1:]}))
    assert "1 of" in refused(engine.commit_update, 5)
    assert engine.version == -1
    # One that breaks off, as another engine was lost, begins anew.
    engine.begin_update(6, len(weights))
    engine.update(Sender(ROUTE, torch.device("cpu")).pack({name: weights[name] for name in list(weights)[:5]}))
    update(engine, first, 6)
    check(engine, first)


def adapted(base: Path, folder: Path, seed: int) -> Any:
    """Write a random adapter as peft does, and return the model with the products added to its weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    drawn, tensors = torch.Generator().manual_seed(seed), {}
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            rows, columns = module.weight.shape
            left, right = (torch.randn(size, generator=drawn) * 0.2 for size in ((rows, 4), (4, columns)))
            module.weight.data += 2 * left @ right
            tensors |= {f"base_model.model.{name}.lora_A.weight": right, f"base_model.model.{name}.lora_B.weight": left}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    return model.eval()


def lora(base: Path, _: Path) -> None:
    """Adapters alone travel, and every update is what samples next: equal to the merged weights."""
    folders = [base.parent / f"adapter-{seed}" for seed in (1, 2)]
    models = [adapted(base, folder, seed) for seed, folder in enumerate(folders)]
    tensors = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    config = json.loads((folders[0] / "adapter_config.json").read_text())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors[0].items()}
    role = InferRole(
        device_mapping=[0], model_name_or_path=str(base), engine="vllm", dtype="fp32",
        generating_args=Generating(temperature=TEMPERATURE), adapter=SentAdapter(config, shapes),
        config={"enforce_eager": True, "load_format": "auto", **lora_arguments(4)},
    )  # fmt: skip
    engine = load_engine(role, seed=1, max_running=8, context=128)
    engine.connect(ROUTE, 0)
    check_mismatch(measured(engine, AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)), "fp32", 0)
    sender = Sender(ROUTE, torch.device("cpu"))
    for version, (model, adapter) in enumerate(zip(models, tensors, strict=True), 1):
        engine.begin_update(version, len(adapter))
        names = list(adapter)
        for part in (names[:3], names[3:]):
            engine.update(sender.pack({name: adapter[name] for name in part}))
        engine.commit_update(version)
        check_mismatch(measured(engine, model), "fp32", version)
    refused(check_mismatch, measured(engine, models[0]), "fp32", 2)
    folder = Path(engine._folder.name)
    assert [each.name for each in folder.iterdir()] == ["2"], "the last one alone"
    engine.close()
    assert not folder.exists()


def answers(base: Path, _: Path) -> None:
    """`infer` and `serve`: texts equal to those of Transformers; streamed, with stop words, at once, by an adapter."""
    # An environment that only samples need not have what these import.
    from megatune.generation.endpoint.streams import Streams
    from megatune.generation.transformers_backend import TransformersBackend, load_tokenizer

    adapter = base.parent / "adapter"
    model = adapted(base, adapter, 1)
    tokenizer, sampling = load_tokenizer(base), Sampling(max_new_tokens=12)
    prompts = [Prompt(tokenizer(text)["input_ids"]) for text in ("one two", "a longer text than that", "three")]
    # vLLM leaves out the bytes of a character that the last token has only begun.
    expected = [
        replace(each, text=each.text.rstrip("\ufffd"))
        for each in TransformersBackend(model, tokenizer).write_all(prompts, sampling)
    ]
    backend = VllmBackend.load(base, [adapter], {"dtype": "float32", "max_model_len": 64})
    assert backend.write_all(prompts, sampling) == expected
    pieces: list[str] = []
    assert backend.write(prompts[0], sampling, pieces.append) == expected[0]
    assert len(pieces) > 1
    assert "".join(pieces) == expected[0].text
    word = expected[1].text[2:4]
    cut = backend.write(prompts[1], sampling.model_copy(update={"stop_words": [word]}))
    assert cut.stopped
    assert cut.text == expected[1].text[: expected[1].text.index(word) + len(word)]
    ended = backend.write(prompts[2], sampling, None, lambda: True)
    assert ended.num_tokens < 12
    streams = Streams(backend, 0)

    async def one(prompt: Prompt, leave: bool) -> list[Any]:
        events: list[Any] = []
        async for event in streams.stream(lambda: prompt, sampling):
            events.append(event)
            if leave and len(events) == 2:
                break
        return events

    async def together() -> list[list[Any]]:
        return await asyncio.gather(*(one(each, place == 2) for place, each in enumerate([*prompts, prompts[1]])))

    found = asyncio.run(together())
    assert [each[-1] for each in (found[0], found[1], found[3])] == [expected[0], expected[1], expected[1]]
    assert len(found[2]) == 2
    streams.close()


KINDS = {"qwen3": main, "qwen3_moe": experts, "lora": lora, "answers": answers}

if __name__ == "__main__":
    KINDS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    print("done")
