"""What plain Transformers computes for the same tokens. Knows nothing of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.auto import register_types
from megatune.data.media.arguments import media_arguments
from megatune.data.rows import IGNORE_INDEX
from megatune.families import FAMILIES, as_trained, load_architecture, read_architecture, read_config
from megatune.families.forms import FileTensor, find_form
from megatune.families.peft_config import num_scores
from megatune.families.scores import CLASSES, num_labels
from megatune.half_precision import multiply_in_fp32
from megatune.launch.context import RankContext
from megatune.verify.localize import reference_places
from megatune.verify.numbers import write_gradients, write_logits, write_loss, write_trace
from megatune.verify.samples import FP16_LOSS_SCALE, Sample

if TYPE_CHECKING:
    from megatune.bridge.peft_model import AppliedAdapter


class Reference(NamedTuple):
    """Transformers' logits [s, vocabulary] of each sample, on the CPU, mean loss over all trained tokens of all
    samples, and gradients by Hugging Face name, if any were asked for. Of a reward model the logits are scores of
    tokens [s, 1], and the loss is the mean of their squares: rewards are trained in pairs, which these are not."""

    logits: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]


def load_reference_model(model_dir: str | Path, dtype: torch.dtype, *, scores: int = 0) -> torch.nn.Module:
    """Return the checkpoint as Transformers loads it, on the CPU.

    Args:
        scores: of a classifier, whatever it says itself; those of a language model then are random.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    register_types()
    config = read_config(model_dir)
    # Transformers has no other attention with sinks that runs on a CPU.
    attention = "eager" if load_architecture(model_dir).attention_sinks else "sdpa"
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention, "experts_implementation": "eager"}
    options |= {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    kind = AutoModelForCausalLM
    if count := scores or num_labels(config):
        kind, options["num_labels"] = AutoModelForSequenceClassification, count
    elif FAMILIES[str(config["model_type"])].vision is not None:
        kind = AutoModelForImageTextToText
    model = kind.from_pretrained(model_dir, **options).eval()
    if config.get("quantization_config"):
        # What it dequantizes is in bf16, whatever is asked for, and would be named as in these files.
        model._weight_conversions = None
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model


def _load_rounded(
    model_dir: str | Path, weights_dtype: torch.dtype, dtype: torch.dtype, adapters: Sequence[str]
) -> tuple[torch.nn.Module, AppliedAdapter | None]:
    """Return the checkpoint with weights rounded to one dtype, computing in another, and the last adapter on it.

    Adapters before that are merged in fp32, before weights are rounded.
    """
    multiply_in_fp32(dtype)
    scores = max((num_scores(Path(each)) for each in adapters), default=0)
    model: Any = load_reference_model(model_dir, weights_dtype, scores=scores)
    if adapters[:-1]:
        from megatune.bridge.peft_model import merge_adapters

        merged = merge_adapters(
            load_reference_model(model_dir, torch.float32, scores=scores), [Path(each) for each in adapters[:-1]]
        )
        model.load_state_dict(merged.state_dict())
    # `to` rounds buffers, too, and Transformers keeps some in fp32: rotary frequencies, the bias of a router.
    model = model if dtype is weights_dtype else model.to(dtype)
    if not adapters:
        return model, None
    from megatune.bridge.peft_model import apply_adapter

    applied = apply_adapter(model, Path(adapters[-1]), trained=True)
    return applied.model.eval(), applied


def checkpoint_tensors(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name and cut tensors of a model's parameters as its checkpoint does: Transformers 5 holds all experts of a layer
    in one parameter, checkpoints have them one by one.

    Args:
        tensors: by name in `model.named_parameters()`, shaped like the parameters: themselves, or their gradients.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors))


def _canonical_tensors(tensors: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """Name and cut tensors of a checkpoint as the family's weight map does."""
    family = FAMILIES[architecture.model_type]
    weights = family.weight_map(architecture)

    def shape_of(name: str) -> tuple[int, ...]:
        return tuple(tensors[name].shape)

    # What Transformers 5 saves; where shapes leave it open, that is not transposed.
    form = find_form(family.forms, weights, architecture, tensors.keys(), shape_of, "5")
    places = form.locate_all(weights, architecture)
    return {name: _cut(tensors[place.name], place) for name, place in places.items() if place.name in tensors}


def _cut(tensor: Tensor, place: FileTensor) -> Tensor:
    if place.expert is None:
        return tensor
    matrix = tensor[place.expert].T if place.transposed else tensor[place.expert]
    return matrix[place.first_row : place.first_row + place.rows]


def _architecture(model: Any) -> Architecture:
    architecture, where = read_architecture(model.config.to_dict(), str(model.name_or_path)), str(model.name_or_path)
    # Its config has defaults that its files may disagree with: what differs in them is not tied.
    tied = architecture.tie_word_embeddings and bool(model.all_tied_weights_keys)
    architecture = replace(architecture, tie_word_embeddings=tied)
    return as_trained(architecture, where, CLASSES, model.num_labels) if hasattr(model, "score") else architecture


def _arguments(sample: Sample, architecture: Architecture, device: torch.device) -> dict[str, Tensor]:
    """Return the arguments of Transformers' model for one sample."""
    arguments = {"input_ids": torch.tensor([sample.input_ids])}
    vision = architecture.vision
    if vision is not None and sample.pictures:
        given = [(each.kind, each.grid, each.seconds_per_grid, each.pixel_values(vision)) for each in sample.pictures]
        arguments |= media_arguments(np.array(sample.input_ids), given, vision)
    return {name: tensor.to(device) for name, tensor in arguments.items()}


def compute_reference(
    model: torch.nn.Module,
    samples: Sequence[Sample],
    *,
    adapter: AppliedAdapter | None = None,
    gradients: bool = True,
    loss_scale: float = 1.0,
) -> Reference:
    """Forward and backward one sample at a time, so that no padding or mask takes part.

    The gradient is left in the parameters, too, for an optimizer to step with.

    Args:
        adapter: on the model, whose gradients are asked for in place of the model's.
        loss_scale: multiplies the loss before the backward pass, and so the gradients.
    """
    device = next(model.parameters()).device
    architecture = _architecture(model)
    total = sum(label != IGNORE_INDEX for sample in samples for label in sample.labels[1:])
    logits, loss_sum = [], 0.0
    for sample in samples:
        with torch.set_grad_enabled(gradients):
            output, loss = _output_and_loss(model, sample, architecture, device)
        if loss.requires_grad:  # a row without pictures trains nothing of a frozen decoder
            (loss * (loss_scale / total)).backward()
        logits.append(output.detach().cpu())
        loss_sum += loss.item()
    if adapter is not None and gradients:
        return Reference(logits, loss_sum / total, adapter.gradients_of(architecture))
    named = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None} if gradients else {}
    return Reference(logits, loss_sum / total, _canonical_tensors(checkpoint_tensors(model, named), architecture))


def _output_and_loss(
    model: Any, sample: Sample, architecture: Architecture, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return logits [s, vocabulary] and the sum of the loss over trained tokens; of a model with scores those of
    tokens [s, labels], and the sum of their squares."""
    arguments, labels = _arguments(sample, architecture, device), torch.tensor(sample.labels[1:], device=device)
    if architecture.num_labels:
        scores = model.score(model.model(**arguments).last_hidden_state)[0]
        return scores, scores[:-1][labels != IGNORE_INDEX].float().square().sum()
    output = model(**arguments).logits[0]
    losses = torch.nn.functional.cross_entropy(output[:-1].float(), labels, reduction="sum", ignore_index=IGNORE_INDEX)
    return output, losses


def write_reference(
    model_dir: str | Path,
    samples: Sequence[Sample],
    folder: Path,
    *,
    weights_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    loss_scale: float = 1.0,
    adapters: Sequence[str] = (),
) -> None:
    """Compute the reference and what every place puts out, and write them as `numbers` says.

    Args:
        adapters: folders; all but the last are merged into the model, and of that one are the gradients.
        weights_dtype: the weights are rounded to this first.
        dtype: what is computed in.
        loss_scale: multiplies the loss; gradients are divided by it before they are written.
    """
    model, adapter = _load_rounded(model_dir, weights_dtype, dtype, adapters)
    with _tracing(model) as traced:
        reference = compute_reference(model, samples, adapter=adapter, loss_scale=loss_scale)
    folder.mkdir(parents=True, exist_ok=True)
    write_trace(folder, 0, traced)
    write_loss(folder, reference.loss)
    write_logits(folder, reference.logits)
    gradients = reference.gradients
    if loss_scale != 1:
        gradients = {name: gradient.float() / loss_scale for name, gradient in gradients.items()}
    write_gradients(folder, gradients)


@contextmanager
def _tracing(model: torch.nn.Module) -> Iterator[dict[tuple[int, str], Tensor]]:
    """Collect what every place of a model puts out of one sample after the other: [s, ...] by sample and place."""
    found: dict[tuple[int, str], Tensor] = {}
    number: Counter[str] = Counter()

    def collect(
        place: str, take: Callable[[Any, Any], Tensor], module: torch.nn.Module, args: Any, output: Any
    ) -> None:
        found[number[place], place] = take(args, output).detach().flatten(0, -2).cpu()
        number[place] += 1

    with ExitStack() as hooks:
        for place, module, take in reference_places(model):
            hooks.callback(module.register_forward_hook(partial(collect, place, take)).remove)
        yield found


def run_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """Do what the one process of the reference does: compute in `payload["dtype"]`, with weights rounded to
    `payload["weights_dtype"]`, and write into `payload["folder"]`."""
    context.beat("reference", 0)
    weights_dtype, dtype = (getattr(torch, payload[key]) for key in ("weights_dtype", "dtype"))
    # Both sides of a comparison in fp16 scale their loss.
    scale = FP16_LOSS_SCALE if weights_dtype is torch.float16 else 1.0
    write_reference(
        payload["model_dir"],
        payload["samples"],
        Path(payload["folder"]),
        weights_dtype=weights_dtype,
        dtype=dtype,
        loss_scale=scale,
        adapters=payload["adapters"],
    )
