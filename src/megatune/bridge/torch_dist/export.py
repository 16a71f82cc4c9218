"""Writes a model's Hugging Face tensors as a torch_dist checkpoint, which Megatron-Core loads in any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from megatune.architecture import Architecture
from megatune.bridge.safetensors_files import ModelFolder, TensorSource
from megatune.bridge.torch_dist.files import TorchDistFiles
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES
from megatune.families.forms import CheckpointForm
from megatune.families.megatron_names import LANGUAGE_MODEL, Part, check_arranged, is_stacked, written
from megatune.families.weights import (
    WHOLE,
    Stack,
    Weight,
    by_expert,
    experts_of,
    hf_shape,
    hf_shapes,
    layers_of,
    segments,
)

_MAX_FILE_BYTES = 5 * 10**9
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class MegatronModel:
    """A model that is to be written.

    Args:
        source: its tensors, with adapters merged where there are some.
        folder, form: its own checkpoint, whose dtypes are kept.
        dtype: of all weights instead; buffers keep theirs.

    Raises:
        MegatuneError: INPUT, for what Megatron-Core has no place for.
    """

    def __init__(
        self,
        source: TensorSource,
        folder: ModelFolder,
        form: CheckpointForm,
        architecture: Architecture,
        dtype: torch.dtype | None = None,
    ) -> None:
        if architecture.num_labels:
            what, why = "is a reward model", "Megatron-Core's language model has no place for its score"
            raise MegatuneError(Finding(what, str(folder.folder), why, "keep its Hugging Face form"), ExitCode.INPUT)
        check_arranged(architecture, str(folder.folder))
        self._source, self._architecture, self._asked = source, architecture, dtype
        self._weights = FAMILIES[architecture.model_type].weight_map(architecture)
        places = form.locate_all(self._weights, architecture)
        dtypes = {name: folder.entry(name).dtype for name in {place.name for place in places.values()}}
        self._dtype_of = {name: dtypes[place.name] for name, place in places.items()}
        self.dtype = dtype or next(iter(self._dtype_of.values()))

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return sum(
            math.prod(shape) * self._dtype(weight, layer).itemsize
            for weight in self._weights
            for layer in layers_of(weight, self._architecture)
            for shape in hf_shapes(weight, self._architecture, layer).values()
        )

    def write(
        self,
        folder: Path,
        iteration: int,
        *,
        max_file_bytes: int = _MAX_FILE_BYTES,
        progress: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """Write the files of an iteration into an empty folder, the tensor of a layer, or of an expert, at a time.

        Args:
            progress: is told the bytes of each.
        """
        files = TorchDistFiles(folder, max_file_bytes)
        architecture = self._architecture
        for weight in self._weights:
            for layer in layers_of(weight, architecture):
                parts = by_expert(weight, architecture, WHOLE)
                for part, expert in zip(parts, experts_of(weight, architecture), strict=True):
                    shapes = [hf_shape(tensor, architecture) for tensor in weight.hf]
                    shape = sum(each[0] for each in shapes), *shapes[0][1:]
                    whole = torch.empty(shape, dtype=self._dtype(weight, layer))
                    self._source.fill(whole.view(-1), segments(weight, architecture, part, layer))
                    for key, places in groupby(
                        sorted(written(weight, architecture, layer, expert), key=attrgetter("key", "row")),
                        attrgetter("key"),
                    ):
                        found = list(places)
                        at, sizes, rows = found[0].at, found[0].sizes, [_rows(whole, part) for part in found]
                        chunk = rows[0] if len(rows) == 1 else torch.cat(rows)
                        corner = *at, *(0 for _ in shape)
                        files.add(key, (*sizes, *chunk.shape), corner, chunk.view(*(1 for _ in at), *chunk.shape))
                    progress(whole.nbytes)
        for name in self._states():
            files.add_nothing(name)
        files.close(self._args(), iteration)

    def _dtype(self, weight: Weight, layer: int) -> torch.dtype:
        name = next(iter(hf_shapes(weight, self._architecture, layer)))
        if weight.is_buffer:
            return self._dtype_of[name]
        # All layers lie in one tensor.
        first = layers_of(weight, self._architecture)[0]
        return self._asked or self._dtype_of[next(iter(hf_shapes(weight, self._architecture, first)))]

    def _states(self) -> list[str]:
        """List what Megatron-Core, with Transformer Engine or without, keeps of its linear layers and attention."""
        architecture, stacked = self._architecture, is_stacked(self._architecture)
        prefix = LANGUAGE_MODEL if architecture.vision is not None else ""
        found = []
        for layer in range(architecture.num_layers):
            shard = f"{layer}_{architecture.num_layers}" if stacked else "0_1"
            name = f"{prefix}decoder.layers." + ("" if stacked else f"{layer}.")
            if not architecture.is_delta_layer(layer):
                found.append(f"{name}self_attention.core_attention._extra_state/shard_{shard}")
        for weight in self._weights:
            is_linear = weight.linear and weight.per_layer and len(weight.hf[0].shape) == 2
            if weight.stack is not Stack.DECODER or not is_linear:
                continue
            for layer in layers_of(weight, architecture):
                for expert in experts_of(weight, architecture):
                    place = written(weight, architecture, layer, expert)[0]
                    index, sizes = place.at or (0,), place.sizes or (1,)
                    shard = "_".join(".".join(map(str, numbers)) for numbers in (index, sizes))
                    found.append(f"{place.key.rpartition('weight')[0]}_extra_state/shard_{shard}")
        return found

    def _args(self) -> Mapping[str, Any]:
        """Return what Megatron's readers ask of the arguments of the run that saved a checkpoint."""
        architecture, sizes = self._architecture, ("tensor", "pipeline", "expert")
        return {
            **{f"{name}_model_parallel_size": 1 for name in sizes},
            **{name: getattr(architecture, name) for name in _NUMBERS},
            "padded_vocab_size": architecture.vocab_size,
            "untie_embeddings_and_output_weights": not architecture.tie_word_embeddings,
            "num_experts": architecture.moe.num_experts if architecture.moe is not None else None,
            "params_dtype": self.dtype,
            "torch_dtype": _DTYPE_NAMES[self.dtype],
            "no_save_optim": True,
            "no_save_rng": True,
        }


def _rows(whole: torch.Tensor, part: Part) -> torch.Tensor:
    """Return the rows of a part. Where they become less, they do so in fp32, in which a 16-bit number less 1 is exact
    from 2^-13 on."""
    rows = whole[part.first : part.first + part.rows * part.step : part.step]
    return rows.float() - part.less if part.less else rows


_NUMBERS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "max_position_embeddings",
)  # fmt: skip
