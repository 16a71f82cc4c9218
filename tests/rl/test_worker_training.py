"""Updates of workers: the same in every layout, bit for bit with offloading in between, and after a resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_EXPERT_LAYOUTS, SEQUENCE_LAYOUTS, Layout
from safetensors.torch import load_file
from torch import Tensor
from worker_kit import NEWEST, rollouts, settings_of, started

from megatune.bridge.merged_model import MergedModel
from megatune.config.rl.settings import RLSettings
from megatune.engine.offload import Offload
from megatune.errors import ExitCode, MegatuneError
from megatune.rl.pipeline.startup import _with_adapter
from megatune.rl.samples import Rollouts
from megatune.rl.worker.batching import mini_batches
from megatune.rl.worker.policy import PolicyWorker
from megatune.rl.worker.training import TrainResult

OVERLAPS = Layout(2, {"overlap_grad_reduce": True, "overlap_param_gather": True})
ALL = {**EXPERT_LAYOUTS, **MORE_EXPERT_LAYOUTS, **SEQUENCE_LAYOUTS, **LAYOUTS, "dp2, overlaps": OVERLAPS}
VALUES = {"advantages": 1.0, "rollout_log_probs": 0.1, "old_log_probs": 0.1}
ALGORITHM = {"adv_estimator": "grpo", "enable_old_logprobs_recompute": True, "loss_agg_mode": "token-mean"}


def samples_of(step: int) -> Rollouts:
    """Samples with old log-probabilities near those of the model: ratios are neither 1 nor clipped all."""
    made = rollouts(301, step, **VALUES)
    near = [np.full(len(each), -np.log(301), np.float32) + each for each in made.per_token["old_log_probs"]]
    ones = [np.ones(len(each), np.float32) for each in near]
    return Rollouts(
        made.tokens,
        made.prompt_lengths,
        {**made.per_token, "old_log_probs": near, "rollout_log_probs": near, "mask": ones, "weights": ones},
    )


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


def weights_of(worker: PolicyWorker) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in worker.weights() for name, tensor in bucket.items()}


def storage_bytes(offload: Offload) -> int:
    return sum(each.nbytes() for storages in offload._storages().values() for each in storages)


def train(
    settings: RLSettings, steps: range, checkpoint: str | None = None, *, moving: bool = False, save_at: int = 0
) -> tuple[list[TrainResult], dict[str, Tensor]]:
    """On every rank."""
    worker, found = started(PolicyWorker, settings, checkpoint), []
    assert worker.step == steps.start
    for step in steps:
        if moving:
            total = storage_bytes(worker._offload)
            assert worker.offload("optimizer", "gradients") + worker.offload() == total
            assert storage_bytes(worker._offload) == 0
            with pytest.raises(AssertionError, match="weights on the host: onload first"):
                worker.log_probs(samples_of(step))
            worker.onload("weights")
            worker.log_probs(samples_of(step))
            assert worker.onload() > 0
            assert storage_bytes(worker._offload) == total
        found.append(worker.train(samples_of(step), step))
        if step + 1 == save_at:
            worker.save(save_at, {"rl.json": b"{}"})
    return found, weights_of(worker)


@pytest.mark.parametrize(
    ("layout", "options"),
    [("dp2, overlaps", {"precision": {"bf16": True}}), ("tp2 sp", {"lora": {"lora_dropout": 0.1}})],
)
def test_offloading_and_a_resume_change_nothing(pool, model_dir, tmp_path, layout, options):
    """Mixed precision with a distributed optimizer; adapters with dropout, whose random numbers resume, too."""
    size = ALL[layout].world_size
    model = model_dir("qwen3")
    settings = settings_of(model, ALL[layout], output=tmp_path, algorithm=ALGORITHM, batch=(2, 1), **options)
    plain, weights = pool.run(size, train, settings, range(3))[0]
    moved, others = pool.run(size, _moved, settings)[0]
    assert_same_bits(others, weights)
    assert [each.loss for each in moved] == [each.loss for each in plain]
    checkpoint = tmp_path / "checkpoint-2"
    assert json.loads((checkpoint / "training" / "state.json").read_text())["updates"] == 2 * plain[0].updates
    assert (checkpoint / "training" / "rl.json").read_bytes() == b"{}"
    resumed, others = pool.run(size, train, settings, range(2, 3), NEWEST)[0]
    assert_same_bits(others, weights)
    assert resumed[0].learning_rate == plain[2].learning_rate < plain[1].learning_rate


def train_part(settings: RLSettings) -> tuple[TrainResult, bool]:
    """On one rank: a step of which one mini-batch has no token that counts."""
    worker, samples = started(PolicyWorker, settings), samples_of(0)
    worker.train(samples_of(1), 1)  # from here on Adam has moments, which move weights without gradients
    before, plan = weights_of(worker), mini_batches(len(samples), 4, 1, settings.run.seed, 0)
    assert len(plan) == 2
    for sample in plan[0]:
        samples.per_token["mask"][sample][:] = 0
    found, after = worker.train(samples, 0), weights_of(worker)
    return found, all(torch.equal(after[name], before[name]) for name in before)


def test_a_mini_batch_without_a_token_that_counts_is_no_update(pool, model_dir, tmp_path):
    settings = settings_of(model_dir("qwen3"), Layout(1, {}), output=tmp_path, algorithm=ALGORITHM, batch=(2, 2))
    found, is_unmoved = pool.run(1, train_part, settings)[0]
    assert found.updates == 1
    assert not is_unmoved


def _moved(settings: RLSettings) -> Any:
    return train(settings, range(3), moving=True, save_at=2)


def refuse(settings: RLSettings) -> tuple[str, str, bool]:
    """On every rank: an advantage that is no number."""
    worker = started(PolicyWorker, settings)
    before, samples = weights_of(worker), samples_of(0)
    samples.per_token["advantages"][3] = samples.per_token["advantages"][3] * np.nan
    with pytest.raises(MegatuneError) as caught:
        worker.train(samples, 0)
    assert caught.value.exit_code == ExitCode.NOT_FINITE
    after = weights_of(worker)
    return str(caught.value), worker.context.phase, all(torch.equal(after[name], before[name]) for name in before)


def test_numbers_that_are_not_finite_are_named_and_change_nothing(pool, model_dir):
    settings = settings_of(model_dir("qwen3"), ALL["dp2"], algorithm=ALGORITHM, batch=(4, 1))
    for said, phase, is_same in pool.run(2, refuse, settings):
        assert "actor_train, step 1: loss nan" in said
        assert "gradients that are not finite on rank 0" in said
        assert phase.startswith(("weights, bucket", "train, update 1 of 1"))
        assert is_same


def update(settings: RLSettings) -> tuple[TrainResult, dict[str, Tensor]]:
    """On every rank."""
    worker = started(PolicyWorker, settings)
    return worker.train(samples_of(0), 0), weights_of(worker)


@pytest.mark.parametrize(
    ("layout", "batch", "tokens"), [("tp2 sp", (3, 1), None), ("pp2, packed", (3, 1), 40), ("dp2", (1, 1), 30)]
)
def test_updates_are_the_same_in_every_layout(pool, model_dir, layout, batch, tokens):
    """Mini-batches of two or three of seven samples, so that several updates follow each other. Adam would make a whole
    step of a gradient's rounding where it is nearly zero."""
    model = model_dir("qwen3")
    size = batch[0] * ALL[layout].dp_size
    options = {"algorithm": ALGORITHM, "optimizer": {"optimizer": "sgd", "learning_rate": 0.1}}
    alone = settings_of(model, ALL["1"], batch=(1, size), **options)
    other = settings_of(model, ALL[layout], batch=batch, packed_tokens=tokens, **options)
    ((expected, weights),) = pool.run(1, update, alone)
    (found, others), *_ = pool.run(ALL[layout].world_size, update, other)
    assert (found.updates, found.num_tokens) == (expected.updates, expected.num_tokens)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, rtol=1e-4, atol=1e-6)


def expect(model: Path, settings: RLSettings) -> tuple[list[float], dict[str, Tensor]]:
    """What plain PyTorch does: ratios are to the first pass over a sample, weights those of the correction."""
    from transformers import AutoModelForCausalLM

    reference, samples = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), samples_of(0)
    reference.config.use_cache = False
    optimizer, first = torch.optim.SGD(reference.parameters(), 0.03), {}
    algorithm, losses = settings.algorithm, []
    for chosen in mini_batches(len(samples), 3, algorithm.ppo_epochs, settings.run.seed, 0):
        parts = []
        for sample in chosen:
            tokens, prompt = torch.tensor(samples.tokens[sample]), samples.prompt_lengths[sample]
            logits = reference(tokens[None]).logits[0, prompt - 1 : -1] / settings.sampling_temperature
            log_probs = logits.log_softmax(-1).gather(1, tokens[prompt:, None])[:, 0]
            old = first.setdefault(sample, log_probs.detach())
            rollout, advantages = (
                torch.tensor(samples.per_token[name][sample]) for name in ("rollout_log_probs", "advantages")
            )
            ratio = (log_probs - old).exp()
            clipped = ratio.clamp(1 - algorithm.pg_clip_low, 1 + algorithm.pg_clip_high)
            weights = (old - rollout).exp().clamp(max=1.0)
            parts.append(-torch.min(ratio * advantages, clipped * advantages) * weights)
        loss = torch.cat(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(reference.state_dict())


@pytest.mark.parametrize(("layout", "batch"), [("pp2, packed", (3, 1)), ("cp2 p2p", (1, 3))])
def test_later_epochs_compare_with_the_first_pass(pool, model_dir, layout, batch):
    """Of three mini-batches of two epochs, which have other samples, on other ranks."""
    model = model_dir("qwen3")
    correction = {"is_weight": {"enabled": True, "weight_type": "token", "upper_bound": 1.0}}
    algorithm = {
        "adv_estimator": "grpo", "loss_agg_mode": "token-mean", "ppo_epochs": 2, "pg_clip_low": 0.2,
        "pg_clip_high": 0.2, "train_infer_correction": correction,
    }  # fmt: skip
    optimizer = {
        "optimizer": "sgd", "learning_rate": 0.03, "sgd_momentum": 0, "max_grad_norm": 0,
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    tokens = 40 if "packed" in layout else None
    settings = settings_of(
        model, ALL[layout], batch=batch, packed_tokens=tokens, algorithm=algorithm, optimizer=optimizer
    )
    losses, weights = expect(model, settings)
    (found, others), *_ = pool.run(ALL[layout].world_size, update, settings)
    assert found.updates == len(losses) == 6
    assert 0.1 < found.metrics["actor/ppo_ratio_clipfrac"] < 0.45
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)
    for name, tensor in others.items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-6)


def merged_weights(settings: RLSettings) -> list[tuple[str, Tensor]]:
    """On every rank: after an update, so that no adapter is zero; a checkpoint has the adapters alone."""
    worker = started(PolicyWorker, settings)
    worker.train(samples_of(0), 0)
    worker.save(1)
    shapes = worker.weight_shapes()
    buckets = list(worker.weights())
    for bucket in buckets:
        assert len(bucket) == 1 or sum(tensor.nbytes for tensor in bucket.values()) <= 2**20
        assert all(tuple(tensor.shape) == shapes.pop(name) for name, tensor in bucket.items())
    assert not buckets or not shapes
    return [(name, tensor.clone()) for bucket in buckets for name, tensor in bucket.items()]


@pytest.mark.parametrize(
    ("family", "layout", "lora"),
    [
        ("qwen3", "tp2 pp2 vpp2", {"use_dora": True}),
        ("qwen3_moe", "ep2 etp1 tp2 sp", {"lora_target": ["q_proj", "down_proj", "gate_proj"]}),
    ],
)
def test_the_stream_has_the_adapters_merged(pool, model_dir, tmp_path, family, layout, lora):
    model = model_dir(family)
    settings = settings_of(model, ALL[layout], output=tmp_path, algorithm=ALGORITHM, lora=lora)
    found, *others = pool.run(ALL[layout].world_size, merged_weights, settings)
    assert not any(others), "only the first rank gets the stream"
    MergedModel(model, [tmp_path / "checkpoint-1"]).write(tmp_path, 10**9)
    expected, base = tensors(tmp_path), tensors(model)
    assert dict(found).keys() == expected.keys()
    changed = {name for name, tensor in expected.items() if not torch.equal(tensor, base[name])}
    assert changed
    for name, tensor in found:
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0 if name not in changed else 1e-6)


@pytest.mark.parametrize("layout", ["tp2 pp2 vpp2", "tp2 sp"])
def test_the_stream_for_engines_that_take_adapters_has_the_adapter_alone(pool, model_dir, tmp_path, layout):
    """The same tensors as the checkpoint's adapter_model.safetensors, bit for bit, announced by their shapes."""
    model = model_dir("qwen3")
    lora = {"lora_target": ["q_proj", "down_proj", "gate_proj"]}
    settings = settings_of(model, ALL[layout], output=tmp_path, algorithm=ALGORITHM, lora=lora)
    engine = settings.actor_infer.model_copy(update={"engine": "vllm"})
    settings = _with_adapter(replace(settings, actor_infer=engine), model)
    assert settings.actor_infer.config == {
        "load_format": "auto", "enable_lora": True, "max_loras": 1, "max_lora_rank": 8,
    }  # fmt: skip
    assert settings.sleep_level == 1, "engines keep the base, which no update brings"
    found, *others = pool.run(ALL[layout].world_size, merged_weights, settings)
    assert not any(others), "only the first rank gets the stream"
    assert_same_bits(dict(found), tensors(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize("lora", [{"use_dora": True}, {"additional_target": ["lm_head"]}, {"quantization_bit": 4}])
def test_other_adapters_are_merged(model_dir, lora):
    settings = settings_of(model_dir("qwen3"), ALL["1"], lora=lora)
    engine = settings.actor_infer.model_copy(update={"engine": "vllm"})
    assert _with_adapter(replace(settings, actor_infer=engine), model_dir("qwen3")).actor_infer.adapter is None
