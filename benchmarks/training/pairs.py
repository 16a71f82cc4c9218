"""A step on preference pairs: random rows, and both sides of it, this project's engine and TRL's DPOTrainer.

Each side is a process that answers the words "build", "step" and "memory". TRL's trainer runs its own loop, and waits
for a word before each of its steps.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megatune.data.batches import Batch, Collator, DocumentValues
from megatune.data.rows import IGNORE_INDEX, Document
from training.case import LEARNING_RATE, Case, Engine, Failure, Measured, Ready
from training.worker import WARMUP

BETA = 0.1
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PADDING = "<pad>"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCase(Case):
    """The work of a step on pairs.

    Attributes:
        tokens: of the longest prompt and answer together; they begin at a little less than half of it.
        pairs: of a micro-batch.
        steps: that are measured; rows are drawn for a further one.
    """

    pairs: int
    steps: int

    @property
    def all_steps(self) -> int:
        """With those that are not measured."""
        return WARMUP + self.steps


@dataclass(frozen=True, slots=True)
class PairsReady(Ready):
    """As Ready.

    Attributes:
        reference_seconds: of the pass over the pairs of all steps, 0.0 without one.
    """

    reference_seconds: float


def step_pairs(case: PairCase, step: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompts, chosen and rejected answers of a step: random tokens, the same on every side."""
    generator = np.random.default_rng([step, 7])
    vocab_size, found = case.shape.architecture().vocab_size, []
    for _ in range(case.pairs * case.micro_batches):
        prompt = generator.integers(case.tokens // 8, case.tokens // 4)
        lengths = (prompt, *generator.integers(case.tokens // 4, 3 * case.tokens // 4, 2))
        found.append(tuple(generator.integers(1, vocab_size, length).tolist() for length in lengths))
    return found


def serve_pairs(pipe: Connection, case: PairCase, engine: Engine) -> None:
    """What the process of an engine does: answer words until the pipe closes."""
    try:
        if engine.side == "megatune":
            _Ours(case, engine.options).serve(pipe)
        else:
            _train_with_trl(pipe, case, **engine.options)
    except Exception as error:
        pipe.send(Failure(f"{type(error).__name__}: {error}"[:300]))
        raise


# ---------------------------------------------------------------------------------------------------------------------
# This project's engine


class _Ours:
    """The engine as the training loop calls it, with the reference computed before."""

    def __init__(self, case: PairCase, options: Mapping[str, Any]) -> None:
        from megatune.objectives.pair_losses import Shape
        from megatune.objectives.preference import Preference
        from training.ours import Megatune
        from training.timeline import Timeline

        self._case, self._packing = case, bool(options.get("packing"))
        self._engine = Megatune(case, options, Timeline(), objective=Preference({"sigmoid": 1.0}, Shape(beta=BETA)))

    def serve(self, pipe: Connection) -> None:
        steps: list[list[Batch]] = []
        while True:
            try:
                word, *details = pipe.recv()
            except EOFError:
                return
            if word == "build":
                ready, steps = self._build()
                pipe.send(ready)
            elif word == "step":
                pipe.send(self._step(details[0], steps[details[0]]))
            else:
                pipe.send(_kept_bytes())

    def _build(self) -> tuple[PairsReady, list[list[Batch]]]:
        began = time.perf_counter()
        self._engine.build()
        built = time.perf_counter()
        steps = [self._with_reference(self._batches(index)) for index in range(self._case.all_steps)]
        computed = time.perf_counter()
        warm = tuple(self._step(index, steps[index]).seconds for index in range(WARMUP))
        # As the training loop does: what was built stays, and nothing is collected within a step.
        gc.collect()
        gc.freeze()
        gc.disable()
        return PairsReady(self._engine.describe(), built - began, warm, computed - built), steps

    def _batches(self, index: int) -> list[Batch]:
        collate = Collator(self._case.pairs, self._packing, 1, 1, 0, documents_per_row=2)
        documents = []
        for prompt, *answers in step_pairs(self._case, index):
            for answer in answers:
                tokens = np.array(prompt + answer, np.int32)
                labels = np.array([IGNORE_INDEX] * len(prompt) + answer, np.int32)
                documents.append(Document(tokens, labels))
        size = 2 * self._case.pairs
        parts = [documents[first : first + size] for first in range(0, len(documents), size)]
        return [collate(part, collate.length([len(each.input_ids) for each in part])) for part in parts]

    def _with_reference(self, batches: list[Batch]) -> list[Batch]:
        from megatune.engine.layers.adapter import without_adapters
        from megatune.objectives.preference import REFERENCE
        from megatune.training.log_probs import step_log_probs

        with without_adapters(self._engine.chunks):
            found = step_log_probs(self._engine.chunks, batches)
        return [
            replace(batch, extras={**batch.extras, REFERENCE: DocumentValues(values)})
            for batch, values in zip(batches, found, strict=True)
        ]

    def _step(self, index: int, batches: list[Batch]) -> Measured:
        began = time.perf_counter()
        loss = self._engine.step(batches)
        return Measured(index, time.perf_counter() - began, {}, loss)


def _kept_bytes() -> int:
    from training.live import kept_bytes

    return kept_bytes()


# ---------------------------------------------------------------------------------------------------------------------
# TRL


def _train_with_trl(pipe: Connection, case: PairCase, precompute: bool, lora_rank: int | None = None) -> None:
    """Let TRL's trainer take its steps, each when it is told to."""
    word, *_ = pipe.recv()
    assert word == "build"
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        turns = _turns(pipe, began)
        trainer = _trainer(case, precompute, lora_rank, folder, turns)
        turns.ready(time.perf_counter(), trainer)
        try:
            trainer.train()
        except EOFError:  # whoever asked has gone
            return


def _turns(pipe: Connection, began: float) -> Any:
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        """Takes the time of each step of the trainer's loop: forward, backward, clipping and the optimizer."""

        def ready(self, now: float, trainer: Any) -> None:
            self._built, self._trainer, self._warm, self._step = now, trainer, [], 0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if self._step >= WARMUP:
                while pipe.recv()[0] == "memory":
                    pipe.send(_kept_bytes())
            self._began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self._seconds = time.perf_counter() - self._began

        def on_log(self, arguments: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" not in logs:
                return
            measured = Measured(self._step, self._seconds, {}, logs["loss"])
            self._step += 1
            if measured.index >= WARMUP:
                pipe.send(measured)
                return
            self._warm.append(self._seconds)
            if self._step == WARMUP:
                reference = self._trainer.reference_seconds
                seconds, description = self._built - began - reference, f"TRL {_version()}"
                pipe.send(PairsReady(description, seconds, tuple(self._warm), reference))

    return Turns()


def _version() -> str:
    import trl

    return trl.__version__


def _trainer(case: PairCase, precompute: bool, lora_rank: int | None, folder: str, callback: Any) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, PrinterCallback
    from trl import DPOConfig, DPOTrainer

    from training.weights import fill_adapters

    class Trainer(DPOTrainer):
        """Takes rows of tokens as they are, and the time of the reference's pass."""

        reference_seconds = 0.0

        def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
            return dataset

        def _precompute_ref_logps(self, *arguments: Any) -> Dataset:
            began = time.perf_counter()
            found = super()._precompute_ref_logps(*arguments)
            self.reference_seconds = time.perf_counter() - began
            return found

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
        config = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules=list(LINEAR))
    trainer = Trainer(
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
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    from training.weights import fill_transformers

    logging.set_verbosity_error()
    config = AutoConfig.for_model(**case.shape.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    fill_transformers(model)
    return model
