"""Expert layers of all families, Transformers' blocks with the same weights, and plain auxiliary losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from layouts import Layout
from torch import Tensor

from megatune.architecture import Architecture, MixtureOfExperts
from megatune.config.groups.parallel import ExpertSettings
from megatune.config.groups.performance import PerformanceSettings, RecomputeSettings
from megatune.config.settings import Settings
from megatune.data.batches import Batch

HIDDEN, FFN, NUM_EXPERTS = 32, 16, 8
_SPARSE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"router_topk": 2},
    "mixtral": {"router_topk": 2},
    "qwen2_moe": {
        "router_topk": 3,
        "pre_softmax": True,
        "shared_expert_intermediate_size": 24,
        "shared_expert_gate": True,
    },
    # As many choices a group as DeepSeek-V3 does not have.
    "deepseek_v3": {
        "router_topk": 3,
        "shared_expert_intermediate_size": 2 * FFN,
        "score_function": "sigmoid",
        "num_groups": 4,
        "group_topk": 2,
        "topk_scaling_factor": 2.5,
        "expert_bias": True,
        "router_dtype": "fp32",
    },
}
FAMILIES = tuple(_SPARSE)


def architecture(family: str) -> Architecture:
    """One sparse layer of the family."""
    moe = MixtureOfExperts(layers=(True,), num_experts=NUM_EXPERTS, moe_ffn_hidden_size=FFN, **_SPARSE[family])
    return Architecture(
        model_type=family, num_layers=1, hidden_size=HIDDEN, ffn_hidden_size=48, num_attention_heads=4,
        num_query_groups=2, kv_channels=8, vocab_size=64, max_position_embeddings=64, norm_epsilon=1e-6,
        rotary_base=1e4, moe=moe,
    )  # fmt: skip


def transformers_block(family: str) -> torch.nn.Module:
    """Transformers' block with random weights, each router far from undecided."""
    from transformers import DeepseekV3Config, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    topk = _SPARSE[family]["router_topk"]
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": FFN, "num_experts_per_tok": topk, "hidden_act": "silu"}
    block: torch.nn.Module
    if family == "qwen3_moe":
        block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes, num_experts=NUM_EXPERTS, norm_topk_prob=True))
    elif family == "qwen2_moe":
        shared = _SPARSE[family]["shared_expert_intermediate_size"]
        block = Qwen2MoeSparseMoeBlock(
            Qwen2MoeConfig(
                **sizes, num_experts=NUM_EXPERTS, norm_topk_prob=False, shared_expert_intermediate_size=shared
            )
        )
    elif family == "mixtral":
        block = MixtralSparseMoeBlock(
            MixtralConfig(**sizes, num_local_experts=NUM_EXPERTS, intermediate_size=FFN, router_jitter_noise=0.0)
        )
    else:
        block = DeepseekV3MoE(
            DeepseekV3Config(
                **sizes, n_routed_experts=NUM_EXPERTS, n_shared_experts=2, n_group=4, topk_group=2,
                routed_scaling_factor=2.5, norm_topk_prob=True,
            )
        )  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in block.state_dict().items():
            scale = 1.0 if name.startswith("gate.") else 0.3
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
    return block


def engine_weights(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The block's weights, or their gradients, whole under the engine's names."""
    found = {
        "router.weight": named["gate.weight"],
        "experts.weight1": named["experts.gate_up_proj"],
        "experts.weight2": named["experts.down_proj"],
    }
    if "gate.e_score_correction_bias" in named:
        found["router.expert_bias"] = named["gate.e_score_correction_bias"]
    for shared in ("shared_expert", "shared_experts"):
        if f"{shared}.gate_proj.weight" in named:
            gate_up = [named[f"{shared}.{part}_proj.weight"] for part in ("gate", "up")]
            found["shared_experts.linear_fc1.weight"] = torch.cat(gate_up)
            found["shared_experts.linear_fc2.weight"] = named[f"{shared}.down_proj.weight"]
    if "shared_expert_gate.weight" in named:
        found["shared_experts.gate_weight"] = named["shared_expert_gate.weight"]
    return found


@dataclass(frozen=True)
class Rows:
    """Hidden states of micro-batches, one for each data-parallel rank, and what the loss makes of the outputs.

    Attributes:
        hidden, weights: [dp, b, s, h]; the loss is the sum of the outputs times the weights.
        batches: tell which tokens are real.
    """

    hidden: Tensor
    weights: Tensor
    batches: tuple[Batch, ...]


def make_rows(lengths: Sequence[Sequence[int]], s: int, spans: Sequence[Sequence[int]] | None = None) -> Rows:
    """Rows of these real lengths for each data-parallel rank; packed, documents of these spans in one row."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for index, own in enumerate(lengths):
        places = spans[index] if spans else [s]
        starts = torch.tensor([0, *places]).cumsum(0)
        assert starts[-1] == s
        positions = torch.cat([torch.arange(place) for place in places])
        b = 1 if spans else len(own)
        ends = torch.tensor(own).repeat_interleave(torch.tensor(places)) if spans else torch.tensor(own)[:, None]
        labels = torch.where(positions < ends - 1, 1, -100).view(b, s)
        batches.append(
            Batch(
                torch.zeros(b, s, dtype=torch.int64), labels, positions.expand(b, s).contiguous(), tuple(own),
                starts.int() if spans else None,
            )
        )  # fmt: skip
    b = batches[0].input_ids.shape[0]
    hidden, weights = torch.randn(2, len(lengths), b, s, HIDDEN, generator=generator)
    return Rows(hidden, weights, tuple(batches))


def documents(batch: Batch) -> list[tuple[int, slice]]:
    """Row and real tokens of each document of a micro-batch."""
    if batch.cu_seqlens is None:
        return [(row, slice(0, length)) for row, length in enumerate(batch.lengths)]
    spans = pairwise(batch.cu_seqlens.tolist())
    return [(0, slice(start, start + length)) for (start, _), length in zip(spans, batch.lengths, strict=True)]


def plain_losses(family: str, router_weight: Tensor, hidden: Tensor, batch: Batch, kind: str) -> tuple[Tensor, Tensor]:
    """Balance loss and z-loss of one micro-batch, one document after the other.

    Args:
        hidden: [b, s, h].
        kind: "aux_loss" or "seq_aux_loss".
    """
    topk = _SPARSE[family]["router_topk"]
    parts = [hidden[row, tokens] @ router_weight.T for row, tokens in documents(batch)]
    logits = torch.cat(parts)
    if kind == "aux_loss":
        parts = [logits]
    balance = torch.zeros(())
    for part in parts:
        if not len(part):
            continue
        probs = part.softmax(-1)
        if _SPARSE[family].get("score_function") == "sigmoid":
            probs = part.sigmoid() / part.sigmoid().sum(-1, keepdim=True)
        counts = torch.zeros(NUM_EXPERTS)
        for choices in probs.topk(topk).indices:
            counts[choices] += 1
        loss = NUM_EXPERTS / topk * (counts / len(part) * probs.mean(0)).sum()
        balance = balance + loss * len(part) / len(logits)
    return balance, torch.log(logits.exp().sum(-1)).square().mean() if len(logits) else torch.zeros(())


@dataclass(frozen=True)
class Expected:
    """What a computation in one process gives.

    Attributes:
        weights, gradients: whole, by the engine's names.
        outputs, hidden_gradients: [dp, b, s, h].
        balance, z: means over micro-batches, weighted by trained tokens.
        load: choices of the busiest expert, against the mean.
    """

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    outputs: Tensor
    hidden_gradients: Tensor
    balance: float
    z: float
    load: float


def expect(family: str, rows: Rows, experts: ExpertSettings) -> Expected:
    """Transformers' block, and the plain auxiliary losses."""
    block = transformers_block(family)
    hidden = rows.hidden.clone().requires_grad_()
    chosen: list[Tensor] = []
    block.experts.register_forward_pre_hook(lambda module, arguments: chosen.append(arguments[1]))
    outputs = torch.stack([block(part) for part in hidden])
    counts = torch.zeros(NUM_EXPERTS)
    for choices, batch in zip(chosen, rows.batches, strict=True):
        by_row = choices.view(*batch.input_ids.shape, -1)
        for row, tokens in documents(batch):
            counts += by_row[row, tokens].flatten().bincount(minlength=NUM_EXPERTS)
    loss = (outputs * rows.weights).sum()
    kind = experts.moe_router_load_balancing_type
    sums = torch.zeros(2, dtype=torch.float64)
    for part, batch in zip(hidden, rows.batches, strict=True):
        if kind in ("aux_loss", "seq_aux_loss"):
            balance, z = plain_losses(family, block.gate.weight, part, batch, kind)
            coeffs = experts.moe_aux_loss_coeff or 0.0, experts.moe_z_loss_coeff or 0.0
            loss = loss + (coeffs[0] * balance + coeffs[1] * z) * batch.num_trained
            sums += torch.stack((balance, z)).detach().double() * batch.num_trained
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in block.named_parameters()}
    assert hidden.grad is not None
    balance, z = (sums / max(1, sum(batch.num_trained for batch in rows.batches))).tolist()
    return Expected(
        engine_weights(block.state_dict()),
        engine_weights(gradients),
        outputs.detach(),
        hidden.grad,
        balance,
        z,
        float(counts.max() * NUM_EXPERTS / counts.sum().clamp(min=1)),
    )


@dataclass(frozen=True)
class Case:
    """A layout, and settings that are not their defaults."""

    layout: Layout
    experts: dict[str, Any] = field(default_factory=dict)
    recompute: dict[str, Any] = field(default_factory=dict)
    performance: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        groups = {
            "experts": ExpertSettings(**self.experts),
            "recompute": RecomputeSettings(**self.recompute),
            "performance": PerformanceSettings(**self.performance),
        }
        return self.layout.settings().model_copy(update=groups)


def reported_of(model: Sequence[Any]) -> dict[str, float]:
    """Means over all ranks of what routers report since they were last asked; collective."""
    from megatune.engine.layers.moe.router import router_metrics

    found = {}
    for name, sums in router_metrics(model).items():
        torch.distributed.all_reduce(sums)
        found[name] = (sums[0] / sums[1]).item()
    return found
