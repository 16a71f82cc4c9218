"""A step on preference pairs: random rows, and this project's side of it; TRL's is in `their_pairs`.

Each side is a process that answers the words "build", "step" and "memory".
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megatune.data.batches import Batch, Collator, DocumentValues
from megatune.data.rows import IGNORE_INDEX, Document
from training.case import Case, Engine, Failure, Measured, Ready
from training.worker import WARMUP

BETA = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCase(Case):
    """The work of a step on pairs.

    Attributes:
        tokens: that a prompt and its answer have at most; the fewest are three eighths of it.
        pairs: of a micro-batch.
        steps: that are measured.
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
            from training.their_pairs import train_with_trl

            train_with_trl(pipe, case, **engine.options)
    except Exception as error:
        pipe.send(Failure(f"{type(error).__name__}: {error}"[:300]))
        raise


class _Ours:
    """The engine as the training loop calls it, with the reference computed before."""

    def __init__(self, case: PairCase, options: Mapping[str, Any]) -> None:
        from megatune.objectives.pair_losses import PairLossOptions
        from megatune.objectives.preference import Preference
        from training.ours import Megatune
        from training.timeline import Timeline

        self._case, self._packing = case, bool(options.get("packing"))
        self._engine = Megatune(
            case, options, Timeline(), objective=Preference({"sigmoid": 1.0}, PairLossOptions(beta=BETA))
        )

    def serve(self, pipe: Connection) -> None:
        from training.live import kept_bytes

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
                pipe.send(kept_bytes())

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
        from megatune.training.reference import step_log_probs

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
