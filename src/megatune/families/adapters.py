"""Low-rank adapters (LoRA, arXiv:2106.09685) as entries of the weight map, derived from those of their matrices.

Every Hugging Face matrix W [out, in] with an adapter has its own A [r, in] and B [out, r], and acts as W + s · B · A.
If the engine stacks matrices, it stacks their A, which every rank holds whole, and their B, which are sharded like the
matrices; if it shards the inputs, it shards A's columns, and B is whole. With weight decomposition (DoRA,
arXiv:2402.09353) a matrix also has a magnitude for each of its rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from megatune.architecture import Architecture
from megatune.families import FAMILIES
from megatune.families.selection import Selection, is_frozen, is_whole_match
from megatune.families.weights import HFTensor, Role, Stack, TensorLayout, Weight, layers_of

ALL_TARGETS = ("all", "all-linear")
# Names of an adapter's tensors in peft, after the module's name.
LORA_A, LORA_B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"

ADAPTER_CONFIG = "adapter_config.json"

_NO_NAME = re.compile(r"[^\w.{}-]")  # characters that occur in regular expressions, but not in names of modules


class AdapterWeights(NamedTuple):
    """The adapter entries of one weight, whose matrices the engine stacks, each with its own adapter.

    Attributes:
        a: [n · r, in] for n matrices with an adapter.
        b: [rows, r] with the weight's rows; those of matrices without an adapter are zero.
        magnitude: magnitudes of the weight's rows, [rows], like those of b; None without weight decomposition.
    """

    a: Weight
    b: Weight
    magnitude: Weight | None

    @property
    def entries(self) -> tuple[Weight, ...]:
        """All entries, in the engine's order."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)


def adapters(architecture: Architecture, selection: Selection) -> dict[str, AdapterWeights]:
    """Return the adapters of a model by the engine's name of their weight."""
    return _adapters(architecture, selection) if selection.finetuning_type == "lora" else {}


def adapter_weights(architecture: Architecture, selection: Selection) -> tuple[Weight, ...]:
    """List the entries of all adapters, in the order of the weight map."""
    return tuple(entry for each in adapters(architecture, selection).values() for entry in each.entries)


def alpha_of(selection: Selection) -> int:
    """Return alpha; by default it is twice the rank."""
    return 2 * selection.lora_rank if selection.lora_alpha is None else selection.lora_alpha


def scaling(selection: Selection) -> float:
    """Return the scaling factor s of adapters: alpha / r, rank-stabilized (arXiv:2312.03732) alpha / √r."""
    return alpha_of(selection) / (math.sqrt(selection.lora_rank) if selection.use_rslora else selection.lora_rank)


def is_standard_lora(architecture: Architecture, selection: Selection) -> bool:
    """Return whether only low-rank matrices on linear layers of an unquantized base are trained. Rollout engines
    support these adapters, but no magnitudes, experts, whole modules or quantized bases."""
    if selection.finetuning_type != "lora" or selection.use_dora or selection.additional_target:
        return False
    if selection.quantization_bit:
        return False
    return not any(each.per_expert for each in adapter_weights(architecture, selection))


def matrices(architecture: Architecture) -> Iterator[tuple[Weight, HFTensor]]:
    """Yield the matrices of a model that may have adapters."""
    for weight in FAMILIES[architecture.model_type].weight_map(architecture):
        if weight.is_matrix and layers_of(weight, architecture):
            yield from ((weight, tensor) for tensor in weight.hf)


def module_path(tensor: HFTensor) -> str:
    """Return the name of the module that has a weight, with {layer} and {expert}."""
    return tensor.name.removesuffix(".weight")


def is_target(target: str, weight: Weight, tensor: HFTensor, architecture: Architecture) -> bool:
    """Return whether a name in `lora_target` matches a matrix's linear layer.

    As in peft it is a module's name or the end of one (q_proj, self_attn.q_proj), or a regular expression of whole
    names; or Megatron-Core's name of a layer (linear_qkv), which matches all of its matrices. A name without a layer
    number matches every layer; a regular expression must match all layers.
    """
    path = module_path(tensor)
    if target in ALL_TARGETS:
        return weight.stack is not Stack.PROJECTOR
    if _NO_NAME.search(target):
        numbered = (path.format(layer=layer, expert=0) for layer in layers_of(weight, architecture))
        return all(is_whole_match(target, one) for one in numbered)
    return target in (path, engine_layer(weight)) or path.endswith(f".{target}")


def engine_layer(weight: Weight) -> str:
    """Return Megatron-Core's name of the linear layer of a decoder's weight; "" for an encoder's.

    The projections of multi-head latent attention, except the last, are linear_qkv; experts' are named like those of a
    dense feed-forward.
    """
    if weight.stack is not Stack.DECODER:
        return ""
    name = weight.engine.rpartition(".")[0].rpartition(".")[2]
    if ".self_attention." in weight.engine:
        return name if name == "linear_proj" else "linear_qkv"
    return {"weight1": "linear_fc1", "weight2": "linear_fc2"}.get(weight.engine.rpartition(".")[2], name)


@lru_cache(maxsize=256)
def _adapters(architecture: Architecture, selection: Any) -> dict[str, AdapterWeights]:
    found = {}
    for weight in FAMILIES[architecture.model_type].weight_map(architecture):
        if not weight.is_matrix or is_frozen(weight.stack, selection):
            continue
        names = {
            tensor.name
            for tensor in weight.hf
            if any(is_target(target, weight, tensor, architecture) for target in selection.lora_target)
        }
        if names:
            found[weight.engine] = _beside(weight, names, selection)
    return found


def _beside(weight: Weight, names: set[str], selection: Selection) -> AdapterWeights:
    """Return the adapter entries of a weight; `names` are its matrices that have an adapter."""
    rank, cuts_inputs = selection.lora_rank, weight.layout is TensorLayout.COLUMNS
    head, _, tail = weight.engine.rpartition(".weight")

    def entry(which: str, layout: TensorLayout, *hf: HFTensor) -> Weight:
        return Weight(
            f"{head}.adapter{tail}.{which}", layout, hf, weight.layers, weight.exists, weight.stack, Role.ADAPTER,
            weight.num_layers, groups=weight.groups,
        )  # fmt: skip

    def named(tensor: HFTensor, which: str, *shape: str | int) -> HFTensor:
        blocks = () if which == LORA_A else tensor.blocks
        return HFTensor(f"{module_path(tensor)}.{which}" if tensor.name in names else "", shape, blocks)

    of_inputs = TensorLayout.COLUMNS if cuts_inputs else TensorLayout.REPLICATED
    of_rows = TensorLayout.REPLICATED if cuts_inputs else weight.layout
    adapted = [tensor for tensor in weight.hf if tensor.name in names]
    return AdapterWeights(
        entry("lora_A", of_inputs, *(named(one, LORA_A, rank, one.shape[1]) for one in adapted)),
        entry("lora_B", of_rows, *(named(one, LORA_B, one.shape[0], rank) for one in weight.hf)),
        entry("magnitude", of_rows, *(named(one, MAGNITUDE, one.shape[0]) for one in weight.hf))
        if selection.use_dora
        else None,
    )
