"""The dense feed-forward and the shared experts.

Legend: s tokens of a context-parallel rank, s / tp with sequence parallelism; b rows; h hidden size.
"""

from __future__ import annotations

from typing import Any

from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatune.engine.layers.swiglu import fused_swiglu, reference_swiglu

LINEAR = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


class FeedForward(MLP):
    """Megatron-Core's feed-forward with our SwiGLU. Its own adds an offset of 0 to `up`, and keeps the sum."""

    def __init__(
        self, config: TransformerConfig, submodules: MLPSubmodules = LINEAR, tp_group: ProcessGroup | None = None
    ) -> None:
        tp_group = tp_group or get_tensor_model_parallel_group()
        super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size, tp_group=tp_group)

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """Project, activate, project.

        Args:
            hidden_states: [s, b, h].

        Returns:
            [s, b, h], and no bias.
        """
        gate_up, _ = self.linear_fc1(hidden_states)
        swiglu = fused_swiglu if self.config.bias_activation_fusion else reference_swiglu
        output, _ = self.linear_fc2(swiglu(gate_up))
        return output, None


class SharedExperts(SharedExpertMLP, FeedForward):
    """Megatron-Core's shared experts around our feed-forward."""
