"""TRL's side of a step on preference pairs: its trainer runs its own loop, and waits for a word before each step."""

from __future__ import annotations

import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from transformers.utils import logging
from trl import DPOConfig, DPOTrainer

from training.case import LEARNING_RATE, Measured
from training.live import kept_bytes
from training.pairs import BETA, PairCase, PairsReady, step_pairs
from training.weights import fill_adapters, fill_transformers
from training.worker import WARMUP

_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PADDING = "<pad>"


def train_with_trl(pipe: Connection, case: PairCase, precompute: bool, lora_rank: int | None = None) -> None:
    """Let TRL's trainer take its steps, each when it is told to."""
    word, *_ = pipe.recv()
    assert word == "build"
    turns = _Turns(pipe)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(case, precompute, lora_rank, folder, turns)
        turns.built(trainer)
        try:
            trainer.train()
        except EOFError:  # whoever asked has gone
            return


class _Trainer(DPOTrainer):
    """Takes rows of tokens as they are, and the time of the reference's pass."""

    reference_seconds = 0.0

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset

    def _precompute_ref_logps(self, *arguments: Any) -> Dataset:
        began = time.perf_counter()
        found = super()._precompute_ref_logps(*arguments)
        self.reference_seconds = time.perf_counter() - began
        return found


class _Turns(TrainerCallback):
    """Takes the time of each step of the trainer's loop: forward, backward, clipping and the optimizer."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._step, self._warm = pipe, 0, []
        self._began = self._seconds = time.perf_counter()

    def built(self, trainer: _Trainer) -> None:
        """The trainer is there, since this was made."""
        self._trainer, self._build_seconds = trainer, time.perf_counter() - self._began - trainer.reference_seconds

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._step >= WARMUP:
            while self._pipe.recv()[0] == "memory":
                self._pipe.send(kept_bytes())
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._seconds = time.perf_counter() - self._began

    def on_log(self, arguments: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" not in logs:  # of the whole run
            return
        if self._step >= WARMUP:
            self._pipe.send(Measured(self._step, self._seconds, {}, logs["loss"]))
        else:
            self._warm.append(self._seconds)
        self._step += 1
        if self._step == WARMUP:
            warm, reference = tuple(self._warm), self._trainer.reference_seconds
            self._pipe.send(PairsReady(f"TRL {trl.__version__}", self._build_seconds, warm, reference))


def _trainer(case: PairCase, precompute: bool, lora_rank: int | None, folder: str, callback: _Turns) -> _Trainer:
    arguments = DPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=None, report_to=[],
        save_strategy="no", logging_steps=1, disable_tqdm=True, max_steps=case.all_steps + 1,
        train_sampling_strategy="sequential", lr_scheduler_type="constant", learning_rate=LEARNING_RATE,
        per_device_train_batch_size=case.pairs, gradient_accumulation_steps=case.micro_batches, max_grad_norm=1.0,
        beta=BETA, precompute_ref_log_probs=precompute,
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({_PADDING: 0}, _PADDING)))
    tokenizer.pad_token = tokenizer.eos_token = _PADDING
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = [dict(zip(names, row, strict=True)) for i in range(case.all_steps) for row in step_pairs(case, i)]
    config = None
    if lora_rank is not None:
        config = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules=list(_LINEAR))
    trainer = _Trainer(
        _model(case),
        None if precompute or config is not None else _model(case),
        arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=config,
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)
    if config is not None:
        fill_adapters(trainer.model.get_base_model())
    return trainer


def _model(case: PairCase) -> Any:
    logging.set_verbosity_error()
    config = AutoConfig.for_model(**case.shape.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    fill_transformers(model)
    return model
