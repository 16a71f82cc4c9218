"""Checkpoints with a layer that predicts a further token, and what plain PyTorch makes of them.

Transformers has no such layer: it is made of Transformers' own decoder layer and norms of the family. The model is
built with a layer more, which is taken out again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from model_sizes import model_class, tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatune.data.rows import IGNORE_INDEX
from megatune.families import FAMILIES, load_architecture
from megatune.families.weights import Layers, all_shapes
from megatune.verify.reference import _architecture, _canonical_tensors, checkpoint_tensors
from megatune.verify.samples import Sample

NUM_LAYERS = 4
# How a layer more is asked for: it has attention, and experts where the model has them.
_MORE: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"]},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]},
}
_BEHIND = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
_APART = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}


@dataclass
class PredictingModel:
    """Transformers' model, and beside it a layer that predicts a further token."""

    model: Any
    layer: torch.nn.Module
    around: torch.nn.ModuleDict

    @property
    def name(self) -> str:
        return str(self.model.config.model_type)

    @property
    def is_apart(self) -> bool:
        return self.name.startswith("qwen")

    def file_name(self, name: str) -> str:
        """What files call a tensor of the layer, by its name as the decoder's further layer, or of a module around."""
        first = f"model.layers.{NUM_LAYERS}."
        if name.startswith("model."):
            return name.replace(first, "mtp.layers.0.") if self.is_apart else name
        module, _, leaf = name.partition(".")
        return f"mtp.{_APART[module]}.{leaf}" if self.is_apart else f"{first}{_BEHIND[module]}.{leaf}"

    def named(self, tensors: Mapping[str, Tensor], around: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name tensors of a model with a layer more as files do."""
        named = {self.file_name(name) if name.startswith("model.") else name: each for name, each in tensors.items()}
        return named | {self.file_name(name): tensor for name, tensor in around.items()}

    def hidden(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """What goes into the output layer for the next token, [s, h], and for the one after it, [s - 1, h]."""
        decoder = self.model.model
        states = decoder(input_ids=input_ids).last_hidden_state
        following = decoder.embed_tokens(input_ids[:, 1:])
        both = (self.around["enorm"](following), self.around["hnorm"](states[:, :-1]))
        mixed = self.around["eh_proj"](torch.cat(both, -1))
        positions = torch.arange(1, input_ids.shape[1])[None]  # those of the tokens that are looked up
        # Qwen3.5's turn by time, height and width.
        rotary = decoder.rotary_emb(mixed, positions.expand(3, 1, -1) if "qwen3_5" in self.name else positions)
        output = self.layer(mixed, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        output = output[0] if isinstance(output, tuple) else output
        return states[0], self.around["norm"](output)[0]

    def losses(self, sample: Sample) -> tuple[Tensor, Tensor, int, int]:
        """The sums of both losses of a document that is alone in its row, and of how many tokens they are."""
        labels = torch.tensor(sample.labels)
        states, further = (self.model.lm_head(each) for each in self.hidden(torch.tensor([sample.input_ids])))
        sums = (
            cross_entropy(logits[:-1].float(), labels[ahead:], reduction="sum", ignore_index=IGNORE_INDEX)
            for ahead, logits in ((1, states), (2, further))
        )
        counts = (int((labels[ahead:] != IGNORE_INDEX).sum()) for ahead in (1, 2))
        return (*sums, *counts)  # type: ignore[return-value]

    def compute(self, samples: Sequence[Sample], factor: float) -> tuple[float, float, dict[str, Tensor]]:
        """Loss and mtp_loss, and gradients of what is trained by the names of files."""
        sums = [self.losses(sample) for sample in samples]
        first, second, tokens, further = (sum(column) for column in zip(*sums, strict=True))
        ((first + factor * second) / tokens).backward()
        return first.item() / tokens, second.item() / further, self.gradients()

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of every parameter that has one, by the names of files."""
        return self.tensors(lambda parameter: parameter.grad)

    def tensors(self, of: Any) -> dict[str, Tensor]:
        """Name what is asked of every parameter as files do, where there is something."""
        layers, self.model.model.layers = self.model.model.layers, self._whole()
        found = {name: of(each) for name, each in self.model.named_parameters()}
        found = {name: each.detach().clone() for name, each in found.items() if each is not None}
        self.model.config.num_hidden_layers = NUM_LAYERS + 1
        whole = _canonical_tensors(checkpoint_tensors(self.model, found), _architecture(self.model))
        self.model.model.layers, self.model.config.num_hidden_layers = layers, NUM_LAYERS
        around = {name: of(each) for name, each in self.around.named_parameters()}
        return self.named(whole, {name: each.detach().clone() for name, each in around.items() if each is not None})

    def _whole(self) -> torch.nn.ModuleList:
        return torch.nn.ModuleList([*self.model.model.layers, self.layer])


def make_model(model_type: str, folder: Path, *, tied: bool = False, repeats: bool = True) -> PredictingModel:
    """Make a random model with such a layer, and save it as published ones are.

    Args:
        repeats: files repeat the word embedding and the output layer where families do so.
    """
    sizes = {**_MORE.get(model_type, {}), "num_hidden_layers": NUM_LAYERS + 1, "tie_word_embeddings": tied}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: Any = model_class(model_type).from_config(tiny_config(model_type, **sizes), dtype=torch.float32)
        size, norm = model.config.hidden_size, type(model.model.norm)
        norms = ("enorm", "hnorm", "norm")
        around = torch.nn.ModuleDict({name: norm(size, eps=model.config.rms_norm_eps) for name in norms})
        around["eh_proj"] = torch.nn.Linear(2 * size, size, bias=False)
        around["eh_proj"].weight.normal_(std=model.config.initializer_range)
        for module in (model, around):
            for name, parameter in module.named_parameters():
                if name.endswith("A_log"):
                    parameter.uniform_(-3, 0)
                elif parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
            for name, buffer in module.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.3)
    model.save_pretrained(folder)
    *layers, layer = model.model.layers
    model.model.layers = torch.nn.ModuleList(layers)
    model.config.num_hidden_layers = NUM_LAYERS
    made = PredictingModel(model.eval(), layer.eval(), around)
    tensors = made.named(load_file(folder / "model.safetensors"), around.state_dict())
    if not made.is_apart and repeats:
        tensors[f"model.layers.{NUM_LAYERS}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{NUM_LAYERS}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = NUM_LAYERS
    for kind in ("layer_types", "mlp_layer_types"):
        if kind in config:
            config[kind] = config[kind][:NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    return made


def add_layer(folder: Path, *, repeats: bool = True) -> Path:
    """Add a random layer that predicts a further token to a checkpoint in one file."""
    architecture = load_architecture(folder, "sft", mtp_num_layers=1)
    family = FAMILIES[architecture.model_type]
    weights = [weight for weight in family.weight_map(architecture) if weight.layers is Layers.MTP]
    tensors = load_file(folder / "model.safetensors")
    like = tensors["model.norm.weight"]
    generator = torch.Generator().manual_seed(7)
    for name, shape in all_shapes(weights, architecture).items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = (0.1 * values + float(len(shape) == 1 and "bias" not in name)).to(like.dtype)
    for name, copy in family.copies(architecture).items() if repeats else ():
        tensors[copy] = tensors[name].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
