"""Adapters' own learning rates (LoRA+), against torch's AdamW over the same groups."""

from __future__ import annotations

import pytest
import torch
from layouts import Layout
from model_sizes import tiny_config

from megatune.config.groups.finetuning import FinetuningSettings
from megatune.engine import optimizer as optimizers
from megatune.engine.groups import build
from megatune.engine.model import build_model
from megatune.families import FAMILIES

RATE, VISION_RATE, RATIO, DECAY = 1e-2, 4e-3, 16.0, 0.1
_DORA = {"use_dora": True, "lora_target": ["q_proj", "o_proj"]}
SELECTIONS = {
    "dense": ("qwen3", {"additional_target": ["norm", "lm_head"]}),
    "DoRA": ("qwen3", _DORA),
    "experts": ("qwen3_moe", {}),
    "vision tower": ("qwen3_vl", {"freeze_vision_tower": False, "freeze_multi_modal_projector": True}),
}


def train(family: str, selection: dict, bf16: bool) -> dict[str, float]:
    """On the only rank: three steps with random gradients, by our optimizer and by torch's; the largest difference of a
    parameter by its name, relative to its largest change."""
    architecture = FAMILIES[family].architecture(tiny_config(family, num_hidden_layers=2).to_dict())
    given = {"learning_rate": RATE, "weight_decay": DECAY, "max_grad_norm": 0.0}
    given |= {"vision_lr": VISION_RATE} if architecture.vision else {}
    settings = Layout(1).settings(given, {"bf16": bf16})
    trainable = FinetuningSettings(finetuning_type="lora", loraplus_lr_ratio=RATIO, **selection)
    settings = settings.model_copy(update={"finetuning": trainable})
    build(settings.parallel, seed=0, timeout=60)
    chunks = build_model(architecture, settings)
    torch.manual_seed(0)
    for parameter in chunks[0].parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    trained = {name: one for name, one in chunks[0].named_parameters() if one.requires_grad}
    ours = optimizers.build_optimizer(
        chunks, architecture, settings.optimizer, settings.parallel, settings.precision, RATIO
    )
    shadows = {name: one.detach().float().clone() for name, one in trained.items()}
    begin = {name: one.clone() for name, one in shadows.items()}
    betas = (settings.optimizer.adam_beta1, settings.optimizer.adam_beta2)
    theirs = torch.optim.AdamW(
        [{"params": [one], **group(name, one)} for name, one in shadows.items()],
        betas=betas, eps=settings.optimizer.adam_epsilon,
    )  # fmt: skip
    for _ in range(3):
        for name, one in trained.items():
            one.main_grad.normal_()
            shadows[name].grad = one.main_grad.detach().float().clone()
        updated, _ = optimizers.step(ours, RATE)
        assert updated
        theirs.step()
    mains = {param: shard.main for param, shard in optimizers.main_shards(ours).items()}
    return {
        name: float((mains[one].view_as(shadows[name]) - shadows[name]).abs().max()
                    / (shadows[name] - begin[name]).abs().max())
        for name, one in trained.items()
    }  # fmt: skip


def group(name: str, parameter: torch.Tensor) -> dict[str, float]:
    """LoRA+'s: A and what is trained whole at the learning rate, B and lengths at many times of it; vectors without
    decay."""
    rate = VISION_RATE if "vision_model.blocks" in name else RATE
    return {
        "lr": rate * (RATIO if name.endswith((".lora_B", ".magnitude")) else 1.0),
        "weight_decay": 0.0 if parameter.dim() == 1 else DECAY,
    }


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SELECTIONS)
def test_three_steps_are_those_of_torch(pool, name, bf16):
    (found,) = pool.run(1, train, *SELECTIONS[name], bf16)
    assert any(one.endswith("lora_A") for one in found)
    assert any(one.endswith("lora_B") for one in found)
    assert any(one.endswith("magnitude") for one in found) == (name == "DoRA")
    assert max(found.values()) < 1e-5, {one: error for one, error in found.items() if error >= 1e-5}
