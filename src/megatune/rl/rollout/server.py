"""Runs a rollout engine in a thread that executes calls from other threads, and builds the engine of a role."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from megatune.data.encode import load_tokenizer
from megatune.launch.context import RankContext
from megatune.rl.samples import Response, texts_of

if TYPE_CHECKING:
    from megatune.config.rl.settings import InferRole
    from megatune.rl.rollout.engine import RolloutEngine
    from megatune.rl.samples import Request


@dataclass(slots=True)
class _Call:
    """A pending call to `generate`."""

    requests: Sequence[Request]
    answer: Future[list[Response]]
    responses: list[Response] = field(default_factory=list)


class EngineServer:
    """Runs an engine in a thread, the only one that uses it.

    Args:
        context: gets a heartbeat each time that the engine has sampled for a moment.
        build: returns the engine; runs in the thread.
        decode: see `texts_of`. Engines decode in parallel what would be most of the driver's work.

    Raises:
        Exception: whatever `build` raises.
    """

    def __init__(
        self,
        context: RankContext,
        build: Callable[[], RolloutEngine],
        decode: Callable[[np.ndarray], str] | None = None,
    ) -> None:
        self._context, self._decode = context, decode
        self._asked: queue.SimpleQueue[tuple[str, tuple[Any, ...], Future[Any]]] = queue.SimpleQueue()
        self._held: dict[int, _Call] = {}  # by call number, until their whole burst has arrived
        self._call_of: dict[str, _Call] = {}  # by id of a request in flight
        self._arrived = self._announced = self._aborted = 0  # calls to generate
        built: Future[None] = Future()
        threading.Thread(target=self._run, args=(build, built), daemon=True).start()
        built.result()

    def ask(self, method: str, *args: Any) -> Future[Any]:
        """Call a method asynchronously.

        generate(number, last, requests) -> list[Response]: the responses once all are finished, or the partial ones
            after an abort. Calls are numbered from 1; those of a burst, up to `last`, begin together and in order, so
            that an engine computes the same batches in every run.
        abort(number): abort the calls up to this number, including those that arrive later.

        Every other method is a method of the engine.
        """
        answer: Future[Any] = Future()
        self._asked.put((method, args, answer))
        return answer

    def _run(self, build: Callable[[], RolloutEngine], built: Future[None]) -> None:
        try:
            self._engine = build()
        except BaseException as error:
            built.set_exception(error)
            return
        built.set_result(None)
        while True:
            while not self._call_of or not self._asked.empty():
                self._do(*self._asked.get())
            self._sample()

    def _do(self, method: str, args: tuple[Any, ...], answer: Future[Any]) -> None:
        try:
            if method == "generate":
                self._generate(answer, *args)
                return
            self._context.beat(method, self._context.step)
            own = self._abort if method == "abort" else getattr(self._engine, method)
            answer.set_result(own(*args))
            self._rest()
        except Exception as error:
            answer.set_exception(error)

    def _generate(self, answer: Future[list[Response]], number: int, last: int, requests: Sequence[Request]) -> None:
        self._arrived, self._announced = self._arrived + 1, max(self._announced, last)
        if number <= self._aborted:
            answer.set_result([])
        else:
            self._held[number] = _Call(requests, answer)
        if self._arrived < self._announced or not self._held:
            return
        calls = [self._held.pop(number) for number in sorted(self._held)]
        self._call_of |= {request.id: call for call in calls for request in call.requests}
        try:
            self._engine.submit([request for call in calls for request in call.requests])
        except Exception as error:
            self._fail(error)

    def _sample(self) -> None:
        """Let the engine sample for a moment."""
        self._context.beat("generate", self._context.step)
        try:
            self._note(self._engine.step())
        except Exception as error:
            self._fail(error)
        else:
            self._rest()

    def _rest(self) -> None:
        if not self._call_of:
            self._context.beat("idle", self._context.step)

    def _abort(self, number: int) -> None:
        self._aborted = number
        held, self._held = self._held, {}
        for call in held.values():
            call.answer.set_result([])
        if self._call_of:
            # Requests that had nothing left to sample are finished, and `step` returns them.
            self._note([*self._engine.abort(), *self._engine.step()])

    def _note(self, responses: Sequence[Response]) -> None:
        for response in responses:
            call = self._call_of.pop(response.id)
            if self._decode is not None and response.finish != "abort":
                response = replace(response, texts=texts_of(response, self._decode))
            call.responses.append(response)
            if len(call.responses) == len(call.requests):
                call.answer.set_result(call.responses)

    def _fail(self, error: Exception) -> None:
        """Fail every call in flight with an error of the engine."""
        calls = {id(call): call for call in self._call_of.values()}
        self._call_of = {}
        for call in calls.values():
            call.answer.set_exception(error)


def engine_server(context: RankContext, role: InferRole, seed: int, max_running: int, length: int) -> EngineServer:
    """Run an engine in this process; see `load_engine`.

    Args:
        length: maximum number of tokens of a prompt and its response.
    """
    # vLLM and SGLang have one random generator per engine, so every engine gets another seed.
    own = {"seed": seed + context.rank, "max_running": max_running, "context": length}
    decode = partial(load_tokenizer(role.model_name_or_path).decode, skip_special_tokens=True)
    return EngineServer(context, lambda: load_engine(role, **own), decode)


def load_engine(role: InferRole, *, seed: int, max_running: int, context: int) -> RolloutEngine:
    """Load the engine of a role in this process, with the weights of its model's folder (version 0).

    Args:
        seed: seed of the engine; `builtin` uses only the requests' seeds.
        max_running: number of responses that are sampled at once.
        context: maximum number of tokens of a prompt and its response.

    Raises:
        MegatuneError: UNAVAILABLE, if the engine is not installed or has another version; INPUT, if the model cannot be
            loaded.
    """
    if role.engine == "vllm":
        from megatune.rl.rollout.vllm_engine import VllmEngine

        return VllmEngine.load(role, seed=seed, max_running=max_running, context=context)
    if role.engine == "sglang":
        from megatune.rl.rollout.sglang_engine import SglangEngine

        return SglangEngine.load(role, seed=seed, max_running=max_running, context=context)
    from megatune.rl.rollout.builtin import BuiltinEngine

    return BuiltinEngine(role, max_running=max_running, context=context)
