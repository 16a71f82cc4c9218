"""Transformers' side of a step: its model and loss, and the loop and AdamW of its Trainer.

Precisions of a bf16 step:

- masters: weights and gradients in bf16, fp32 master weights and AdamW state, as DeepSpeed does under the Trainer. The
  state is what megatune keeps but for the gradients, which megatune adds up in fp32. It is what ratios are against.
- autocast: weights and gradients in fp32, matrix products in bf16 by torch.autocast: the Trainer's `bf16=True` on an
  fp32 model. As exact as megatune; slower than masters, since norms and residuals are computed in fp32, too.
- pure: everything in bf16, AdamW's state, too. Fastest and smallest, but small updates are lost in rounding: no fair
  comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Literal

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import is_flash_attn_2_available, logging

from megatune.data.batches import Batch
from training.case import LEARNING_RATE, Case
from training.rows import transformers_inputs
from training.timeline import ON_GPU, Timeline
from training.weights import fill_adapters, fill_transformers

_DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


class Masters:
    """AdamW over fp32 copies of 16-bit weights."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._masters = [parameter.detach().float() for parameter in self._parameters]
        self._adam = _adam(self._masters)

    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        clip_grad_norm_(self._masters, 1.0, foreach=True)
        self._adam.step()
        self._adam.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._masters)


class InPlace:
    """AdamW over the weights themselves."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._adam = _adam(self._parameters)

    def step(self) -> None:
        clip_grad_norm_(self._parameters, 1.0, foreach=True)
        self._adam.step()
        self._adam.zero_grad()


def _adam(parameters: list[torch.Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)


class Transformers:
    """A causal language model of Transformers in training.

    Args:
        precision: of a bf16 case; see above.
        attention: its attn_implementation; None takes flash_attention_2 where it is installed, and sdpa elsewhere.
        experts: its experts_implementation; None takes its own choice.
        liger: with Liger's kernels.
        lora_rank: train peft's adapters of this rank, of every linear layer but the last; None trains everything.
    """

    def __init__(
        self,
        case: Case,
        timeline: Timeline,
        *,
        precision: Literal["masters", "autocast", "pure"] = "masters",
        attention: str | None = None,
        experts: str | None = None,
        liger: bool = False,
        lora_rank: int | None = None,
    ) -> None:
        self._case, self._timeline, self._liger = case, timeline, liger
        self._precision = precision if case.bf16 else "fp32"
        self._attention = attention or ("flash_attention_2" if ON_GPU and is_flash_attn_2_available() else "sdpa")
        self._experts, self._lora_rank = experts, lora_rank
        logging.set_verbosity_error()

    def build(self) -> None:
        """Model, weights and optimizer."""
        config = AutoConfig.for_model(**self._case.shape.config)
        dtype = torch.bfloat16 if self._precision in ("masters", "pure") else torch.float32
        chosen = {"experts_implementation": self._experts} if self._experts else {}
        kind_of_model = AutoModelForImageTextToText if self._case.images else AutoModelForCausalLM
        with torch.device(_DEVICE):
            self._model = kind_of_model.from_config(config, dtype=dtype, attn_implementation=self._attention, **chosen)
        fill_transformers(self._model)
        self._model.train()
        if self._case.recompute:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
        if self._liger:
            from transformers.integrations.liger import apply_liger_kernel

            apply_liger_kernel(self._model, None)
        kind = Masters if self._precision == "masters" else InPlace
        if self._lora_rank is not None:
            self._add_adapters(self._lora_rank)
        self._optimizer = kind(parameter for parameter in self._model.parameters() if parameter.requires_grad)

    def _add_adapters(self, rank: int) -> None:
        from peft import LoraConfig, get_peft_model

        linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        get_peft_model(self._model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear))
        fill_adapters(self._model)

    @property
    def module(self) -> torch.nn.Module:
        """The model, for timing its parts."""
        return self._model

    def describe(self) -> str:
        """What computes it."""
        words = [f"attention: {self._model.config._attn_implementation}", f"numbers: {self._precision}"]
        if "num_experts" in self._case.shape.config:
            experts = "Liger's" if self._liger else self._model.config._experts_implementation
            words.append(f"experts: {experts}")
        words += [f"peft's adapters of rank {self._lora_rank}"] if self._lora_rank is not None else []
        return "; ".join(words + ["Liger's kernels"] * self._liger)

    def step(self, batches: list[Batch]) -> float:
        """A training step; the loss is its mean over the trained tokens."""
        num_trained = sum(batch.num_trained for batch in batches)
        autocast = self._precision == "autocast"
        total = torch.zeros((), device=_DEVICE)
        for batch in batches:
            self._timeline.mark("forward")
            inputs = transformers_inputs(batch, _DEVICE)
            with torch.autocast(_DEVICE.type, torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = self._model(**inputs, num_items_in_batch=num_trained, use_cache=False).loss
            self._timeline.mark("backward")
            loss.backward()
            total += loss.detach()
        self._timeline.mark("optimizer")
        self._optimizer.step()
        return float(total)

    def close(self) -> None:
        """Nothing is left open."""
