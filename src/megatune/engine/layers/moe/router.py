"""The router: assigns tokens to experts, with losses that balance the load of experts and keep logits small.

The losses are over the real tokens of a whole micro-batch, of which tensor- and context-parallel ranks hold parts. Each
rank computes its part of the loss: the parts sum to the loss, and their gradients, which the engine sums over these
ranks, to its gradient. Nothing is counted twice.

Legend: n tokens of this rank, E experts, k choices of each token, h hidden size, D sequences of the micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, sinkhorn
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatune.engine.layers.norm import UnweightedNorm
from megatune.engine.patches import define_missing_names
from megatune.engine.sequences import Sequences, expand_to_tokens

define_missing_names()

_BALANCE_LOSSES = ("aux_loss", "seq_aux_loss")


class Router(TopKRouter):
    """Megatron-Core's router, extended to know which tokens are padding and which sequence each belongs to.

    Its gating, weight, expert bias and token counts are Megatron-Core's, which updates the bias. Experts are chosen as
    in Transformers, and auxiliary losses are those of the whole micro-batch.
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, **unused: Any
    ) -> None:
        super().__init__(config, pg_collection)
        # Balance loss, z-loss and total weight of the micro-batches since they were last reported.
        sums = torch.zeros(3, dtype=torch.float64, device=torch.cuda.current_device())
        self.register_buffer("auxiliary_sums", sums, persistent=False)
        # How often each expert was chosen since the last report, before any choices are dropped.
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=torch.cuda.current_device())
        self.register_buffer("choices", counts, persistent=False)

        if config.moe_scaled_router:
            self.norm = UnweightedNorm(config, config.layernorm_epsilon)
            self.input_scale = self._vector(config.hidden_size)
            self.expert_scale = self._vector(self.num_experts)

    def _vector(self, size: int) -> torch.nn.Parameter:
        vector = torch.nn.Parameter(torch.empty(size, dtype=self.config.params_dtype))
        vector.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        return vector

    def forward(self, input: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Route tokens.

        Args:
            input: [s / cp (/ tp), b, h].

        Returns:
            The weight of each choice in its token's output, fp32 [n, k], and the chosen experts, int64 [n, k]: E for a
            choice that is dropped.
        """
        if self.config.moe_scaled_router:
            input = self.norm(input) * self.input_scale * self.config.hidden_size**-0.5
        logits = self.gating(input).view(-1, self.num_experts)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        is_real = _of_this_rank(~sequences.is_padding.t(), self.config.sequence_parallel)
        scores = score(logits, self.score_function)
        experts = self._choose(logits.detach(), scores.detach(), is_real)
        if sequences.routing is not None:
            experts = self._replay(sequences.routing, experts)
        factor = self.config.moe_router_topk_scaling_factor
        probs = weigh(scores, experts, normalize=not self.config.moe_router_pre_softmax, scaling_factor=factor)
        if self.config.moe_scaled_router:
            probs = probs * self.expert_scale[experts]
        # Evaluation does not count, nor does the first pass of a recomputed layer.
        if self.training and torch.is_grad_enabled():
            probs = self._attach_losses(probs, logits, scores, is_real, sequences)
            self._count(experts, is_real)
        most = capacity_of(self.config)
        if most is not None:
            experts = drop(experts, probs, is_real, self.num_experts, most(len(experts)))
        return probs.float(), experts

    def _choose(self, logits: Tensor, scores: Tensor, is_real: Tensor) -> Tensor:
        if self.routing_type == "sinkhorn" and self.training:
            return choose_balanced(logits, is_real, self.topk)
        biased = scores if self.expert_bias is None else scores + self.expert_bias
        groups = self.config.moe_router_num_groups, self.config.moe_router_group_topk
        return choose(biased, self.topk, *groups, best=self.config.moe_router_group_best)

    def _replay(self, chosen: Tensor, experts: Tensor) -> Tensor:
        """Replay the rollout engine's choices, [b, s / cp, layers, k], where there are any: trainer and rollout engine
        then compute the same function of the weights (R3, arXiv:2510.11370). The weights of choices are the
        router's."""
        of_layer = chosen[:, :, self.layer_number - 1].transpose(0, 1)
        mine = _of_this_rank(of_layer, self.config.sequence_parallel).long() - 1
        return torch.where((mine < 0).any(1, keepdim=True), experts, mine)

    def _attach_losses(
        self, probs: Tensor, logits: Tensor, scores: Tensor, is_real: Tensor, sequences: Sequences
    ) -> Tensor:
        """Make the backward pass of `probs` add the gradients of the auxiliary losses."""
        balance = z = torch.zeros((), device=logits.device)
        balance_coeff, z_coeff = balance_coeff_of(self.config), self.config.moe_z_loss_coeff or 0.0
        if not balance_coeff and not z_coeff:
            return probs
        if balance_coeff:
            indices, num_sequences = torch.zeros_like(is_real, dtype=torch.int64), 1
            if self.routing_type == "seq_aux_loss":
                indices, num_sequences = sequence_ids(sequences, self.config.sequence_parallel)
            affinities = scores if self.score_function == "softmax" else scores / scores.sum(-1, keepdim=True)
            # The router's choices without bias and groups, which do not depend on its weight.
            own = choose(scores.detach(), self.topk)
            balance = balance_loss(affinities, own, is_real, indices, num_sequences, self.tp_cp_group)
        if z_coeff:
            z = z_loss(logits, is_real, self.tp_cp_group)
        # All gradients are divided by the step's normalizer: this weighting makes the losses of its micro-batches a
        # mean with the same weights as in the main loss.
        weight = sequences.normalizer
        with torch.no_grad():
            shares = torch.stack((balance, z, torch.ones_like(balance) / self.tp_cp_group.size()))
            self.auxiliary_sums += shares.double() * weight
        return MoEAuxLossAutoScaler.apply(probs, (balance_coeff * balance + z_coeff * z) * weight)

    @torch.no_grad()
    def _count(self, experts: Tensor, is_real: Tensor) -> None:
        """Count choices, for `router_metrics` and for Megatron-Core's update of the expert bias."""
        counts = is_real[:, None].expand_as(experts).reshape(-1)
        self.choices.scatter_add_(0, experts.reshape(-1), counts.to(self.choices.dtype))
        if self.enable_expert_bias and self.weight.requires_grad:  # the bias of a frozen router is not updated
            self.local_tokens_per_expert.scatter_add_(
                0, experts.reshape(-1), counts.to(self.local_tokens_per_expert.dtype)
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Convert the weight to another dtype, but no buffer: the bias is fp32, and counts are inexact in 16 bits."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self


def balance_coeff_of(config: TransformerConfig) -> float:
    """Return the coefficient of the load-balancing loss, 0 without one."""
    return config.moe_aux_loss_coeff if config.moe_router_load_balancing_type in _BALANCE_LOSSES else 0.0


def capacity_of(config: TransformerConfig) -> Callable[[int], int] | None:
    """Return a function from a rank's number of tokens to the capacity of an expert; None if nothing is dropped."""
    if config.moe_expert_capacity_factor is None:
        return None
    topk, num_experts, factor = config.moe_router_topk, config.num_moe_experts, config.moe_expert_capacity_factor
    return partial(capacity, topk=topk, num_experts=num_experts, factor=factor)


def expert_biases(model: Sequence[torch.nn.Module]) -> list[Tensor]:
    """Return the biases that Megatron-Core updates after the backward pass, fp32 [experts] each, without gradient."""
    config: Any = model[0].config
    if not config.moe_router_enable_expert_bias:
        return []
    modules = (module for chunk in model for module in chunk.modules())
    return [module.expert_bias for module in modules if isinstance(module, Router) and module.weight.requires_grad]


def router_metrics(model: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """Return and reset the sums of all routers. Collective over ranks that have the same layers.

    Summed over all ranks, sum / count is a mean over expert layers; for the losses also over micro-batches, weighted by
    their normalizers.

    Returns:
        "expert_load", the load of the busiest expert of a layer, 1 if all are equally busy; and the auxiliary losses
        in use, without coefficients: "load_balancing_loss", 1 if experts are equally busy, and "z_loss": fp64 [2] each,
        sum and count.
    """
    config: Any = model[0].config
    if config.num_moe_experts is None:
        return {}
    routers = [module for chunk in model for module in chunk.modules() if isinstance(module, Router)]
    sums = torch.zeros(3, dtype=torch.float64, device=torch.cuda.current_device())
    loads = sums.new_zeros(2)
    if routers:
        counts = torch.stack([router.choices for router in routers])
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        counts = _summed(counts, group).double()
        sums += torch.stack([router.auxiliary_sums for router in routers]).sum(0)
        loads[0] = (counts.amax(1) * counts.shape[1] / counts.sum(1).clamp(min=1)).sum()
        loads[1] = len(routers)
    for router in routers:
        router.auxiliary_sums.zero_()
        router.choices.zero_()
    balance, z, weight = sums
    in_use = {"load_balancing_loss": (balance, balance_coeff_of(config)), "z_loss": (z, config.moe_z_loss_coeff)}
    losses = {name: torch.stack((total, weight)) for name, (total, coeff) in in_use.items() if coeff}
    return {"expert_load": loads, **losses}


def balance_loss(
    probs: Tensor, experts: Tensor, is_real: Tensor, indices: Tensor, num_sequences: int, group: ProcessGroup
) -> Tensor:
    """Compute this rank's part, fp32 [], of E / k · Σ_e f_e · P_e (Switch Transformer, arXiv:2101.03961), 1 if experts
    are equally busy: f_e is the number of a sequence's choices of expert e, per token, and P_e the expert's mean
    probability. The mean over sequences is weighted by their real tokens; with D = 1 all tokens count as one sequence.

    Args:
        probs: fp32 [n, E], of all experts; sums to 1 for each token.
        experts: int64 [n, k], the choices that count.
        is_real: bool [n]; False for padding.
        indices: int64 [n], the sequence of each token, below `num_sequences`.
        group: the ranks that hold the micro-batch.
    """
    n, num_experts = probs.shape
    # One extra column counts tokens.
    columns = torch.cat((experts, experts.new_full((n, 1), num_experts)), 1) + indices[:, None] * (num_experts + 1)
    counts = torch.zeros(num_sequences * (num_experts + 1), device=probs.device)
    counts.scatter_add_(0, columns.view(-1), is_real[:, None].expand_as(columns).reshape(-1).float())
    counts = _summed(counts, group).view(num_sequences, -1)
    frequencies, num_tokens = counts[:, :-1], counts[:, -1]
    frequencies = frequencies / num_tokens[:, None].clamp(min=1)
    total = (probs * frequencies[indices] * is_real[:, None]).sum()
    return total * num_experts / (experts.shape[1] * num_tokens.sum().clamp(min=1))


def z_loss(logits: Tensor, is_real: Tensor, group: ProcessGroup) -> Tensor:
    """Compute this rank's part of the mean over real tokens of the squared log-sum-exp of logits (ST-MoE,
    arXiv:2202.08906): fp32 [n, E] and bool [n] to a scalar."""
    num_tokens = _summed(is_real.sum().float(), group)
    return (logits.logsumexp(-1).square() * is_real).sum() / num_tokens.clamp(min=1)


def _summed(local: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over ranks, without gradient; `local` is overwritten."""
    if group.size() > 1:
        torch.distributed.all_reduce(local, group=group)
    return local


def sequence_ids(sequences: Sequences, sequence_parallel: bool) -> tuple[Tensor, int]:
    """Return the index of each token's sequence in an expert layer, int64 [n] in the order of [s / cp (/ tp), b], and
    D,
    the number of sequences: rows, or sequences of the packed row."""
    num_sequences = len(sequences.local_lengths if sequences.is_packed else sequences.is_padding)
    numbers = torch.arange(num_sequences, device=sequences.is_padding.device)
    return _of_this_rank(expand_to_tokens(numbers, sequences).t(), sequence_parallel), num_sequences


def _of_this_rank(whole: Tensor, sequence_parallel: bool) -> Tensor:
    """Flatten [s / cp, b, ...] to [n, ...]; with sequence parallelism only this tensor-parallel rank's part."""
    if sequence_parallel:
        group = parallel_state.get_tensor_model_parallel_group()
        whole = whole.chunk(group.size())[group.rank()]
    return whole.flatten(0, 1)


ScoreFunction = Literal["softmax", "sigmoid"]


def score(logits: Tensor, function: ScoreFunction) -> Tensor:
    """Compute the softmax over all experts, or each expert's sigmoid: [n, E]."""
    return logits.softmax(-1) if function == "softmax" else logits.sigmoid()


def choose(
    scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None, best: int = 2
) -> Tensor:
    """Return the experts with the best scores: int64 [n, k].

    num_groups, group_topk: only choose among the experts of the best groups.
    best: rank a group by the sum of this many of its best scores: two in DeepSeek-V3 (arXiv:2412.19437), one in V2.
        Megatron-Core sums the best k / group_topk, which is only two for the published sizes of V3.
    """
    if group_topk:
        n, num_experts = scores.shape
        assert num_groups
        groups = scores.view(n, num_groups, -1).topk(best, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
        is_open = torch.zeros(n, num_groups, dtype=torch.bool, device=scores.device).scatter_(1, groups, True)
        scores = scores.masked_fill(~is_open.repeat_interleave(num_experts // num_groups, 1), -torch.inf)
    return scores.topk(topk, dim=-1).indices


def choose_balanced(logits: Tensor, is_real: Tensor, topk: int) -> Tensor:
    """Return the best experts after Sinkhorn normalization, which balances the experts over the real tokens of this
    rank (S-BASE, arXiv:2202.01169): int64 [n, k]. Synchronizes with the host to count iterations."""
    # Adding a constant to a token's logits only changes the range of their exponentials.
    balanced = logits - logits.amax(-1, keepdim=True)
    real = is_real.nonzero()[:, 0]
    if len(real):
        balanced = balanced.index_copy(0, real, sinkhorn(balanced[real]))
    return balanced.topk(topk, dim=-1).indices


def weigh(scores: Tensor, experts: Tensor, *, normalize: bool, scaling_factor: float | None) -> Tensor:
    """Return the weight of each chosen expert in a token's output, [n, k]; normalized they sum to 1, before scaling."""
    probs = scores.gather(1, experts)
    if normalize:
        probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
    return probs * scaling_factor if scaling_factor else probs


def capacity(num_tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """Return the most tokens that an expert takes from a rank: `factor` times an equal share, at most all tokens."""
    return min(num_tokens, math.ceil(num_tokens * topk / num_experts * factor))


def drop(experts: Tensor, probs: Tensor, is_real: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Drop choices beyond the capacity of each expert, which keeps those with the largest weights.

    From int64 [n, k], [n, k] and bool [n] to int64 [n, k]; num_experts for a dropped choice. Padding is dropped, so
    that it takes no capacity.
    """
    shares = torch.full((len(experts), num_experts), -1.0, dtype=probs.dtype, device=probs.device)
    shares.scatter_(1, experts, probs.detach().masked_fill(~is_real[:, None], -1.0))
    kept = torch.zeros_like(shares, dtype=torch.bool).scatter_(0, shares.topk(capacity, dim=0).indices, True)
    return experts.masked_fill(~(kept.gather(1, experts) & is_real[:, None]), num_experts)
