"""Bytes that a layer's elementwise operators move on a GPU, counted operator by operator as the engine computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from activation_cases import DELTA, DENSE, GEMMA3, LATENT, OLMO3, QWEN3, SHARED, SPARSE, Measured, machine
from activation_cases import architecture as small
from activation_cases import experts as few
from layouts import Layout
from megatron.core.fusions import fused_bias_swiglu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatune.architecture import Architecture
from megatune.config.settings import Settings
from megatune.engine.groups import build
from megatune.engine.layers import feed_forward, norm, rotary
from megatune.engine.model import build_model
from megatune.plan.operators.decoder import decoder_layer
from megatune.plan.operators.operator import MemoryOp, Operator
from megatune.plan.operators.shapes import layer_shapes, shapes_of

LENGTH = 1024
FUSED = Layout(1, performance={"bias_activation_fusion": True, "apply_rope_fusion": True})
WHOLE: dict[str, Any] = {"windows": (None,) * 4}
SINKS = {"add_qkv_bias": True, "add_bias_linear": True, "attention_sinks": True}
CASES = {
    "dense": DENSE,
    "norms of heads": QWEN3,
    "post-norms": replace(GEMMA3, **WHOLE),
    "norms of all heads": replace(OLMO3, **WHOLE),
    "experts": SPARSE,
    "shared experts": SHARED,
    "latent attention": replace(LATENT, moe=replace(LATENT.moe, layers=(True,) * 4)),
    "sinks, biases and clamps": small(model_type="gpt_oss", moe=few(swiglu_limit=7.0), **SINKS, **WHOLE),
    "gated delta net": DELTA,
    "gated attention": replace(DELTA, delta=None),
}
# What torch.compile makes one kernel of on a GPU.
KERNELS = (
    (norm, ("_normalize", "_gradients")),
    (rotary, ("_turn",)),
    (feed_forward, ("_forward", "_backward", "_clamped_forward", "_clamped_backward")),
    (fused_bias_swiglu, ("weighted_swiglu", "weighted_swiglu_back")),
)
# Products and attention, whose bytes are their own kernels'; and what moves nothing, or what a CPU's attention copies.
PRODUCTS = ("mm", "_grouped_mm", "bmm", "baddbmm", "linalg_solve_triangular", "_scaled_dot_product")
NOTHING = ("copy_", "empty", "new_empty", "_unsafe_view", "detach", "promote_types", "scalar_tensor")


class Traffic(TorchDispatchMode):
    """Counts bytes that elementwise operators and reductions read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.moved, self._inside = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name, returned = func._schema.name.partition("::")[2], func._schema.returns
        is_view = all(each.alias_info is not None and not each.alias_info.is_write for each in returned)
        if name == "addmm":  # what is added to is copied, and read by the product
            self.moved += 3 * size_of(args[0])
        elif not (self._inside or is_view or name.startswith((*PRODUCTS, *NOTHING))):
            # Of what is looked up only some rows are read.
            self.moved += 2 * size_of(found) if name == "index_select" else size_of((args, kwargs, found))
        return found

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Count a function's arguments and what it returns only."""

        def counted(*args: Any) -> Any:
            self._inside = True
            found = function(*args)
            self._inside = False
            self.moved += size_of((args, found))
            return found

        return counted


def size_of(tensors: Any) -> int:
    """Count bytes, those of what is expanded once."""
    sizes = 0
    for each in tree_leaves(tensors):
        if isinstance(each, torch.Tensor):
            sizes += each.element_size() * each[tuple(slice(None) if step else 0 for step in each.stride())].numel()
    return sizes


def moved_bytes(architecture: Architecture, settings: Settings) -> list[tuple[int, int]]:
    """Forward and backward: of the first layer's mixer, with its norms and its sum, and of what follows it."""
    build(settings.parallel, seed=0, timeout=settings.run.ddp_timeout)
    (chunk,) = build_model(architecture, settings)
    for name, parameter in chunk.named_parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        # Gradients of matrices are products; norms' vectors have one in the backward pass's kernel.
        parameter.requires_grad_(parameter.dim() < 2 and "experts" not in name)
    layer, config = chunk.module.decoder.layers[0], chunk.module.config
    sequences = SimpleNamespace(
        boundaries=(0, LENGTH), longest=LENGTH, media=(), position_ids=torch.arange(LENGTH), routing=None,
        rotary_position_ids=None, is_padding=torch.zeros(1, LENGTH, dtype=torch.bool), normalizer=torch.ones(()),
    )  # fmt: skip
    options = {"attention_mask": None, "rotary_pos_emb": chunk.module._rotary_embedding(sequences)}
    hidden = torch.randn(LENGTH, 1, architecture.hidden_size, dtype=config.params_dtype, requires_grad=True)

    def mixer() -> torch.Tensor:
        found = layer.self_attention(layer.input_layernorm(hidden), packed_seq_params=sequences, **options)
        return layer.self_attn_bda(True, False)(found, hidden, 0.0)

    def others() -> torch.Tensor:
        return layer.mlp_bda(True, False)(
            layer.mlp(layer.pre_mlp_layernorm(hidden), padding_mask=sequences), hidden, 0.0
        )

    return [_counted(mixer, hidden), _counted(others, hidden)]


def _counted(compute: Callable[[], torch.Tensor], hidden: torch.Tensor) -> tuple[int, int]:
    grad, hidden.grad = torch.randn_like(compute()), None  # what is made once is there
    output, forward = _traffic_of(compute)
    _, backward = _traffic_of(lambda: output.backward(grad))
    return forward, backward


def _traffic_of(run: Callable[[], Any]) -> tuple[Any, int]:
    traffic = Traffic()
    with ExitStack() as stack:
        for module, names in KERNELS:
            for name in names:
                stack.enter_context(patch.object(module, name, traffic.kernel(getattr(module, name))))
        stack.enter_context(traffic)
        return run(), traffic.moved


def planned_bytes(operators: tuple[Operator, ...]) -> list[float]:
    return [
        sum(kernel.moved for one in operators for kernel in getattr(one, way) if isinstance(kernel, MemoryOp))
        for way in ("forward", "backward")
    ]


@pytest.mark.covering
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_engines_operators(pool, name):
    architecture, one_layer = CASES[name], {"layers": (True,)}
    parts = {each: replace(part, **one_layer) for each in ("moe", "delta") if (part := getattr(architecture, each))}
    architecture = replace(architecture, num_layers=1, windows=architecture.windows[:1], **parts)
    one = Measured(name, architecture, FUSED, bf16=True, length=LENGTH)
    (measured,) = pool.run(1, moved_bytes, one.architecture, one.settings, limit=60.0)
    kind = one.architecture.layer_kind(0)
    shapes = layer_shapes(shapes_of(replace(one.case, machine=machine("hopper"))), kind, True)
    for found, branch in zip(measured, decoder_layer(shapes, kind.sparse), strict=True):
        # Biases of attention's projections are not planned: the fewer channels, the more they weigh.
        assert list(found) == pytest.approx(planned_bytes(branch), rel=0.35 if architecture.add_qkv_bias else 0.1)
