"""Layers that predict further tokens (multi-token prediction, DeepSeek-V3, arXiv:2412.19437, section 2.2).

Behind the decoder, one sees what the decoder puts out for a token, and the embedding of the next token; both are
normalized and projected to one hidden state. A layer of the model's own kind, with attention, and a norm make of it
what the output layer reads. Embedding and output layer are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from megatune.architecture import Architecture
from megatune.families.dense import EMBEDDING, ENGINE_LAYER, HF_LAYER, OUTPUT_LAYER
from megatune.families.weights import HFTensor, Layers, TensorLayout, Weight

ENGINE_MTP = "mtp.layers.{layer}"
INNER_LAYER = f"{ENGINE_MTP}.transformer_layer"
_PROJECTION = "eh_proj"
PROJECTION = f"{ENGINE_MTP}.{_PROJECTION}"
_HELD = (Layers.ALL, Layers.ATTENTION, Layers.DENSE, Layers.SPARSE)


@dataclass(frozen=True, slots=True)
class MTPDeclaration:
    """How files name a family's layer that predicts a further token.

    Attributes:
        around: modules around the layer, by what the engine calls them.
        layer: the layer; None where it is named like the decoder's, with the number behind the last one's.
        copies: engine names of weights that the model shares with it, and what else files may call them; {num_layers}
            is replaced by the number of layers.
    """

    around: Mapping[str, str]
    layer: str | None = None
    copies: Mapping[str, str] | None = None

    def weights(self, decoder: Iterable[Weight]) -> Iterator[Weight]:
        """Declare its weights, from those of the decoder's layers."""
        for engine, name in self.around.items():
            shape = ("hidden_size", "concatenated_size") if engine == _PROJECTION else ("hidden_size",)
            tensor = HFTensor(f"{name}.weight", shape)
            yield Weight(f"{ENGINE_MTP}.{engine}.weight", TensorLayout.REPLICATED, (tensor,), Layers.MTP, _has_mtp)
        for weight in decoder:
            if weight.engine.startswith(ENGINE_LAYER) and weight.layers in _HELD:
                engine = weight.engine.replace(ENGINE_LAYER, INNER_LAYER)
                hf = tuple(replace(tensor, name=self._named(tensor.name)) for tensor in weight.hf)
                yield replace(weight, engine=engine, hf=hf, layers=Layers.MTP, exists=_exists(weight))

    def _named(self, name: str) -> str:
        return name if self.layer is None else self.layer + name.partition("{layer}")[2]


def _has_mtp(architecture: Architecture) -> bool:
    return architecture.mtp_num_layers > 0


def _exists(weight: Weight) -> Callable[[Architecture], bool]:
    """Return whether a member's layer has a weight: its feed-forward is sparse where the model has experts."""

    def exists(architecture: Architecture) -> bool:
        other = Layers.SPARSE if architecture.moe is None else Layers.DENSE
        return _has_mtp(architecture) and weight.layers is not other and weight.exists(architecture)

    return exists


# DeepSeek's and GLM's come after the decoder's last layer.
DEEPSEEK_MTP = MTPDeclaration(
    {
        "enorm": f"{HF_LAYER}.enorm", "hnorm": f"{HF_LAYER}.hnorm", _PROJECTION: f"{HF_LAYER}.eh_proj",
        "final_layernorm": f"{HF_LAYER}.shared_head.norm",
    },
    copies={
        EMBEDDING.engine: "model.layers.{num_layers}.embed_tokens.weight",
        OUTPUT_LAYER.engine: "model.layers.{num_layers}.shared_head.head.weight",
    },
)  # fmt: skip
# Qwen's have a name of their own.
QWEN_MTP = MTPDeclaration(
    {
        "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", _PROJECTION: "mtp.fc",
        "final_layernorm": "mtp.norm",
    },
    layer="mtp.layers.0",
)  # fmt: skip
