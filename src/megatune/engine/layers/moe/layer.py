"""A layer's experts: router, routed experts and shared ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatune.engine.layers.feed_forward import LINEAR, SharedExperts
from megatune.engine.layers.moe.dispatcher import AllGatherDispatcher, AllToAllDispatcher, Dispatcher
from megatune.engine.layers.moe.grouped_experts import GroupedExperts
from megatune.engine.layers.moe.router import Router, capacity_of
from megatune.engine.sequences import Sequences

_DISPATCHERS: dict[str, Callable[..., Dispatcher]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
}


class MoELayer(moe_layer.MoELayer):
    """Megatron-Core's layer of experts, whose router knows the micro-batch's sequences, and with our dispatchers."""

    def __init__(self, config: TransformerConfig, **unused: Any) -> None:
        groups = get_default_pg_collection()
        assert groups.tp.size() == 1 or config.sequence_parallel, "refused by the settings' rules"
        submodules = moe_layer.MoESubmodules(
            router=Router, experts=GroupedExperts, shared_experts=ModuleSpec(SharedExperts, submodules=LINEAR)
        )
        super().__init__(config, submodules, pg_collection=groups)
        # Megatron-Core makes the router's weight and the gate of shared experts on the CPU.
        self.to(torch.cuda.current_device())
        self.token_dispatcher = _DISPATCHERS[config.moe_token_dispatcher_type](
            config.num_moe_experts, capacity_of(config), config.moe_pad_expert_input_to_capacity, groups
        )

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, padding_mask: Sequences
    ) -> tuple[Tensor, None]:
        """Apply the experts.

        Args:
            hidden_states: [s / cp (/ tp), b, h].
            padding_mask: the micro-batch's sequences, under the name that Megatron-Core has for its argument.

        Returns:
            [s / cp (/ tp), b, h], and no bias.
        """
        compute = partial(self._compute, padding_mask)
        if self.moe_layer_recompute:
            return tensor_parallel.checkpoint(compute, False, hidden_states), None
        return compute(hidden_states), None

    def _compute(self, sequences: Sequences, hidden_states: Tensor) -> Tensor:
        shared = self.shared_experts if self.shared_expert_overlap else None
        shared_output = self.shared_experts_compute(hidden_states)
        probs, experts = self.router(hidden_states, sequences)
        if shared is not None:
            shared.pre_forward_comm(hidden_states)
        dispatched = self.token_dispatcher(hidden_states.reshape(-1, hidden_states.shape[-1]), probs, experts)
        if shared is not None:
            shared.linear_fc1_forward_and_act(dispatched.tokens)
        output, _ = self.experts(dispatched.tokens, dispatched.tokens_per_expert, dispatched.probs)
        output = dispatched.combine(output)
        if shared is not None:
            shared.linear_fc2_forward(output)
            shared.post_forward_comm()
            shared_output = shared.get_output()
        output = output.view_as(hidden_states)
        return output if shared_output is None else output + shared_output


class RecomputedMoELayer(MoELayer):
    """The same, computed again in the backward pass: of a layer that full recomputation in blocks keeps."""

    def __init__(self, config: TransformerConfig, **unused: Any) -> None:
        super().__init__(config)
        self.moe_layer_recompute = True
