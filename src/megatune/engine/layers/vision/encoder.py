"""A vision encoder of the engine's own, whose features are options, with what makes tokens of its patches.

Legend: n patches of all pictures of a call, m² patches to a token, c channels of a patch, V width of the encoder, h
width of the decoder. Patches come token by token, those of a token side by side, row by row.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from megatune.architecture import Vision, VisionLayers
from megatune.engine import device
from megatune.engine.layers.attention.kernels import attend
from megatune.engine.layers.attention.spans import Spans
from megatune.engine.layers.rotary import rotate


class EncoderOutput(NamedTuple):
    """What encoders of Transformers return, as far as it is used: tokens of pictures, [n / m², h]."""

    pooler_output: Tensor


class VisionEncoder(nn.Module):
    """Patches to tokens of the decoder.

    Args:
        recompute: the backward pass computes each layer again.
    """

    def __init__(self, vision: Vision, options: VisionLayers, *, recompute: bool) -> None:
        super().__init__()
        self.vision, self.options = vision, options
        self.run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False) if recompute else _call
        size = vision.patch_size
        self.patch_embed = PatchProjection(vision.in_channels, vision.hidden_size, size, size, bias=False)
        self.pre_norm = _norm(vision.hidden_size, options)
        self.layers = nn.ModuleList(EncoderLayer(vision, options) for _ in range(vision.depth))
        self.projector = Projector(vision, options)

    def forward(self, pixel_values: Tensor, *, grid_thw: Tensor, backend: AttnBackend) -> EncoderOutput:
        """Encode pictures: [n, c], of grids int64 [pictures, 3] on the host."""
        edges = (0, *grid_thw.prod(1).cumsum(0).tolist())
        spans = Spans(edges, edges, causal=False)
        hidden_states = self.pre_norm(self.patch_embed(pixel_values.to(self.patch_embed.weight.dtype)))
        table = self._rotary_table(grid_thw, hidden_states.dtype)
        for layer in self.layers:
            hidden_states = self.run(layer, hidden_states, table, spans, backend)
        return EncoderOutput(self.projector(hidden_states))

    def _rotary_table(self, grids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return cosine and sine as `rotate` takes them, [2, n, 1, 1, channels of a head]: of a head's pairs of
        channels the even ones turn by the patch's row, the odd ones by its column, rows' first."""
        channels = self.vision.hidden_size // self.vision.num_heads
        powers = torch.arange(0, channels, 2, dtype=torch.float32) / channels
        frequencies = 1.0 / self.options.rotary_base**powers
        places = torch.cat([patch_places(h, w, self.vision.spatial_merge_size) for _, h, w in grids.tolist()]).float()
        angles = torch.cat((places[:, :1] * frequencies[0::2], places[:, 1:] * frequencies[1::2]), 1)
        cos, sin = angles.cos(), angles.sin()
        table = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)))
        return device.send(table[:, :, None, None].to(dtype))


class PatchProjection(nn.Conv2d):
    """The projection of patches, each by itself: a convolution whose kernels lie side by side."""

    def forward(self, patches: Tensor) -> Tensor:
        """Project [n, c] to [n, V]."""
        return linear(patches, self.weight.flatten(1), self.bias)


class EncoderLayer(nn.Module):
    """Attention among the patches of a picture, and a feed-forward, each behind a norm and added to its input."""

    def __init__(self, vision: Vision, options: VisionLayers) -> None:
        super().__init__()
        self.norm1, self.norm2 = (_norm(vision.hidden_size, options) for _ in range(2))
        self.attention, self.mlp = VisionAttention(vision), FeedForward(vision)

    def forward(self, hidden_states: Tensor, table: Tensor, spans: Spans, backend: AttnBackend) -> Tensor:
        """Compute [n, V] to the same."""
        hidden_states = hidden_states + self.attention(self.norm1(hidden_states), table, spans, backend)
        return hidden_states + self.mlp(self.norm2(hidden_states))


class VisionAttention(nn.Module):
    """Attention of the patches of a picture to each other, turned by their rows and columns."""

    def __init__(self, vision: Vision) -> None:
        super().__init__()
        self.num_heads, width = vision.num_heads, vision.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, hidden_states: Tensor, table: Tensor, spans: Spans, backend: AttnBackend) -> Tensor:
        """Attend within `spans`: [n, V] to the same."""
        query, key, value = (
            project(hidden_states).unflatten(1, (self.num_heads, -1))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (rotate(each[:, None], table)[:, 0] for each in (query, key))
        context = attend(query, key, value, spans, query.shape[-1] ** -0.5, backend)
        return self.o_proj(context.flatten(1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """A gated feed-forward: SwiGLU, or with another activation."""

    def __init__(self, vision: Vision) -> None:
        super().__init__()
        width, inner = vision.hidden_size, vision.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.activation = ACT2FN[vision.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute [n, V] to the same."""
        gate = self.activation(self.gate_proj(hidden_states))
        return self.down_proj(gate * self.up_proj(hidden_states))  # type: ignore[no-any-return]


class Projector(nn.Module):
    """Norm of patches, m² of them to one of the same width, and two linear layers to the decoder's width."""

    def __init__(self, vision: Vision, options: VisionLayers) -> None:
        super().__init__()
        self.patches_of_token = vision.spatial_merge_size**2
        self.norm = nn.RMSNorm(vision.hidden_size, options.projector_norm_epsilon)
        self.merging_layer = nn.Linear(vision.merged_size, vision.hidden_size, bias=False)
        self.linear_1 = nn.Linear(vision.hidden_size, vision.out_hidden_size, bias=options.projector_bias)
        self.linear_2 = nn.Linear(vision.out_hidden_size, vision.out_hidden_size, bias=options.projector_bias)
        self.activation = ACT2FN["gelu"]

    def forward(self, patches: Tensor) -> Tensor:
        """Project [n, V] to [n / m², h]; of the patches of a token a channel of all comes before the next channel."""
        merged = self.norm(patches).unflatten(0, (-1, self.patches_of_token)).transpose(1, 2).flatten(1)
        return self.linear_2(self.activation(self.linear_1(self.merging_layer(merged))))  # type: ignore[no-any-return]


def patch_places(height: int, width: int, merge_size: int) -> Tensor:
    """Return row and column of each patch of an image, int64 [height · width, 2], in the order of patches."""
    m = merge_size
    rows = torch.arange(height).view(-1, 1, m, 1).expand(-1, width // m, m, m)
    columns = torch.arange(width).view(1, -1, 1, m).expand(height // m, -1, m, m)
    return torch.stack((rows.flatten(), columns.flatten()), 1)


def _norm(width: int, options: VisionLayers) -> nn.Module:
    return nn.RMSNorm(width, options.norm_epsilon)


def _call(layer: nn.Module, *arguments: object) -> Tensor:
    return layer(*arguments)  # type: ignore[no-any-return]
