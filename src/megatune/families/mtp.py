"""Multi-token prediction (MTP) layers (DeepSeek-V3, arXiv:2412.19437, section 2.2).

An MTP layer follows the decoder. It gets the decoder's output for a token, and the embedding of the next token; both
are normalized and projected to one hidden state. A layer of the model's own kind, with attention, and a norm turn it
into the input of the output layer. Embedding and output layer are shared with the model.
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
    """How a family's MTP layer is named in files.

    Attributes:
        around: modules around the inner layer, by their engine names.
        layer: the inner layer; None if it is named like one of the decoder's, with the number after the last one's.
        copies: engine names of weights that are shared with the model, and other names under which files may repeat
            them; {num_layers} is replaced by the number of layers.
    """

    around: Mapping[str, str]
    layer: str | None = None
    copies: Mapping[str, str] | None = None

    def weights(self, decoder: Iterable[Weight]) -> Iterator[Weight]:
        """Declare its weights, derived from those of the decoder's layers."""
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
    """Return whether the layer has a weight: its feed-forward is sparse if the model has experts."""

    def exists(architecture: Architecture) -> bool:
        other = Layers.SPARSE if architecture.moe is None else Layers.DENSE
        return _has_mtp(architecture) and weight.layers is not other and weight.exists(architecture)

    return exists


# DeepSeek's and GLM's layers have the number after the decoder's last layer.
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
# Qwen's layers have their own names.
QWEN_MTP = MTPDeclaration(
    {
        "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", _PROJECTION: "mtp.fc",
        "final_layernorm": "mtp.norm",
    },
    layer="mtp.layers.0",
)  # fmt: skip
