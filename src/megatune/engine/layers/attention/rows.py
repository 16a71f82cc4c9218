"""Attention of whole rows: each document of a row to itself.

Legend: s tokens of a row, b rows, n query heads and g key/value heads, d channels of queries and keys, e of values.
"""

from __future__ import annotations

from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatune.config.attention_kernel import PLAIN_BACKENDS, attention_kernels
from megatune.engine import device
from megatune.engine.layers.attention.kernels import attend, equal_channels
from megatune.engine.layers.attention.spans import documents

_SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, boundaries: tuple[int, ...], scale: float, backend: AttnBackend
) -> Tensor:
    """Attend causally inside each document, by the fastest kernel that the backend allows.

    Args:
        query: [s, b, n, d].
        key: [s, b, g, d].
        value: [s, b, g, e].

    Returns:
        [s, b, n, e].
    """
    spans = documents(boundaries)
    if spans.is_one_square and backend.name not in PLAIN_BACKENDS:
        return _one_document(query, key, value, scale, backend)
    output = attend(query.flatten(1, 2), key.flatten(1, 2), value.flatten(1, 2), spans, scale, backend)
    return output.unflatten(1, query.shape[1:3])


def _one_document(query: Tensor, key: Tensor, value: Tensor, scale: float, backend: AttnBackend) -> Tensor:
    """torch's own choice of kernels is best where a row is one document: it has cuDNN's, too."""
    channels, grouped = value.shape[-1], key.shape[2] != query.shape[2]
    kernels = attention_kernels(
        device.compute_capability(),
        backend.name,
        str(query.dtype).removeprefix("torch."),
        max(query.shape[-1], channels),
        in_runs=False,
        grouped=grouped,
    )
    if kernels[0] == "flash":
        query, key, value = equal_channels(query, key, value)
    with sdpa_kernel([_SDPA[kernel] for kernel in kernels], set_priority=True):
        output = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=scale,
            enable_gqa=grouped,
        )
    return output.permute(2, 0, 1, 3)[..., :channels]
