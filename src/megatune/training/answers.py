"""Generates answers during training with the current weights on all ranks, in any layout.

Decoding is greedy and has no KV cache: each new token costs one forward pass over all unfinished rows. Tokens are
all-reduced, so that every rank has every answer and all ranks distribute the unfinished rows alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from megatune.config.settings import Settings
from megatune.config.values import counted
from megatune.data.batches import Collator, MediaShard
from megatune.data.prompts import AnswerPrompt, prompts_of_file, prompts_of_rows
from megatune.data.rows import IGNORE_INDEX, Document, TokenRows
from megatune.data.text_scores import Scored, is_equal, missing_libraries, text_scores
from megatune.data.tokenizer_files import stop_tokens
from megatune.engine import device, groups
from megatune.engine.groups import RankCoordinates
from megatune.engine.model import Chunk
from megatune.engine.step import eval_mode, greedy_tokens
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.training.agreement import on_rank_0
from megatune.training.callbacks.base import Generated
from megatune.training.loaders import Loaders


@dataclass(slots=True)
class _Row:
    """A prompt and the tokens generated so far."""

    prompt: AnswerPrompt
    ids: list[int] = field(default_factory=list)
    stopped: bool = False

    @property
    def document(self) -> Document:
        """The tokens, followed by a placeholder for the next one, which is the only label."""
        tokens = np.concatenate((self.prompt.token_ids, np.array([*self.ids, 0], np.int32)))
        labels = np.full(len(tokens), IGNORE_INDEX, np.int32)
        labels[-1] = 0
        return Document(tokens, labels, self.prompt.media)


@dataclass(frozen=True, slots=True)
class Answerer:
    """Generates the answers of a run.

    Attributes:
        shard: the images and videos that this rank decodes.
        stops: tokens that end an answer.
        most: the maximum number of tokens of an answer.
    """

    prompts: Sequence[AnswerPrompt]
    tokenizer: PreTrainedTokenizerBase
    collator: Collator
    coords: RankCoordinates
    shard: MediaShard | None
    stops: tuple[int, ...]
    most: int

    @classmethod
    def open(
        cls,
        settings: Settings,
        source: Path,
        tokenizer: PreTrainedTokenizerBase,
        held_out: TokenRows | None,
        loaders: Loaders,
        context: int,
    ) -> Answerer:
        """Read the prompts. Collective.

        Args:
            source: the folder of the model.
            held_out: evaluation rows, whose prompts are used if no file has prompts.
            context: the maximum number of tokens of a prompt and its answer.

        Raises:
            MegatuneError: a file of prompts cannot be used, see `prompts_of_file`; there is no prompt (DATA).
        """
        evaluation, file = settings.evaluation, settings.evaluation.eval_generate_prompts
        count = evaluation.eval_generate_samples
        if file is not None:
            prompts = on_rank_0(lambda: prompts_of_file(settings, file, count, tokenizer, loaders.vision))
        else:
            assert held_out is not None, "refused by the settings' rules"
            prompts = prompts_of_rows(held_out, count)
        if not (prompts := [each for each in prompts if len(each.token_ids) < context]):
            what, why = "there is no prompt to answer", f"held-out rows have none of fewer than {context} tokens"
            fix = "raise val_size, or name questions: eval_generate_prompts: FILE"
            raise MegatuneError(Finding(what, why=why, fix=fix), ExitCode.DATA)
        stops, parallel = stop_tokens(source, tokenizer.eos_token_id), settings.parallel
        collator = Collator(
            micro_batch_size=settings.batch.per_device_eval_batch_size,
            packed=False,
            sequence_multiple=parallel.sequence_multiple,
            document_multiple=parallel.document_multiple,
            pad_token_id=loaders.pad_token_id,
            vision=loaders.vision,
        )
        longest = max(len(each.token_ids) for each in prompts)
        most = min(evaluation.eval_generate_tokens, context - longest)
        return cls(prompts, tokenizer, collator, loaders.coords, loaders.shard, stops, most)

    @property
    def line(self) -> str:
        """The line on answers that is printed at the start."""
        prompts, tokens = counted(len(self.prompts), "prompt"), counted(self.most, "token")
        return f"answers: {prompts}, up to {tokens} each; each token takes a forward pass over whole rows"

    def left_out(self) -> list[str]:
        """Return a warning if scores cannot be computed."""
        fix = "pip install 'megatune[evaluate]'"
        missing = " and ".join(missing_libraries())
        return [f"answers are not compared by ROUGE and BLEU: {missing} not installed; {fix}"] if missing else []

    def write(self, model: list[Chunk], beat: Callable[[int], None]) -> list[list[int]]:
        """Return the tokens of every answer, including its stop token, on every rank. Collective.

        Args:
            model: run in eval mode.
            beat: called before each token, with its number.
        """
        rows = [_Row(prompt) for prompt in self.prompts]
        with eval_mode(model):
            for number in range(self.most):
                beat(number)
                if not (left := [row for row in rows if not row.stopped]):
                    break
                for row, token in zip(left, self._next_tokens(model, left), strict=True):
                    row.ids.append(token)
                    row.stopped = token in self.stops
        return [row.ids for row in rows]

    def _next_tokens(self, model: list[Chunk], rows: Sequence[_Row]) -> list[int]:
        """Return the most probable next token of every row, on every rank."""
        coords, size = self.coords, self.collator.micro_batch_size
        found = torch.zeros(len(rows), dtype=torch.int64, device=device.current())
        # Tensor- and context-parallel ranks of the last stage hold the same tokens.
        keeps = coords.is_last_stage and coords.tp_rank == coords.cp_rank == 0
        at_once = size * coords.pp_size * coords.dp_size
        for start in range(0, len(rows), at_once):
            numbers = range(start, min(start + at_once, len(rows)))
            documents = [rows[number].document for number in numbers]
            length = self.collator.length([len(each.input_ids) for each in documents])
            mine = numbers[coords.dp_rank :: coords.dp_size]
            parts = [mine[part * size : (part + 1) * size] for part in range(coords.pp_size)]
            batches = [
                self.collator([documents[number - start] for number in part], length, shard=self.shard)
                for part in parts
            ]
            for part, tokens in zip(parts, greedy_tokens(model, batches), strict=False):
                if keeps and part:
                    ends = [len(documents[number - start].input_ids) - 2 for number in part]
                    found[part.start : part.stop : part.step] = tokens[range(len(part)), ends]
        groups.all_reduce(found)
        return [int(token) for token in found.tolist()]

    def report(self, step: int, answers: Sequence[Sequence[int]]) -> Generated:
        """Decode the answers, and score them."""
        rows, scored = [], []
        for number, (prompt, ids) in enumerate(zip(self.prompts, answers, strict=True)):
            text = self._text(ids)
            label = None if prompt.label_ids is None else self._text(prompt.label_ids.tolist())
            if label is not None:
                scored.append(Scored(text, label))
            rows.append({
                "step": step, "id": number, "where": prompt.where,
                "prompt": self.tokenizer.decode(prompt.token_ids.tolist()), "response": text, "label": label,
                "score": None if label is None else float(is_equal(text, label)), "tokens": len(ids),
                "finish": "stop" if ids and ids[-1] in self.stops else "length",
            })  # fmt: skip
        mean = sum(map(len, answers)) / max(1, len(answers))
        return Generated(step=step, rows=rows, scores={"answer_tokens": mean, **text_scores(scored)})

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()
