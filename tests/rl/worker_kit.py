"""Workers of tiny models, and random samples for them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from layouts import Layout

from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.groups.optimizer import BatchSettings
from megatune.config.groups.run import ModelSettings, RunSettings
from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.rollout import Generating, PromptData, RolloutSettings
from megatune.config.rl.run import RLRunSettings
from megatune.config.rl.settings import (
    InferRole,
    ModelRole,
    RLSettings,
)
from megatune.engine import groups
from megatune.launch.context import RankContext
from megatune.launch.world import RankEnv
from megatune.rl.samples import Rollouts

# Tokens of prompts, and of responses: uneven over ranks and micro-batches.
PROMPTS, RESPONSES = (7, 3, 12, 5, 9, 4, 6), (9, 14, 3, 8, 1, 17, 2)
TEMPERATURE = 0.7
NEWEST = "newest"


def rollouts(vocab_size: int, seed: int = 0, **per_token: float) -> Rollouts:
    """Random tokens; per_token: names of values, and how wide they are spread."""
    random = np.random.default_rng(seed)
    tokens = [random.integers(1, vocab_size, p + r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    values = {
        name: [random.normal(0, width, r).astype(np.float32) for r in RESPONSES] for name, width in per_token.items()
    }
    for array in (*tokens, *(each for own in values.values() for each in own)):
        array.flags.writeable = False  # as those that come through Ray
    return Rollouts(tokens, list(PROMPTS), values)


def settings_of(
    model: Path,
    layout: Layout,
    name: str = "actor_train",
    *,
    output: Path | str = "unused",
    batch: tuple[int, int] = (2, 2),
    packed_tokens: int | None = None,
    lora: dict[str, Any] | None = None,
    stage: str = "sft",
    algorithm: dict[str, Any] | None = None,
    **role: Any,
) -> RLSettings:
    """A run whose actor_train is the role that is tried."""
    optimizer = role.pop("optimizer", {"learning_rate": 1e-2})
    own = layout.settings(optimizer, role.pop("precision", {}))
    own = own.model_copy(
        update={
            "run": RunSettings(stage=stage, ddp_timeout=30, seed=3),  # type: ignore[arg-type]
            "model": ModelSettings(model_name_or_path=str(model)),
            "batch": BatchSettings(per_device_train_batch_size=batch[0], gradient_accumulation_steps=batch[1]),
            "finetuning": own.finetuning
            if lora is None
            else FinetuningSettings(finetuning_type="lora", **{"lora_rank": 4, **lora}),
        }
    )
    one = ModelRole(
        name=name,
        device_mapping=[*range(layout.world_size)],
        settings=own,
        infer_batch_size=2,
        packed_tokens_train=packed_tokens,
        packed_tokens_forward=packed_tokens,
        **role,
    )
    return RLSettings(
        run=RLRunSettings(output_dir=str(output), max_steps=10, seed=3, model_update_buffer_size_mb=1),
        rollout=RolloutSettings(rollout_batch_size=len(PROMPTS), prompt_length=16, sequence_length=40),
        algorithm=AlgorithmSettings(**(algorithm or {})),
        data=PromptData(),
        actor_train=one,
        actor_infer=InferRole(
            device_mapping=[0],
            model_name_or_path=str(model),
            generating_args=Generating(temperature=TEMPERATURE),
        ),
        rewards={},
    )


def started(kind: Any, settings: RLSettings, checkpoint: str | None = None) -> Any:
    """On every rank of the pool, which have met already: a worker, loaded."""
    rank, world_size = groups.rank(), len(settings.actor_train.devices)
    env = RankEnv(rank, rank, world_size, world_size, "127.0.0.1", 0, 0)
    context = RankContext(env, Path(tempfile.mkdtemp()))
    worker = kind(context, settings, settings.actor_train)
    worker.load(worker.find_checkpoint(None)[0] if checkpoint == NEWEST else checkpoint)
    return worker


def whole(answers: Sequence[dict[int, np.ndarray]], samples: Rollouts) -> np.ndarray:
    """All tokens of all samples, one after the other."""
    from megatune.rl.worker.batching import merge_ranks

    return np.concatenate(merge_ranks(answers, samples))
