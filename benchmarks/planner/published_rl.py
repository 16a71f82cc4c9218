"""Published steps of reinforcement learning against the planner: seconds of a step, without our own weight update.

The rule: devices, their number, layouts of training and rollouts, samples, the longest and the mean length are
published, precision is bf16, and every token is sampled by itself. All rows of NeMo-RL's tables of H100 that keep it
are here, v0.4 and v0.6. DeepSeek-V3 samples ahead with a second model, and was left out after it had been predicted: at
256 GPUs 50 s for 134. Of the planner one thing was changed with predictions in sight: that reading experts is as much
slower than other weights as their products are (`Efficiency.grouped`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatune.config.load import load
from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.rollout import PromptData, RolloutSettings
from megatune.config.rl.run import RLRunSettings
from megatune.config.rl.settings import (
    InferRole,
    ModelRole,
    RLSettings,
)
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.rl.answer import RLAnswer, plan_rl
from megatune.plan.rl.question import Lengths, RLQuestion
from megatune.plan.rl.roles import SYNC

SOURCE = "NeMo-RL, docs/about/performance-summary.md, and its recipes"
# Tokens of a prompt of OpenMathInstruct-2 with its template; the tables do not say it.
_PROMPT = 150


@dataclass(frozen=True, kw_only=True)
class RLRow:
    """One published step.

    Attributes:
        gpus: of the run. rollouts: of these, those that only sample; 0 where all take turns.
        prompts, group: samples of a step.
        longest, mean: tokens of a sample, prompt and response.
        engine: devices of one rollout engine. share: gpu_memory_utilization.
        layout: tp, cp, ep, pp of training.
        off: steps that samples may be old.
        seconds: of a step.
    """

    name: str
    model: str
    gpus: int
    rollouts: int = 0
    prompts: int = 64
    group: int = 32
    longest: int = 4096
    mean: int
    engine: int
    share: float = 0.6
    layout: tuple[int, int, int, int]
    off: int = 0
    seconds: float
    settings: Mapping[str, Any] = field(default_factory=dict)


_FULL = {"recompute_granularity": "full"}
_LARGE = {"model": "Qwen3-235B-A22B", "prompts": 16, "longest": 8192, "settings": _FULL}
ROWS = (
    RLRow(name="v0.4 Llama 8B", model="Llama-3.1-8B", gpus=16, mean=1060, engine=1, layout=(1, 1, 1, 2), seconds=97.7,
          settings=_FULL),
    RLRow(name="v0.4 Llama 8B, 1 off", model="Llama-3.1-8B", gpus=16, rollouts=8, mean=1129, engine=1, share=0.8,
          layout=(1, 1, 1, 2), off=1, seconds=74.6, settings=_FULL),
    RLRow(name="v0.4 Qwen3-30B-A3B", model="Qwen3-30B-A3B", gpus=32, mean=3154, engine=4, layout=(2, 1, 8, 1),
          seconds=225),
    RLRow(name="v0.6 Qwen3-30B-A3B", model="Qwen3-30B-A3B", gpus=32, mean=3203, engine=2, layout=(1, 1, 8, 1),
          seconds=192),
    RLRow(name="v0.4 Qwen3-30B-A3B, 1 off", model="Qwen3-30B-A3B", gpus=32, rollouts=16, mean=3158, engine=2, share=0.8,
          layout=(1, 1, 8, 2), off=1, seconds=244),
    RLRow(name="v0.6 Qwen3-30B-A3B, 1 off", model="Qwen3-30B-A3B", gpus=32, rollouts=16, mean=3201, engine=2, share=0.8,
          layout=(1, 1, 8, 2), off=1, seconds=152),
    RLRow(name="v0.6 Qwen3-30B-A3B, 8 off", model="Qwen3-30B-A3B", gpus=192, rollouts=64, mean=3206, engine=2,
          share=0.8, layout=(1, 1, 8, 1), off=8, seconds=34.5),
    RLRow(name="v0.4 Qwen3-32B", model="Qwen3-32B", gpus=32, mean=3206, engine=4, layout=(4, 1, 1, 4), seconds=393),
    RLRow(name="v0.4 Qwen3-32B, 1 off", model="Qwen3-32B", gpus=64, rollouts=32, mean=3207, engine=4, share=0.8,
          layout=(4, 1, 1, 4), off=1, seconds=215),
    RLRow(name="v0.4 Qwen3-235B-A22B", **_LARGE, gpus=128, mean=5671, engine=16, layout=(2, 2, 16, 8), seconds=506),
    RLRow(name="v0.4 Qwen3-235B-A22B, 1 off", **_LARGE, gpus=256, rollouts=128, mean=5691, engine=8, share=0.88,
          layout=(4, 1, 16, 8), off=1, seconds=241),
    RLRow(name="v0.6 Qwen3-235B-A22B", **_LARGE, gpus=128, mean=5698, engine=16, layout=(2, 2, 16, 8), seconds=395),
    RLRow(name="v0.6 Qwen3-235B-A22B, 256", **_LARGE, gpus=256, mean=5713, engine=16, layout=(2, 2, 16, 8),
          seconds=312),
    RLRow(name="v0.6 Qwen3-235B-A22B, 1 off", **_LARGE, gpus=256, rollouts=128, mean=5721, engine=8, share=0.88,
          layout=(4, 1, 16, 8), off=1, seconds=231),
)  # fmt: skip


def question_of(row: RLRow) -> RLQuestion:
    """Return what is planned of a row: packed rows as long as the longest sample, a reference, one update a step."""
    tp, cp, ep, pp = row.layout
    trainers = [*range(row.rollouts, row.gpus)]
    keys = {
        "bf16": True, "tensor_model_parallel_size": tp, "context_parallel_size": cp, "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1, "pipeline_model_parallel_size": pp, "sequence_parallel": tp > 1,
        "use_distributed_optimizer": True, "overlap_grad_reduce": True, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": row.prompts * row.group * tp * cp * pp // len(trainers), **row.settings,
    }  # fmt: skip
    settings = load(None, [f"{key}={str(value).lower()}" for key, value in keys.items()]).settings
    packed = {"packed_tokens_train": row.longest, "packed_tokens_forward": 2 * row.longest}
    lengths = Lengths(_PROMPT, row.longest - _PROMPT, _PROMPT, row.mean - _PROMPT)
    infer = InferRole(
        device_mapping=[*range(row.rollouts or row.gpus)], model_name_or_path=row.model, engine="vllm",
        devices_per_engine=row.engine,
        config={"gpu_memory_utilization": row.share, "max_num_seqs": 1024},
    )  # fmt: skip
    model = find_model(row.model)
    rl = RLSettings(
        run=RLRunSettings(),
        rollout=RolloutSettings(
            rollout_batch_size=row.prompts,
            num_return_sequences_in_group=row.group,
            prompt_length=_PROMPT,
            sequence_length=row.longest,
            max_running_requests=10**6,
            async_generation_ratio=float(row.off),
        ),
        algorithm=AlgorithmSettings(enable_reference=True, enable_old_logprobs_recompute=True),
        data=PromptData(),
        actor_train=ModelRole(name="actor_train", device_mapping=trainers, settings=settings, training=True, **packed),
        reference=ModelRole(name="reference", device_mapping=trainers, settings=settings, **packed),
        actor_infer=infer,
        rewards={},
    )
    models = dict.fromkeys(("actor_train", "reference", "actor_infer"), model)
    return RLQuestion(settings=rl, models=models, machine=find_machine("h100-80g"), lengths=lengths)


def error(row: RLRow) -> tuple[RLAnswer, float]:
    """Return the plan of a row, and how far its seconds without sync are from the published ones: 0.1 is 10 % over."""
    found = plan_rl(question_of(row))
    return found, (found.seconds.total - found.seconds.phases[SYNC]) / row.seconds - 1
