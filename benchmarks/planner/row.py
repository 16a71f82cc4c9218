"""A published run, and the shorthand that its settings are written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatune.plan.case import OURS, Engine

BRIDGE = "NVIDIA-NeMo/Megatron-Bridge, examples/model_verification_cards"
SWIFT = "modelscope/ms-swift, docs/source_en/Megatron-SWIFT/Quick-start.md and examples/megatron"
ZOO = "yanring/Megatron-MoE-ModelZoo, best_practice/Qwen3/readme.md"
AUTOMODEL = "NVIDIA-NeMo/Automodel, docs/performance-summary.mdx"

# Tokens of the mean document of Tulu 3: the card of Moonlight packs 21.55 of them into 8192 tokens.
TULU = 380
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# Operator-wise selective recomputation keeps every second product; the settings' nearest is every second layer.
HALF = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": "half"}
FULL = {"recompute_granularity": "full"}
BALANCED = {"moe_expert_capacity_factor": 1.0}
# A loss balances the experts, as in Megatron-Bridge's recipes of these models.
AUXILIARY = {"moe_aux_loss_coeff": 1e-3}
# What made the rows. Megatron-Core with Transformer Engine; with DeepEP's or HybridEP's dispatch; with exchanges next
# to another micro-batch's passes; with CUDA graphs of what is around the experts. `host`: Transformer Engine's modules
# do more in Python than this engine's layers; chosen from the open rows (`planner.fit.hosts`).
MEGATRON = Engine(products="streams", runs=True, keeps_logits=True, host=1.5)
# Megatron-SWIFT and verl set attention_backend: flash.
FLASH = MEGATRON._replace(runs=False)
FUSED = MEGATRON._replace(dispatch="machines")
# Its gate deals out tokens' experts in turn (FakeBalancedGate).
DEALT = FUSED._replace(dispatch="neighbours")
OVERLAPPED = FUSED._replace(overlaps=True)
GRAPHED = FUSED._replace(host=1.0)
# PithTrain: all of it in PyTorch, with exchanges next to another micro-batch's passes.
DUALPIPE = Engine(keeps_logits=True, overlaps=True)
# Transformers' own layers, with DeepSpeed.
TRANSFORMERS = Engine(products="loop", keeps_logits=True)
# What runs operator by operator: no compiled or fused norms, activations and rotary embeddings.
EAGER = {"bias_activation_fusion": False, "apply_rope_fusion": False, "rms_norm_fusion": False}
NO_OVERLAP = {"overlap_grad_reduce": False, "overlap_param_gather": False}
# Gradients and Adam's averages in 16 bits.
NARROW = {"accumulate_allreduce_grads_in_fp32": False, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published speed.

    Attributes:
        device: "h100-96g" is torchtitan's H100, with HBM2e of 2.4 TB/s.
        rows: of a micro-batch. steps: micro-batches of a process in a step.
        source: the repository on github.com, owner/name, and where in it; or a name.
        speed: tokens/s/GPU, as published or computed from the published seconds of a step, or from the published share
            of the peak (`of_peak`).
        settings: by the project's names.
        sharded: weights are gathered for each pass and gradients reduced after it (FSDP, ZeRO 3).
        document: mean length of a packed row's documents.
        lora, lora_target: rank of the adapters, and the layers that have one.
        engine: what made it; what of it the planner knows.
        assumed: what the source does not say.
    """

    name: str
    source: str
    model: str
    device: str
    gpus: int
    length: int
    rows: int
    steps: int
    speed: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    sharded: bool = False
    document: float | None = None
    image_tokens: int = 0
    lora: int = 0
    lora_target: tuple[str, ...] = ("all",)
    engine: Engine = OURS
    assumed: str = ""

    @property
    def publisher(self) -> str:
        """What sets are split by."""
        return self.source.partition(",")[0]


def tp(size: int, **more: Any) -> dict[str, Any]:
    return {"tensor_model_parallel_size": size, "sequence_parallel": size > 1, **more}


def ep(size: int, **more: Any) -> dict[str, Any]:
    return {"expert_model_parallel_size": size, **more}
