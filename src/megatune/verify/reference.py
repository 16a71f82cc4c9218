"""Compute the reference with plain Transformers for the same tokens, independently of the engine: on a GPU if the model
fits there, otherwise on the CPU."""

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
from megatune.verify.results import write_gradients, write_logits, write_loss, write_trace
from megatune.verify.samples import FP16_LOSS_SCALE, Sample

if TYPE_CHECKING:
    from megatune.bridge.peft_model import AppliedAdapter


class Reference(NamedTuple):
    """Transformers' logits [s, vocabulary] of each sample, on the CPU, the mean loss over all trained tokens of all
    samples, and gradients by Hugging Face name. For reward models the logits are scores of tokens [s, 1],
    and the loss is the mean of their squares, since the samples are not pairs."""

    logits: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]


def load_reference_model(model_dir: str | Path, dtype: torch.dtype, *, scores: int = 0) -> torch.nn.Module:
    """Return the checkpoint as Transformers loads it, on the CPU.

    Args:
        scores: number of scores of a classifier, which overrides its config; a language model gets a random head.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    register_types()
    config = read_config(model_dir)
    # The only attention of Transformers with sinks that runs on a CPU.
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
        # It dequantizes to bf16 regardless of dtype, and would save with the names of the quantized files.
        model._weight_conversions = None
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model


def _load_rounded(
    model_dir: str | Path, weights_dtype: torch.dtype, dtype: torch.dtype, adapters: Sequence[str]
) -> tuple[torch.nn.Module, AppliedAdapter | None]:
    """Return the checkpoint with weights rounded to one dtype and computing in another, and the last adapter.

    Other adapters are merged in fp32 before weights are rounded.
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
    # `to` also rounds buffers, some of which Transformers keeps in fp32: rotary frequencies, the bias of a router.
    model = model if dtype is weights_dtype else model.to(dtype)
    if not adapters:
        return model, None
    from megatune.bridge.peft_model import apply_adapter

    applied = apply_adapter(model, Path(adapters[-1]), trained=True)
    return applied.model.eval(), applied


def checkpoint_tensors(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors of a model's parameters to the names and shapes of its checkpoint: Transformers 5 fuses all
    experts of a layer into one parameter, while checkpoints store them separately.

    Args:
        tensors: parameters or gradients, by name in `model.named_parameters()`.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors))


def _canonical_tensors(tensors: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """Convert tensors of a checkpoint to the names and shapes of the family's weight map."""
    family = FAMILIES[architecture.model_type]
    weights = family.weight_map(architecture)

    def shape_of(name: str) -> tuple[int, ...]:
        return tuple(tensors[name].shape)

    # The form that Transformers 5 saves, which decides ("not transposed") if shapes are ambiguous.
    form = find_form(family.forms, weights, architecture, tensors.keys(), shape_of, "5")
    places = form.locate_all(weights, architecture)
    return {name: _cut(tensors[place.name], place) for name, place in places.items() if place.name in tensors}


def _cut(tensor: Tensor, place: FileTensor) -> Tensor:
    if place.expert is None:
        return tensor
    matrix = tensor[place.expert].T if place.transposed else tensor[place.expert]
    return matrix[place.first_row : place.first_row + place.rows]


def _move_to_gpu(model: torch.nn.Module) -> None:
    """Move a model to the GPU, where fp32 is computed in fp32, if weights and gradients need at most 3/4 of its free
    memory."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if torch.cuda.is_available() and 2 * size <= 0.75 * torch.cuda.mem_get_info()[0]:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        model.to("cuda")


def _architecture(model: Any) -> Architecture:
    architecture, where = read_architecture(model.config.to_dict(), str(model.name_or_path)), str(model.name_or_path)
    # The config's default may contradict the files: weights that differ in them are not tied.
    tied = architecture.tie_word_embeddings and bool(model.all_tied_weights_keys)
    architecture = replace(architecture, tie_word_embeddings=tied)
    return as_trained(architecture, where, CLASSES, model.num_labels) if hasattr(model, "score") else architecture


def _arguments(sample: Sample, architecture: Architecture, device: torch.device) -> dict[str, Tensor]:
    """Return the arguments of Transformers' model for one sample."""
    arguments = {"input_ids": torch.tensor([sample.input_ids])}
    vision = architecture.vision
    if vision is not None and sample.media:
        given = [(each.kind, each.grid, each.seconds_per_grid, each.pixel_values(vision)) for each in sample.media]
        arguments |= media_arguments(np.array(sample.input_ids), given, vision)
    return {name: tensor.to(device) for name, tensor in arguments.items()}


def compute_reference(
    model: torch.nn.Module,
    samples: Sequence[Sample],
    *,
    adapter: AppliedAdapter | None = None,
    loss_scale: float = 1.0,
) -> Reference:
    """Run forward and backward one sample at a time, so that no padding or masks are involved.

    Gradients also remain in the parameters, for an optimizer.

    Args:
        adapter: return the gradients of this adapter instead of the model's.
        loss_scale: multiplies the loss before the backward pass, and so the gradients.
    """
    device = next(model.parameters()).device
    architecture = _architecture(model)
    total = sum(label != IGNORE_INDEX for sample in samples for label in sample.labels[1:])
    logits, loss_sum = [], 0.0
    for sample in samples:
        output, loss = _output_and_loss(model, sample, architecture, device)
        if loss.requires_grad:  # False for a row without images and videos if the decoder is frozen
            (loss * (loss_scale / total)).backward()
        logits.append(output.detach().cpu())
        loss_sum += loss.item()
    if adapter is not None:
        return Reference(logits, loss_sum / total, adapter.gradients_of(architecture))
    named = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    return Reference(logits, loss_sum / total, _canonical_tensors(checkpoint_tensors(model, named), architecture))


def _output_and_loss(
    model: Any, sample: Sample, architecture: Architecture, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return logits [s, vocabulary] and the sum of the loss over trained tokens; for models with a score head, scores
    of tokens [s, labels] and the sum of their squares."""
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
    """Compute the reference and the output of every place of the model, and write them in the format of `results`.

    Args:
        adapters: folders; all but the last are merged into the model, and gradients are those of the last.
        weights_dtype: weights are rounded to this dtype first.
        dtype: the dtype of computation.
        loss_scale: multiplies the loss; gradients are divided by it before they are written.
    """
    model, adapter = _load_rounded(model_dir, weights_dtype, dtype, adapters)
    _move_to_gpu(model)
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
    """Collect the outputs of every place of a model for consecutive samples: [s, ...] by sample and place."""
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
    """Entry point of the reference's process: compute in `payload["dtype"]`, with weights rounded to
    `payload["weights_dtype"]`, and write into `payload["folder"]`."""
    context.beat("reference", 0)
    weights_dtype, dtype = (getattr(torch, payload[key]) for key in ("weights_dtype", "dtype"))
    # Both sides of an fp16 comparison scale their loss.
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
