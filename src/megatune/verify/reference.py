"""What plain Transformers computes for the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of tokens: labels[t] belongs to input_ids[t] as in Transformers, -100 where it is not trained."""

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(slots=True)
class Reference:
    """Transformers' numbers.

    Attributes:
        logits: [s, vocabulary] of each sample.
        loss: mean over all trained tokens of all samples.
        gradients: by Hugging Face name; empty where none were asked for.
    """

    logits: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]


def load_reference_model(model_dir: str | Path, dtype: torch.dtype) -> torch.nn.Module:
    """The checkpoint as Transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="sdpa").eval()


def compute_reference(model: torch.nn.Module, samples: Sequence[Sample], *, gradients: bool = True) -> Reference:
    """Forward and backward one sample at a time, so that no padding or mask takes part.

    The gradient is left in the parameters, too, for an optimizer to step with.
    """
    device = next(model.parameters()).device
    total = sum(label != -100 for sample in samples for label in sample.labels[1:])
    logits, loss_sum = [], 0.0
    for sample in samples:
        with torch.set_grad_enabled(gradients):
            output = model(input_ids=torch.tensor([sample.input_ids], device=device)).logits[0]
            labels = torch.tensor(sample.labels[1:], device=device)
            loss = torch.nn.functional.cross_entropy(output[:-1].float(), labels, reduction="sum", ignore_index=-100)
        if gradients:
            (loss / total).backward()
        logits.append(output.detach())
        loss_sum += loss.item()
    named = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None} if gradients else {}
    return Reference(logits, loss_sum / total, named)
