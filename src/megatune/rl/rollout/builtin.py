"""The built-in rollout engine: a Transformers model and its KV cache, with continuous batching.

A small default for CPUs; vLLM and SGLang are for large models. Sequences are padded on the left. When a sequence ends,
its row is freed, and a waiting sequence joins at the next token. Equal prompts, such as those of a group, are computed
once. Log-probabilities are returned with the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from megatune.config.rl.settings import InferRole
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.rope import context_length
from megatune.generation.inputs import find_model, has_tokenizer
from megatune.generation.options import Sampling
from megatune.generation.stopping import ends_with_stop_word, stop_ids
from megatune.generation.transformers_backend import left_padded, load_pretrained, load_tokenizer
from megatune.rl.media import model_arguments, position_shift
from megatune.rl.rollout.engine import (
    DTYPES,
    INSTRUCTION_TOKENS,
    Memory,
    RolloutEngine,
    SequenceState,
    cannot_sample,
    checkpoint_shapes,
)
from megatune.rl.rollout.kv_cache import KVCache, kv_bytes_per_token, kv_cache_budget
from megatune.rl.rollout.sampling import RoutingRecorder, never_sampled, sample, uniforms
from megatune.rl.samples import Request, Response
from megatune.rl.transport import PackedBucket, Receiver, Route

_PREFILL_TOKENS = 8192  # maximum number of prompt tokens in one pass


@dataclass(slots=True)
class _Row(SequenceState):
    """A sequence in the batch, or waiting for it.

    Attributes:
        drawn: a random number in [0, 1) for each token of the response.
        shift: offset of the positions of sampled tokens, caused by images.
        routing: chosen experts of each pass, int16 [tokens, layers, topk].
    """

    drawn: list[float] = field(default_factory=list)
    shift: int = 0
    routing: list[np.ndarray] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """Tokens of the prompt and the response so far."""
        return [*self.request.token_ids.tolist(), *self.tokens]

    @property
    def num_response_tokens(self) -> int:
        return len(self.request.response_ids) + len(self.tokens)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of the prompt and the response."""
        return len(self.request.prompt_ids) + self.request.max_new_tokens

    @property
    def key(self) -> bytes:
        """Identifies the tokens and images before the next token; sequences with the same key share a prefill."""
        images = () if self.request.images is None else self.request.images.media
        return np.array(self.ids).tobytes() + b"".join(blake2b(each.packed).digest() for each in images)


class BuiltinEngine(RolloutEngine):
    """See `RolloutEngine`.

    Args:
        model: a causal language model, or one that reads images.
        tokenizer: for stop strings; None if no request has any.
        shapes: shapes of the checkpoint's tensors.
        max_running: maximum number of sequences in the batch; others wait.
        cache_bytes: maximum size of the KV cache; at least one sequence is always admitted.
        return_routing: return the chosen experts with the responses.

    Raises:
        MegatuneError: INPUT, if there are no experts to return, or layers keep other states than keys and values.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        shapes: dict[str, tuple[int, ...]],
        *,
        max_running: int,
        cache_bytes: int,
        return_routing: bool = False,
    ) -> None:
        super().__init__(shapes, has_weights=True)
        self._model, self._tokenizer, self._max_running = model.eval(), tokenizer, max_running
        self._token_bytes, self._cache_bytes = kv_bytes_per_token(model), cache_bytes
        self._device = model.device
        self._stops = stop_ids(model.generation_config)
        self._never = never_sampled(model, tokenizer).to(self._device)
        self._recorder = RoutingRecorder(model) if return_routing else None
        self._receiver = Receiver(Route("file"), 0, self._device)
        self._arrived: dict[str, Tensor] = {}
        self._sleeping = False
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._cache = KVCache(self._device)  # of self._rows

    @classmethod
    def load(cls, role: InferRole, *, max_running: int, context: int) -> BuiltinEngine:
        """Load the model onto this machine's device; see `load_engine`."""
        folder = find_model(Path(role.model_name_or_path))
        model = load_pretrained(folder, DTYPES[role.dtype], experts_implementation="eager")
        _check_context(model, context, folder, role)
        tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
        room, returns = kv_cache_budget(model.device), role.return_routing
        shapes = checkpoint_shapes(folder)
        return cls(model, tokenizer, shapes, max_running=max_running, cache_bytes=room, return_routing=returns)

    def _start(self, request: Request) -> SequenceState:
        drawn = uniforms(request.seed, request.max_new_tokens).tolist()
        shift = position_shift(request.token_ids, request.images)
        self._waiting.append(_Row(request, self.version, drawn=drawn, shift=shift))
        return self._waiting[-1]

    @torch.inference_mode()
    def _advance(self) -> None:
        """Sample one token for every sequence, including those that join."""
        logits = [self._next_logits()] if self._rows else []
        logits += [self._prompt_logits(batch) for batch in self._joining()]
        rows = self._rows
        drawn = [each.drawn[each.num_response_tokens] for each in rows]
        seen = [each.ids if each.request.repetition_penalty != 1 else () for each in rows]
        tokens, log_probs = sample(torch.cat(logits), [each.request for each in rows], drawn, seen, self._never)
        for row, token, log_prob in zip(rows, tokens.tolist(), log_probs.tolist(), strict=True):
            row.tokens.append(token)
            row.log_probs.append(log_prob)
        self._remove({index: end for index, row in enumerate(rows) if (end := self._finish_reason(row)) is not None})

    def _joining(self) -> list[list[_Row]]:
        """Admit waiting sequences for which there is room, in batches for one prefill each."""
        joining: list[_Row] = []
        starts: set[bytes] = set()
        longest = max((each.max_tokens for each in self._rows), default=0)
        while self._waiting and (count := len(self._rows) + len(joining)) < self._max_running:
            row = self._waiting[0]
            longest, tokens = max(longest, row.max_tokens), (len(starts) + 1) * len(row.ids)
            too_large = (count + 1) * longest * self._token_bytes > self._cache_bytes
            if (count and too_large) or (starts and row.key not in starts and tokens > _PREFILL_TOKENS):
                break
            starts.add(row.key)
            joining.append(self._waiting.popleft())
        with_images = [each for each in joining if each.request.images is not None]
        together = [each for each in joining if each.request.images is None]
        return [*([together] if together else []), *([each] for each in with_images)]

    def _prompt_logits(self, batch: list[_Row]) -> Tensor:
        """Prefill new sequences, add them to the cache, and return the logits [rows, v] of their next tokens."""
        keys = [each.key for each in batch]
        firsts = dict(zip(keys, batch, strict=True))
        number = {key: index for index, key in enumerate(firsts)}
        padded, mask = (each.to(self._device) for each in left_padded([each.ids for each in firsts.values()]))
        given: dict[str, Tensor] = {"position_ids": (mask.cumsum(-1) - 1).clamp_(min=0)}
        if (images := batch[0].request.images) is not None:  # the batch has one sequence
            arguments = model_arguments(np.array(batch[0].ids), images)
            given |= {name: each.to(self._device) for name, each in arguments.items()}
        cache = DynamicCache()
        logits = self._forward(padded, mask, cache, **given)
        chosen = torch.tensor([number[key] for key in keys], device=self._device)
        self._record(batch, [len(each.ids) for each in batch], chosen.tolist())
        self._rows += batch
        cache.batch_select_indices(chosen)
        self._cache.add(cache, mask[chosen])
        return logits[chosen]

    def _next_logits(self) -> Tensor:
        """Decode: compute the last token of each sequence, and return the logits [rows, v] of the next."""
        shifts = torch.tensor([each.shift for each in self._rows], device=self._device)
        last = torch.tensor([each.tokens[-1:] for each in self._rows], device=self._device)
        positions = (self._cache.begin_token() + shifts)[:, None]
        logits = self._forward(last, self._cache.mask, self._cache.past, position_ids=positions)
        self._record(self._rows, [1] * len(self._rows), range(len(self._rows)))
        return logits

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache, **given: Tensor) -> Tensor:
        """Run the model on int64 ids [rows, tokens]; return logits [rows, v] of the last column."""
        found: Any = self._model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1, **given
        )
        logits: Tensor = found.logits[:, -1]
        return logits

    def _record(self, rows: Sequence[_Row], lengths: Sequence[int], places: Sequence[int]) -> None:
        """Store the experts of the last pass for each sequence: its row in the pass, and its number of tokens there."""
        if self._recorder is not None:
            experts = self._recorder.take(max(places) + 1)
            for row, length, place in zip(rows, lengths, places, strict=True):
                row.routing.append(experts[place, -length:])

    def _finish_reason(self, row: _Row) -> Literal["stop", "length"] | None:
        """Return why a response ends with its last token; None if it continues."""
        request = row.request
        if row.tokens[-1] in (request.stop_token_ids or self._stops):
            return "stop"
        if request.stop_strings and self._tokenizer is not None:
            words = Sampling(stop_words=[*request.stop_strings])
            if ends_with_stop_word(self._tokenizer, [*request.response_ids.tolist(), *row.tokens], words):
                return "stop"
        return "length" if row.num_response_tokens >= request.max_new_tokens else None

    def _remove(self, ended: dict[int, Literal["stop", "length"]]) -> None:
        """Remove finished sequences from the batch and the cache."""
        if not ended:
            return
        for index, finish in ended.items():
            del self._sampled[self._rows[index].request.id]
            self._finished.append(_response(self._rows[index], finish))
        left = [index for index in range(len(self._rows)) if index not in ended]
        self._rows = [self._rows[index] for index in left]
        self._cache.keep(left)

    def abort(self) -> list[Response]:
        """Abort all requests; see `RolloutEngine.abort`."""
        ended = [_response(each, "abort") for each in [*self._rows, *self._waiting]]
        self._waiting.clear()
        self._rows = []
        self._sampled.clear()
        self._cache.clear()
        return ended

    def connect(self, route: Route, first: int) -> None:
        """Connect with the trainer; see `RolloutEngine.connect`."""
        self._receiver = Receiver(route, first, self._device)

    def _take(self, bucket: PackedBucket, names: Sequence[str]) -> None:
        with self._receiver.opened(bucket) as tensors:
            dtype = self._model.dtype
            self._arrived |= {name: tensors[name].to(self._device, dtype, copy=True) for name in names}

    def _finish(self, version: int, *, whole: bool) -> None:
        """Load the received tensors as a checkpoint: Transformers has different names and shapes for some of them."""
        arrived, self._arrived = self._arrived, {}
        if whole:
            old = self._model
            model: Any = type(old).from_pretrained(
                None, config=old.config, state_dict=arrived, dtype=old.dtype, experts_implementation="eager"
            )
            self._model = model.to(self._device).eval()
            self._recorder = RoutingRecorder(self._model) if self._recorder is not None else None

    def _free(self, level: int) -> None:
        self._sleeping = True
        self._cache.clear()
        if level > 1:
            self._model.to("meta")
        torch.cuda.empty_cache()  # for other processes

    def wake(self, *parts: Memory) -> None:
        """Wake up; see `RolloutEngine.wake`. Weights come with the next update, the cache grows with requests."""
        self._sleeping = self._sleeping and bool(parts) and "cache" not in parts

    def _check_ready(self) -> None:
        if self._sleeping:
            raise cannot_sample("it sleeps")
        super()._check_ready()


def _response(row: _Row, finish: Literal["stop", "length", "abort"]) -> Response:
    return row.response(finish, experts=np.concatenate(row.routing) if row.routing else None)


def _check_context(model: PreTrainedModel, context: int, folder: Path, role: InferRole) -> None:
    limit = longest = context_length(model.config.to_dict())
    if limit is None or context <= limit:
        return
    what, more = f"prompts and responses of {context} tokens do not fit the model", ""
    if role.name != "actor_infer":  # a judge also reads its instructions, and writes an answer
        what += f" of {role.name}"
        more = f", a smaller max_new_tokens of {role.name}, or a model with a longer context"
        limit -= INSTRUCTION_TOKENS + role.generating_args.max_tokens
    fix = f"prompt_length and response_length of {limit} together at most{more}" if limit > 0 else more[2:]
    why = f"its context is {longest} tokens"
    raise MegatuneError(Finding(what, str(folder), why, fix), ExitCode.INPUT)
