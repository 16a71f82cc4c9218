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


class KVCache:
    """Keys and values of sequences that are padded on the left.

    Attributes:
        past: the model's past_key_values, which a forward pass reads and appends to.
        mask: int64 [rows, tokens], 0 at padding.
    """

    def __init__(self, device: torch.device) -> None:
        self.past = DynamicCache()
        self.mask = torch.zeros(0, 0, dtype=torch.int64, device=device)

    def add(self, past: DynamicCache, mask: Tensor) -> None:
        """Add the sequences of another cache with mask [more rows, tokens]."""
        width = max(mask.shape[1], self.mask.shape[1])
        self.mask = torch.cat([_widened(self.mask, width, 1), _widened(mask, width, 1)])
        for place, new in enumerate(past.layers):
            if place == len(self.past.layers):
                self.past.layers.append(new)
            else:
                old = self.past.layers[place]
                old.keys = torch.cat([_widened(old.keys, width, 2), _widened(new.keys, width, 2)])
                old.values = torch.cat([_widened(old.values, width, 2), _widened(new.values, width, 2)])

    def begin_token(self) -> Tensor:
        """Extend the mask by one token per sequence, and return the number of tokens before it, int64 [rows]."""
        lengths = self.mask.sum(-1)
        self.mask = pad(self.mask, (0, 1), value=1)
        return lengths

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, and drop columns in which all of them have padding."""
        if not rows:
            self.clear()
            return
        kept = torch.tensor(rows, device=self.mask.device)
        longest = int(self.mask[kept].sum(-1).max())
        self.mask = self.mask[kept, -longest:]
        for layer in self.past.layers:
            layer.keys, layer.values = layer.keys[kept, :, -longest:], layer.values[kept, :, -longest:]

    def clear(self) -> None:
        """Drop all rows."""
        self.past, self.mask = DynamicCache(), self.mask.new_zeros(0, 0)


def _widened(tensor: Tensor, width: int, dim: int) -> Tensor:
    """Pad with zeros on the left along a dimension, to a width."""
    missing = [0, 0] * (tensor.dim() - 1 - dim) + [width - tensor.shape[dim], 0]
    return pad(tensor, missing)


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
