"""What plain Transformers computes for the same tokens. Knows nothing of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatune.launch.context import RankContext
from megatune.objectives.language_model import IGNORED
from megatune.verify.numbers import write_gradients, write_logits, write_loss
from megatune.verify.samples import Sample


@dataclass(slots=True)
class Reference:
    """Transformers' numbers.

    Attributes:
        logits: [s, vocabulary] of each sample, on the CPU.
        loss: mean over all trained tokens of all samples.
        gradients: by Hugging Face name; empty where none were asked for.
    """

    logits: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]


def load_reference_model(model_dir: str | Path, dtype: torch.dtype) -> torch.nn.Module:
    """The checkpoint as Transformers loads it, on the CPU."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="sdpa").eval()


def compute_reference(
    model: torch.nn.Module, samples: Sequence[Sample], *, gradients: bool = True, loss_scale: float = 1.0
) -> Reference:
    """Forward and backward one sample at a time, so that no padding or mask takes part.

    The gradient is left in the parameters, too, for an optimizer to step with.

    Args:
        loss_scale: multiplies the loss before the backward pass, and so the gradients.
    """
    device = next(model.parameters()).device
    total = sum(label != IGNORED for sample in samples for label in sample.labels[1:])
    logits, loss_sum = [], 0.0
    for sample in samples:
        with torch.set_grad_enabled(gradients):
            output = model(input_ids=torch.tensor([sample.input_ids], device=device)).logits[0]
            labels = torch.tensor(sample.labels[1:], device=device)
            loss = torch.nn.functional.cross_entropy(output[:-1].float(), labels, reduction="sum", ignore_index=IGNORED)
        if gradients:
            (loss * (loss_scale / total)).backward()
        logits.append(output.detach().cpu())
        loss_sum += loss.item()
    named = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None} if gradients else {}
    return Reference(logits, loss_sum / total, named)


def write_reference(
    model_dir: str | Path,
    samples: Sequence[Sample],
    folder: Path,
    *,
    weights_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    loss_scale: float = 1.0,
) -> None:
    """Compute the reference and write it as `numbers` says.

    Args:
        weights_dtype: the weights are rounded to this first.
        dtype: what is computed in.
    """
    model = load_reference_model(model_dir, weights_dtype).to(dtype)
    reference = compute_reference(model, samples, loss_scale=loss_scale)
    folder.mkdir(parents=True, exist_ok=True)
    write_loss(folder, reference.loss)
    write_logits(folder, reference.logits)
    write_gradients(folder, reference.gradients)


def run_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """What the one process of the reference does: write `payload["folders"]`, each with arguments of its own."""
    for folder, dtypes in payload["folders"].items():
        context.beat("reference", 0)
        write_reference(
            payload["model_dir"],
            payload["samples"],
            Path(folder),
            loss_scale=payload["loss_scale"],
            **{key: getattr(torch, dtype) for key, dtype in dtypes.items()},
        )
