"""The KV cache of the built-in engine, and its memory budget."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from megatune.errors import ExitCode, Finding, MegatuneError


class KVCache(DynamicCache):
    """Keys and values of sequences that are padded on the left to the longest."""

    def append(self, other: KVCache) -> None:
        """Add the sequences of another cache."""
        if not self.layers:
            self.layers.extend(other.layers)
            return
        for own, more in zip(self.layers, other.layers, strict=True):
            own.keys, own.values = _joined(own.keys, more.keys), _joined(own.values, more.values)

    def keep(self, rows: Sequence[int], width: int) -> None:
        """Keep only these rows, and of each the last `width` tokens."""
        if not rows:
            self.layers.clear()
            return
        self.batch_select_indices(torch.tensor(rows, dtype=torch.int64))
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[:, :, -width:], layer.values[:, :, -width:]


def _joined(*parts: Tensor) -> Tensor:
    """Concatenate [rows, heads, tokens, size] tensors along rows, padded on the left."""
    width = max(each.shape[2] for each in parts)
    return torch.cat([pad(each, (0, 0, width - each.shape[2], 0)) for each in parts])


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Measure the bytes of a token in the cache, over all layers, by a forward pass of one token.

    Raises:
        MegatuneError: INPUT, if a layer keeps other states than keys and values.
    """
    if not all(isinstance(each, DynamicLayer) for each in DynamicCache(config=model.config.get_text_config()).layers):
        why, fix = f"{model.config.model_type} has layers without keys and values", "take `strategy_name: vllm`"
        raise MegatuneError(Finding("the built-in engine cannot sample from it", "", why, fix), ExitCode.INPUT)
    cache, one = DynamicCache(), torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        model(input_ids=one, past_key_values=cache, use_cache=True)
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def kv_cache_budget(device: torch.device) -> int:
    """Return the memory budget of the cache in bytes: half of a GPU's free memory, or a quarter of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.5)
    return psutil.virtual_memory().available // 4
