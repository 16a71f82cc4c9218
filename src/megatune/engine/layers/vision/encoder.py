"""The engine's own vision encoder, with the features of several families as options, and its projectors.

Legend: n patches of all images of a call, m² patches to a token, c channels of a patch, V width of the encoder, h width
of the decoder. Patches are ordered by token, and row by row within a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from megatune.encoders import Vision, VisionLayers
from megatune.engine import device
from megatune.engine.layers.attention.kernels import attend
from megatune.engine.layers.attention.spans import Spans
from megatune.engine.layers.norm import upcast
from megatune.engine.layers.rotary import rotate


class EncoderOutput(NamedTuple):
    """The part of Transformers' encoder output that is used: tokens of images, [n / m², h]."""

    pooler_output: Tensor


class VisionEncoder(nn.Module):
    """Encodes patches as tokens of the decoder.

    Args:
        recompute: recompute each layer in the backward pass.
    """

    def __init__(self, vision: Vision, options: VisionLayers, *, recompute: bool) -> None:
        super().__init__()
        self.vision, self.options = vision, options
        self.run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False) if recompute else _call
        size, width = vision.patch_size, vision.hidden_size
        if options.unit_pixels:
            self.patch_embed: nn.Module = PixelProjection(vision.in_channels * size**2, width, bias=options.bias)
        else:
            self.patch_embed = PatchProjection(vision.in_channels, width, size, size, bias=options.bias)
        if options.num_positions:
            # As in checkpoint files; the class token's row is first.
            tables = (2,) if options.axial else (1,) * options.class_token
            self.positions = nn.Parameter(torch.empty(*tables, options.num_positions, width))
        if options.class_token:
            self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.pre_norm = _norm(width, options) if options.pre_norm else nn.Identity()
        self.layers = nn.ModuleList(EncoderLayer(vision, options) for _ in range(vision.depth))
        self.final_norm = _norm(width, options) if options.final_norm else nn.Identity()
        self.projector = PROJECTORS[options.projector](vision, options)

    def forward(self, pixel_values: Tensor, *, grid_thw: Tensor, backend: AttnBackend) -> EncoderOutput:
        """Encode images: [n, c], with grids int64 [images, 3] on the host; the tiles of an image are separate grids."""
        grids = grid_thw[:, 1:].repeat_interleave(grid_thw[:, 0], 0).tolist()
        sizes = [height * width for height, width in grids]
        hidden_states = self.patch_embed(pixel_values)
        places = torch.cat([patch_places(grid[0], grid[1], self.vision.spatial_merge_size) for grid in grids])
        table = None if self.options.rotary_base is None else self._rotary_table(places, hidden_states.dtype)
        if self.options.num_positions:
            hidden_states = hidden_states + self._positions(places)
        if self.options.class_token:
            # With a table of positions all grids have the same size.
            first = (self.class_token + self.positions[:, :1]).expand(len(sizes), 1, -1)
            hidden_states = torch.cat((first, hidden_states.unflatten(0, (len(sizes), -1))), 1)
            hidden_states, sizes = hidden_states.flatten(0, 1), [size + 1 for size in sizes]
        edges = tuple(accumulate(sizes, initial=0))
        spans = Spans(edges, edges, causal=False)
        hidden_states = self.pre_norm(hidden_states)
        for layer in self.layers:
            hidden_states = self.run(layer, hidden_states, table, spans, backend)
        hidden_states = self.final_norm(hidden_states)
        if self.options.class_token:
            hidden_states = hidden_states.unflatten(0, (len(sizes), -1))[:, 1:].flatten(0, 1)
        return EncoderOutput(self.projector(hidden_states))

    def _positions(self, places: Tensor) -> Tensor:
        """Return the position embeddings of patches by row and column, int64 [n, 2] on the host: [n, V]."""
        if self.options.axial:
            rows, columns = (device.send(each.contiguous()) for each in places.unbind(1))
            return self.positions[0].index_select(0, columns) + self.positions[1].index_select(0, rows)
        first = int(self.options.class_token)
        side = math.isqrt(self.options.num_positions - first)
        numbers = device.send(places[:, 0] * side + places[:, 1] + first)
        return self.positions.flatten(0, -2).index_select(0, numbers)

    def _rotary_table(self, places: Tensor, dtype: torch.dtype) -> Tensor:
        """Return cosine and sine as `rotate` expects them, [2, n, 1, 1, channels of a head]. The even ones of a head's
        channel pairs rotate by the patch's row, the odd ones by its column, rows first; if axial, each half of a head
        separately, [2, n, 1, 2, channels / 2]."""
        assert self.options.rotary_base is not None
        channels = self.vision.hidden_size // self.vision.num_heads // (2 if self.options.axial else 1)
        powers = torch.arange(0, channels, 2, dtype=torch.float32) / channels
        frequencies = 1.0 / self.options.rotary_base**powers
        if self.options.axial:
            angles = places.flip(1).float()[..., None] * frequencies
        else:
            rows, columns = places.float().split(1, 1)
            angles = torch.cat((rows * frequencies[0::2], columns * frequencies[1::2]), 1)[:, None]
        cos, sin = angles.cos(), angles.sin()
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
        return device.send(table[:, :, None].to(dtype))


class PatchProjection(nn.Conv2d):
    """The linear projection of patches: a convolution whose stride is the kernel size."""

    def forward(self, patches: Tensor) -> Tensor:
        """Project [n, c] to [n, V]."""
        return linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class PixelProjection(nn.Linear):
    """The linear projection of patches with pixel values from 0 to 1."""

    def forward(self, patches: Tensor) -> Tensor:
        """Project [n, c], stored channel by channel, to [n, V]."""
        pixels = patches.unflatten(1, (3, -1)).transpose(1, 2).flatten(1)
        return super().forward((2 * (pixels - 0.5)).to(self.weight.dtype))  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """Attention among the patches of an image, and a feed-forward, each with a norm before it and a residual."""

    def __init__(self, vision: Vision, options: VisionLayers) -> None:
        super().__init__()
        width = vision.hidden_size
        self.norm1, self.norm2 = (_norm(width, options) for _ in range(2))
        self.post_norm1, self.post_norm2 = (
            _norm(width, options) if options.post_norms else nn.Identity() for _ in range(2)
        )
        self.attention, self.mlp = VisionAttention(vision, options), FeedForward(vision, options.bias)
        self.scale1: nn.Parameter | None = None
        self.scale2: nn.Parameter | None = None
        if options.layer_scale:
            self.scale1, self.scale2 = (nn.Parameter(torch.empty(width)) for _ in range(2))

    def forward(self, hidden_states: Tensor, table: Tensor | None, spans: Spans, backend: AttnBackend) -> Tensor:
        """Run the layer on [n, V]."""
        attended = self.post_norm1(self.attention(self.norm1(hidden_states), table, spans, backend))
        hidden_states = hidden_states + (attended if self.scale1 is None else self.scale1 * attended)
        fed = self.post_norm2(self.mlp(self.norm2(hidden_states)))
        return hidden_states + (fed if self.scale2 is None else self.scale2 * fed)  # type: ignore[no-any-return]


class VisionAttention(nn.Module):
    """Attention among the patches of an image, with rotary embedding by row and column if there is a table."""

    def __init__(self, vision: Vision, options: VisionLayers) -> None:
        super().__init__()
        self.num_heads, width, self.options = vision.num_heads, vision.hidden_size, options
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=options.bias) for _ in range(4)
        )
        if options.head_norms:
            self.q_norm, self.k_norm = (_norm(width // self.num_heads, options) for _ in range(2))

    def forward(self, hidden_states: Tensor, table: Tensor | None, spans: Spans, backend: AttnBackend) -> Tensor:
        """Attend within `spans`: [n, V] to [n, V]."""
        query, key, value = (
            project(hidden_states).unflatten(1, (self.num_heads, -1))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        scale = query.shape[-1] ** -0.5
        if self.options.head_norms:
            query, key, scale = self.q_norm(query), self.k_norm(key), 1.0
            value = rms_norm(value, value.shape[-1:], None, self.options.norm_epsilon)
        if table is not None and self.options.axial:
            query, key = (rotate(each.unflatten(-1, (2, -1)), table).flatten(-2) for each in (query, key))
        elif table is not None:
            query, key = (rotate(each[:, None], table)[:, 0] for each in (query, key))
        context = attend(query, key, value, spans, scale, backend)
        return self.o_proj(context.flatten(1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """A feed-forward with one activation, or a gated one, such as SwiGLU."""

    def __init__(self, vision: Vision, bias: bool) -> None:
        super().__init__()
        width, inner = vision.hidden_size, vision.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=bias) if vision.gated else None
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.activation = ACT2FN[vision.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Run the feed-forward on [n, V]."""
        up = self.up_proj(hidden_states)
        inner = self.activation(up) if self.gate_proj is None else self.activation(self.gate_proj(hidden_states)) * up
        return self.down_proj(inner)  # type: ignore[no-any-return]


class MergingProjector(nn.Module):
    """Normalizes patches, merges m² of them to one of the same width, and applies two linear layers."""

    def __init__(self, vision: Vision, options: VisionLayers) -> None:
        super().__init__()
        self.patches_of_token = vision.spatial_merge_size**2
        self.norm = nn.RMSNorm(vision.hidden_size, options.projector_norm_epsilon)
        self.merging_layer = nn.Linear(vision.merged_size, vision.hidden_size, bias=False)
        self.linear_1 = nn.Linear(vision.hidden_size, vision.out_hidden_size, bias=options.projector_bias)
        self.linear_2 = nn.Linear(vision.out_hidden_size, vision.out_hidden_size, bias=options.projector_bias)
        self.activation = ACT2FN["gelu"]

    def forward(self, patches: Tensor) -> Tensor:
        """Project [n, V] to [n / m², h]; the merged patches of a token are interleaved by channel."""
        merged = self.norm(patches).unflatten(0, (-1, self.patches_of_token)).transpose(1, 2).flatten(1)
        return self.linear_2(self.activation(self.linear_1(self.merging_layer(merged))))  # type: ignore[no-any-return]


class AveragingProjector(nn.Module):
    """Averages m² patches, and applies a norm that multiplies by 1 + its weight, and a linear projection."""

    def __init__(self, vision: Vision, options: VisionLayers) -> None:
        super().__init__()
        self.patches_of_token, self.epsilon = vision.spatial_merge_size**2, options.projector_norm_epsilon
        self.norm = nn.Parameter(torch.empty(vision.hidden_size))
        self.projection = nn.Parameter(torch.empty(vision.hidden_size, vision.out_hidden_size))

    def forward(self, patches: Tensor) -> Tensor:
        """Project [n, V] to [n / m², h]."""
        average = patches.unflatten(0, (-1, self.patches_of_token)).mean(1)
        normalized = rms_norm(upcast(average), self.norm.shape, 1 + upcast(self.norm), self.epsilon)
        return normalized.to(patches.dtype) @ self.projection


class JoiningProjector(nn.Module):
    """Concatenates m² patches, and applies LayerNorm and two linear layers."""

    def __init__(self, vision: Vision, options: VisionLayers) -> None:
        super().__init__()
        self.patches_of_token, merged, width = vision.spatial_merge_size**2, vision.merged_size, vision.out_hidden_size
        self.norm = nn.LayerNorm(merged, options.projector_norm_epsilon)
        self.linear_1, self.linear_2 = nn.Linear(merged, width), nn.Linear(width, width)
        self.activation = ACT2FN["gelu"]

    def forward(self, patches: Tensor) -> Tensor:
        """Project [n, V] to [n / m², h]; the patches of a token are concatenated row by row."""
        joined = self.norm(patches.unflatten(0, (-1, self.patches_of_token)).flatten(1))
        return self.linear_2(self.activation(self.linear_1(joined)))  # type: ignore[no-any-return]


class ScaledAverageProjector(nn.Module):
    """Averages m² patches, scales by √V, optionally standardizes, normalizes, and applies a linear projection."""

    std_bias: Tensor | None
    std_scale: Tensor

    def __init__(self, vision: Vision, options: VisionLayers) -> None:
        super().__init__()
        self.patches_of_token, self.epsilon = vision.spatial_merge_size**2, options.projector_norm_epsilon
        width = vision.hidden_size
        self.projection = nn.Linear(width, vision.out_hidden_size, bias=False)
        for name in ("std_bias", "std_scale"):
            self.register_buffer(name, torch.empty(width) if options.standardized else None)

    def forward(self, patches: Tensor) -> Tensor:
        """Project [n, V] to [n / m², h]."""
        average = upcast(patches.unflatten(0, (-1, self.patches_of_token))).mean(1).to(patches.dtype)
        scaled = upcast(average) * patches.shape[-1] ** 0.5
        if self.std_bias is not None:
            scaled = (scaled - upcast(self.std_bias)) * upcast(self.std_scale)
        normalized = rms_norm(scaled.to(patches.dtype), scaled.shape[-1:], None, self.epsilon)
        return self.projection(normalized)  # type: ignore[no-any-return]


PROJECTORS: dict[str, Callable[[Vision, VisionLayers], nn.Module]] = {
    "merging_layer": MergingProjector,
    "average": AveragingProjector,
    "side_by_side": JoiningProjector,
    "scaled_average": ScaledAverageProjector,
}


def patch_places(height: int, width: int, merge_size: int) -> Tensor:
    """Return row and column of each patch of an image, int64 [height · width, 2], in patch order."""
    m = merge_size
    rows = torch.arange(height).view(-1, 1, m, 1).expand(-1, width // m, m, m)
    columns = torch.arange(width).view(1, -1, 1, m).expand(height // m, -1, m, m)
    return torch.stack((rows.flatten(), columns.flatten()), 1)


def _norm(width: int, options: VisionLayers) -> nn.Module:
    return (nn.LayerNorm if options.layer_norm else nn.RMSNorm)(width, options.norm_epsilon)


def _call(layer: nn.Module, *arguments: object) -> Tensor:
    return layer(*arguments)  # type: ignore[no-any-return]
