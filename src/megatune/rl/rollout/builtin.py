"""The engine of this project: a model of Transformers with a cache of rows and continuous batching.

A response that is through leaves its row to the next one at once. Prompts that are the same, as those of a group, are
computed once. Log-probabilities come with the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from megatune.config.rl.settings import InferRole
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.pictures import model_arguments
from megatune.rl.rollout.engine import Memory
from megatune.rl.rollout.kv_cache import KVCache, Next, Prompts, next_plan
from megatune.rl.rollout.model import bytes_of_a_token, load_model, never_sampled, room_of_cache
from megatune.rl.rollout.routing import Recorder
from megatune.rl.rollout.sampling import Draw, sample
from megatune.rl.rollout.sequence import SampledSequence
from megatune.rl.rollout.updates import Update
from megatune.rl.rollout.weights import copy_into, drop_weights, places_of, take_weights
from megatune.rl.samples import Request, Response

_PROMPT_TOKENS = 8192  # of the prompts that are computed together


class BuiltinEngine:
    """See `RolloutEngine`.

    Args:
        model: a causal language model, or one that reads images, whose text attends by `kv_cache.ATTENTION`.
        tokenizer: for stop strings; None where no request has one.
        max_running: responses in flight at once; more wait.
        cache_bytes: of keys and values, at most; one response is sampled in any case.
        return_routing: responses come with the experts that were chosen.

    Raises:
        MegatuneError: INPUT, where there are no experts to return.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        max_running: int,
        cache_bytes: int,
        return_routing: bool = False,
    ) -> None:
        self._model, self._tokenizer, self._max_running = model.eval(), tokenizer, max_running
        self._token_bytes, self._cache_bytes = bytes_of_a_token(model), cache_bytes
        self._never = never_sampled(model, tokenizer).to(model.device)
        stops = model.generation_config.eos_token_id
        self._stops = frozenset([stops] if isinstance(stops, int) else stops or ())
        self._version: int | None = 0
        self._update: Update | None = None
        self._places: dict[str, Tensor] = {}
        self._sleeping = False
        self._dropped: dict[str, torch.Size] = {}  # parameters without memory
        self._cache = KVCache()
        self._recorder = Recorder(model) if return_routing else None
        self._waiting: deque[SampledSequence] = deque()
        self._running: list[SampledSequence] = []  # by row
        self._finished: list[Response] = []

    @classmethod
    def load(cls, role: InferRole, *, max_running: int, context: int) -> BuiltinEngine:
        """Load the model of a folder onto this machine's device; see `load_engine`."""
        model, tokenizer = load_model(role, context)
        room = room_of_cache(model.device)
        returns = role.return_routing
        return cls(model, tokenizer, max_running=max_running, cache_bytes=room, return_routing=returns)

    @property
    def version(self) -> int:
        """Of the weights; -1 where an update was not whole."""
        return -1 if self._version is None else self._version

    @property
    def num_in_flight(self) -> int:
        """Of requests, those that wait included."""
        return len(self._running) + len(self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; see `RolloutEngine.submit`."""
        self._check_awake()
        for request in requests:
            running = SampledSequence(
                request, frozenset(request.stop_token_ids) or self._stops, self._tokenizer, self.version
            )
            if running.room < 1:
                self._finished.append(running.response("length"))
            else:
                self._waiting.append(running)

    def step(self) -> list[Response]:
        """Sample on; see `RolloutEngine.step`."""
        self._check_awake()
        with torch.inference_mode():
            self._admit()
            self._next_tokens()
        finished, self._finished = self._finished, []
        return finished

    def abort(self) -> list[Response]:
        """End all requests; see `RolloutEngine.abort`."""
        ended = [each.response("abort") for each in [*self._running, *self._waiting]]
        self._waiting.clear()
        self._running.clear()
        return ended

    def _admit(self) -> None:
        """Give waiting responses rows, and compute their prompts without the last token, which comes with the next."""
        new: list[SampledSequence] = []
        while self._waiting and len(self._running) + len(new) < self._max_running:
            longest = max(each.most_tokens for each in [*self._running, *new, self._waiting[0]])
            rows = len(self._running) + len(new) + 1
            if rows > 1 and rows * longest * self._token_bytes > self._cache_bytes:
                break
            new.append(self._waiting.popleft())
        if not new:
            return
        self._cache.reserve(len(self._running) + len(new), max(each.most_tokens for each in new), self._max_running)
        first = {each.start: row for row, each in enumerate(self._running)}
        copies, computed = [], []
        for row, each in enumerate(new, len(self._running)):
            if each.num_tokens > 1 and (source := first.setdefault(each.start, row)) == row:
                computed.append(row)
            elif each.num_tokens > 1:
                copies.append((source, row, each.num_tokens - 1))
        self._running += new
        self._compute_prompts(computed)
        for source, row, length in copies:
            self._cache.copy_row(source, row, length)
            self._running[row].routing += self._running[source].routing[:1]  # of its start

    def _compute_prompts(self, rows: list[int]) -> None:
        """Fill rows of the cache, some at a time, those of like lengths together."""
        rows = sorted(rows, key=lambda row: self._running[row].num_tokens)
        for row in [row for row in rows if self._running[row].request.shown is not None]:
            rows.remove(row)
            self._compute_with_pictures(row)
        while rows:
            count = 1
            while count < len(rows) and (count + 1) * self._running[rows[count]].num_tokens <= _PROMPT_TOKENS:
                count += 1
            batch, rows = rows[:count], rows[count:]
            longest = self._running[batch[-1]].num_tokens - 1
            ids = [self._running[row].tokens[:-1] for row in batch]
            padded = torch.tensor([each + each[-1:] * (longest - len(each)) for each in ids])
            positions = torch.arange(longest, device=self._model.device)[None].expand(len(batch), -1)
            self._forward(self._model.base_model, padded, positions, Prompts(torch.tensor(batch)))
            self._record(batch, [len(each) for each in ids])

    def _compute_with_pictures(self, row: int) -> None:
        """Fill a row of the cache whose prompt has pictures."""
        sequence, where = self._running[row], self._model.device
        ids, shown = np.array(sequence.tokens[:-1], np.int64), sequence.request.shown
        assert shown is not None
        given = {name: tensor.to(where) for name, tensor in model_arguments(ids, shown).items()}
        positions = given.pop("position_ids", torch.arange(len(ids), device=where)[None])
        self._forward(
            self._model.base_model, torch.from_numpy(ids)[None], positions, Prompts(torch.tensor([row])), **given
        )
        self._record([row], [len(ids)])

    def _next_tokens(self) -> None:
        """Sample one more token of every row."""
        if not self._running:
            return
        lengths = [each.num_tokens - 1 for each in self._running]
        plan = next_plan(lengths, self._model.dtype, self._model.device)
        last = torch.tensor([[each.tokens[-1]] for each in self._running])
        shifts = torch.tensor([each.shift for each in self._running], device=self._model.device)
        logits = self._forward(self._model, last, (plan.positions + shifts)[:, None], plan).logits[:, -1]
        tokens, log_probs = sample(logits, [_draw(each) for each in self._running], self._never)
        self._record(range(len(lengths)), [1] * len(lengths))
        done = []
        for row, (token, log_prob) in enumerate(zip(tokens.tolist(), log_probs.tolist(), strict=True)):
            finish = self._running[row].add(token, log_prob)
            if finish is not None:
                self._finished.append(self._running[row].response(finish))
                done.append(row)
        self._leave(done)

    def _forward(self, module: Any, ids: Tensor, positions: Tensor, plan: Prompts | Next, **pictures: Tensor) -> Any:
        """Run a model, or its trunk, on int64 ids [rows, tokens]."""
        self._cache.plan = plan
        return module(
            input_ids=ids.to(self._model.device),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            slots=plan,
            **pictures,
        )

    def _record(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep the experts that the last forward pass took of so many tokens of each of these rows."""
        if self._recorder is not None:
            for row, length, experts in zip(rows, lengths, self._recorder.take(len(rows)), strict=True):
                self._running[row].routing.append(experts[:length])

    def _leave(self, rows: Sequence[int]) -> None:
        """Drop rows; the last ones move into their places."""
        left = len(self._running) - len(rows)
        gone = set(rows)
        movers = (row for row in range(left, len(self._running)) if row not in gone)
        for hole in (row for row in sorted(gone) if row < left):
            row = next(movers)
            self._cache.copy_row(row, hole, self._running[row].num_tokens - 1)
            self._running[hole] = self._running[row]
        del self._running[left:]

    def begin_update(self, version: int, num_tensors: int) -> None:
        """Expect weights; see `RolloutEngine.begin_update`."""
        assert not self.num_in_flight, "abort what is in flight first"
        assert not self._dropped, "wake its weights first"
        self._places = places_of(self._model)
        shapes = {name: tuple(place.shape) for name, place in self._places.items()}
        self._update, self._version = Update(version, num_tensors, shapes), None

    def update(self, bucket: Mapping[str, Tensor]) -> None:
        """Take some of the weights; see `RolloutEngine.update`."""
        assert self._update is not None, "begin_update comes first"
        for name, tensor in bucket.items():
            if self._update.accept(name, tensor.shape):
                copy_into(self._places[name], tensor)

    def commit_update(self, version: int) -> None:
        """Use the new weights; see `RolloutEngine.commit_update`."""
        assert self._update is not None, "begin_update comes first"
        update, self._update, self._places = self._update, None, {}
        update.check(version)
        self._version = version

    def sleep(self, level: int) -> None:
        """Free memory; see `RolloutEngine.sleep`."""
        assert not self.num_in_flight, "abort what is in flight first"
        self._sleeping = True
        self._cache.clear()
        if level > 1 and not self._dropped:
            self._dropped = drop_weights(self._model)
            self._version = None

    def wake(self, *parts: Memory) -> None:
        """Take memory again; see `RolloutEngine.wake`. The cache grows with requests."""
        take_weights(self._model, self._dropped)
        self._dropped = {}
        self._sleeping = self._sleeping and bool(parts) and "cache" not in parts

    def close(self) -> None:
        """Nothing is left; see `RolloutEngine.close`."""

    def _check_awake(self) -> None:
        if self._sleeping or self._version is None:
            why = "it sleeps" if self._sleeping else "its weights have no version: no complete update has arrived"
            raise MegatuneError(Finding("the rollout engine cannot sample", "actor_infer", why), ExitCode.INTERNAL)


def _draw(running: SampledSequence) -> Draw:
    request = running.request
    return Draw(
        running.uniforms[running.num_new],
        request.temperature,
        request.top_p,
        request.top_k,
        request.repetition_penalty,
        running.tokens if request.repetition_penalty != 1 else (),
    )
