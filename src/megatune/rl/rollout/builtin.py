"""The built-in rollout engine: a Transformers model and its KV cache, with continuous batching.

A small default for CPUs; vLLM and SGLang are for large models. Sequences are padded on the left. When a sequence ends,
its row is freed, and a waiting sequence joins at the next token. Equal prompts, such as those of a group, are computed
once. Log-probabilities are returned with the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatune.config.rl.settings import InferRole
from megatune.generation.inputs import find_model, has_tokenizer
from megatune.generation.options import Sampling
from megatune.generation.stopping import ends_with_stop_word, stop_ids
from megatune.generation.transformers_backend import left_padded, load_pretrained, load_tokenizer
from megatune.rl.media import model_arguments, position_shift
from megatune.rl.rollout.checks import check_context
from megatune.rl.rollout.engine import DTYPES, Memory, RolloutEngine, SequenceState, checkpoint_shapes
from megatune.rl.rollout.kv_cache import KVCache, kv_bytes_per_token, kv_cache_budget
from megatune.rl.rollout.sampling import RoutingRecorder, never_sampled, sample, uniforms
from megatune.rl.samples import Request, Response
from megatune.rl.transport import PackedBucket, Receiver, Route

_PREFILL_TOKENS = 8192  # maximum number of prompt tokens in one pass


@dataclass(slots=True, kw_only=True)
class _Row(SequenceState):
    """A sequence in the batch, or waiting for it.

    Attributes:
        key: identifies the tokens and images before the first sampled token; equal keys share a prefill.
        drawn: a random number in [0, 1) for each token of the response, fp64.
        shift: offset of the positions of sampled tokens, caused by images.
        routing: chosen experts of each pass, int16 [tokens, layers, topk].
    """

    key: bytes
    drawn: np.ndarray
    shift: int
    routing: list[np.ndarray] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """Tokens of the prompt and the response so far."""
        return [*self.request.token_ids.tolist(), *self.tokens]

    @property
    def num_response_tokens(self) -> int:
        return len(self.request.response_ids) + len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + self.num_response_tokens


class BuiltinEngine(RolloutEngine):
    """Loads the model of a role onto this machine's device; see `RolloutEngine`.

    Args:
        max_running: maximum number of sequences in the batch; others wait.
        context: maximum number of tokens of a prompt and its response.

    Raises:
        MegatuneError: INPUT, if the model cannot be loaded, has a shorter context, has no experts to return, or layers
            keep other states than keys and values.
    """

    def __init__(self, role: InferRole, *, max_running: int, context: int) -> None:
        folder = find_model(Path(role.model_name_or_path))
        super().__init__(checkpoint_shapes(folder), has_weights=True)
        model = self._model = load_pretrained(folder, DTYPES[role.dtype], experts_implementation="eager").eval()
        check_context(model.config.to_dict(), context, role)
        self._tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None  # for stop strings
        self._device, self._max_running = model.device, max_running
        # At least one sequence is always admitted.
        self._token_bytes, self._cache_bytes = kv_bytes_per_token(model), kv_cache_budget(model.device)
        self._stops = stop_ids(model.generation_config)
        self._never = never_sampled(model, self._tokenizer).to(self._device)
        self._recorder = RoutingRecorder(model) if role.return_routing else None
        self._receiver = Receiver(Route("file"), 0, self._device)
        self._arrived: dict[str, Tensor] = {}
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._cache = KVCache()  # of self._rows

    def _start(self, request: Request) -> SequenceState:
        images = () if request.images is None else request.images.media
        row = _Row(
            request,
            self.version,
            key=request.token_ids.tobytes() + b"".join(blake2b(each.packed).digest() for each in images),
            drawn=uniforms(request.seed, request.max_new_tokens),
            shift=position_shift(request.token_ids, request.images),
        )
        self._waiting.append(row)
        return row

    @torch.inference_mode()
    def _advance(self) -> None:
        """Sample one token for every sequence, including those that join."""
        logits = [self._decode()] if self._rows else []
        logits += [self._prefill(batch) for batch in self._joining()]
        rows = self._rows
        drawn = [each.drawn[each.num_response_tokens] for each in rows]
        seen = [each.ids if each.request.repetition_penalty != 1 else () for each in rows]
        tokens, log_probs = sample(torch.cat(logits), [each.request for each in rows], drawn, seen, self._never)
        for row, token, log_prob in zip(rows, tokens.tolist(), log_probs.tolist(), strict=True):
            row.tokens.append(token)
            row.log_probs.append(log_prob)
        self._remove_finished()

    def _joining(self) -> list[list[_Row]]:
        """Admit waiting sequences for which there is room, in batches for one prefill each."""
        joining: list[_Row] = []
        starts: set[bytes] = set()
        longest = max((each.request.max_tokens for each in self._rows), default=0)
        while self._waiting and (count := len(self._rows) + len(joining)) < self._max_running:
            row = self._waiting[0]
            longest, tokens = max(longest, row.request.max_tokens), (len(starts) + 1) * row.num_tokens
            too_large = (count + 1) * longest * self._token_bytes > self._cache_bytes
            if (count and too_large) or (starts and row.key not in starts and tokens > _PREFILL_TOKENS):
                break
            starts.add(row.key)
            joining.append(self._waiting.popleft())
        batches: dict[bytes, list[_Row]] = {}
        for row in joining:  # prompts with images are computed one at a time
            batches.setdefault(b"" if row.request.images is None else row.key, []).append(row)
        return [*batches.values()]

    def _prefill(self, batch: list[_Row]) -> Tensor:
        """Compute the prompts of new sequences, add them to the batch, and return the logits [rows, v] of their next
        tokens."""
        firsts = {each.key: each for each in batch}
        place = {key: index for index, key in enumerate(firsts)}
        places = [place[each.key] for each in batch]
        ids, _ = left_padded([each.ids for each in firsts.values()])
        images = batch[0].request.images  # of all sequences
        given = {} if images is None else model_arguments(np.array(batch[0].ids), images)
        cache = KVCache()
        logits = self._forward([*firsts.values()], ids, cache, given)
        self._record(batch, places)
        chosen = torch.tensor(places, device=self._device)
        cache.batch_select_indices(chosen)
        self._cache.append(cache)
        self._rows += batch
        return logits[chosen]

    def _decode(self) -> Tensor:
        """Compute the last token of each sequence, and return the logits [rows, v] of the next."""
        logits = self._forward(self._rows, torch.tensor([each.tokens[-1:] for each in self._rows]), self._cache, {})
        self._record(self._rows, range(len(self._rows)))
        return logits

    def _forward(self, rows: Sequence[_Row], ids: Tensor, cache: KVCache, given: Mapping[str, Tensor]) -> Tensor:
        """Run the model on the last tokens of sequences, int64 [rows, tokens], whose tokens before are in the cache;
        return the logits [rows, v] of the next tokens."""
        lengths, shifts = torch.tensor([(each.num_tokens, each.shift) for each in rows]).T[:, :, None]
        index = torch.arange(-int(lengths.max()), 0) + lengths  # of the token in each column; negative for padding
        positions = (index.clamp(min=0) + shifts)[:, -ids.shape[1] :]
        inputs = {"input_ids": ids, "attention_mask": (index >= 0).long(), "position_ids": positions, **given}
        moved = {name: each.to(self._device) for name, each in inputs.items()}
        return self._model(**moved, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    def _record(self, rows: Sequence[_Row], places: Sequence[int]) -> None:
        """Store the experts of the last pass for each sequence, given its row in the pass."""
        if self._recorder is not None:
            experts = self._recorder.take(max(places) + 1)
            for row, place in zip(rows, places, strict=True):
                row.routing.append(experts[place, -row.num_tokens :])

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

    def _remove_finished(self) -> None:
        """Remove finished sequences from the batch and the cache."""
        left: list[int] = []
        for index, row in enumerate(self._rows):
            if (finish := self._finish_reason(row)) is None:
                left.append(index)
            else:
                del self._sampled[row.request.id]
                self._finished.append(_response(row, finish))
        if len(left) < len(self._rows):
            self._rows = [self._rows[index] for index in left]
            self._cache.keep(left, max((each.num_tokens for each in self._rows), default=1) - 1)

    def abort(self) -> list[Response]:
        """Abort all requests; see `RolloutEngine.abort`."""
        ended = [_response(each, "abort") for each in [*self._rows, *self._waiting]]
        self._waiting.clear()
        self._sampled.clear()
        self._rows, self._cache = [], KVCache()
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
        if level > 1:
            self._model.to("meta")
        torch.cuda.empty_cache()  # for other processes

    def _restore(self, parts: Collection[Memory]) -> None:
        """Do nothing: weights come with the next update, and the cache grows with requests."""


def _response(row: _Row, finish: Literal["stop", "length", "abort"]) -> Response:
    return row.response(finish, experts=np.concatenate(row.routing) if row.routing else None)
