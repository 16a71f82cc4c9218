"""SGLang as rollout engine, through its Engine.

Written for the documented interface and the source of the version in `TESTED`; it has never been run, because there is
no packaged CPU build. Its log-probabilities are at the sampling temperature, before top_k and top_p, unless
SGLANG_RETURN_ORIGINAL_LOGPROB is set; they include a repetition penalty.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from megatune.config.rl.settings import InferRole
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture
from megatune.generation.vllm import starting
from megatune.rl.rollout.checks import check_arguments, check_version
from megatune.rl.rollout.engine import (
    DTYPES,
    MEMORY_TAGS,
    Memory,
    RolloutEngine,
    SequenceState,
    checkpoint_shapes,
)
from megatune.rl.samples import Request, Response
from megatune.rl.transport import PackedBucket, Receiver, Route

TESTED = "0.5.23"
_DEFAULTS = {"enable_memory_saver": True, "disable_custom_all_reduce": True, "log_level": "warning"}
_NAMES = {"tensor_parallel_size": "tp_size", "pipeline_parallel_size": "pp_size"}
_NOT_ARGUMENTS = ("sleep_level", "grpc_mode", "log_level_http")  # of ROLL's strategy_config, for its server
_STEP_SECONDS = 0.1  # duration of a `step`
_ORIGINAL = "SGLANG_RETURN_ORIGINAL_LOGPROB"


class SglangEngine(RolloutEngine):
    """See `RolloutEngine`.

    Args:
        engine: SGLang's Engine.
        seeds: whether each response has its own random numbers, with enable_deterministic_inference.
        num_layers: number of the model's layers if chosen experts are returned, else None.
    """

    def __init__(
        self,
        engine: Any,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        seeds: bool,
        has_weights: bool,
        num_layers: int | None = None,
    ) -> None:
        super().__init__(shapes, has_weights=has_weights)
        self._engine, self._seeds, self._num_layers = engine, seeds, num_layers
        self._tasks: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._released: set[Memory] = set()
        self._is_updating = False
        self._receiver: Receiver

    @classmethod
    def load(cls, role: InferRole, *, seed: int, max_running: int, context: int) -> SglangEngine:
        """Start SGLang's processes; see `load_engine`."""
        check_version("SGLang", ("sglang",), TESTED, role)
        for name, value in role.system_envs.items():
            os.environ.setdefault(name, value)
        if os.environ.get(_ORIGINAL, "").lower() in ("1", "true"):
            why = "log-probabilities must be those at the sampling temperature"
            raise MegatuneError(Finding(f"{_ORIGINAL} is set", role.name, why, "unset it"), ExitCode.SETTINGS)
        import sglang
        from sglang.srt.server_args import ServerArgs

        config = {_NAMES.get(key, key): value for key, value in role.config.items() if key not in _NOT_ARGUMENTS}
        check_arguments("SGLang", config, ServerArgs.__struct_fields__, role)
        arguments = {
            "dtype": DTYPES[role.dtype],
            "random_seed": seed,
            "context_length": context,
            "max_running_requests": max_running,
            "tp_size": role.devices_per_engine // int(config.get("pp_size", 1)),
            "load_format": "dummy",
            **_DEFAULTS,
            **config,
            "model_path": role.model_name_or_path,
            "enable_return_routed_experts": role.return_routing,
        }
        with starting("SGLang", role.model_name_or_path):
            engine = sglang.Engine(**arguments)
        folder = Path(role.model_name_or_path)
        return cls(
            engine,
            checkpoint_shapes(folder),
            seeds=bool(arguments.get("enable_deterministic_inference")),
            has_weights=arguments["load_format"] != "dummy",
            num_layers=load_architecture(folder).num_layers if role.return_routing else None,
        )

    def _start(self, request: Request) -> SequenceState:
        asked = self._engine.async_generate(
            input_ids=request.token_ids.tolist(),
            sampling_params=self._params(request),
            return_logprob=True,
            return_routed_experts=self._num_layers is not None,
            rid=request.id,
        )
        self._tasks[request.id] = self._engine.loop.create_task(asked)
        return SequenceState(request, self.version)

    def _params(self, request: Request) -> dict[str, Any]:
        begun = len(request.response_ids)
        params: dict[str, Any] = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "repetition_penalty": request.repetition_penalty,
            "max_new_tokens": request.max_new_tokens - begun,
            "no_stop_trim": True,  # stop strings are part of a response
        }
        if request.stop_token_ids:
            params |= {"ignore_eos": True, "stop_token_ids": list(request.stop_token_ids)}
        if request.stop_strings:
            params["stop"] = list(request.stop_strings)
        if self._seeds:
            params["sampling_seed"] = request.seed % 2**31
        return params

    def _advance(self) -> None:
        self._run(asyncio.wait(self._tasks.values(), timeout=_STEP_SECONDS))
        self._finished += [self._ended(each) for each in [key for key, task in self._tasks.items() if task.done()]]

    def _run(self, awaitable: Any) -> Any:
        return self._engine.loop.run_until_complete(awaitable)

    def _ended(self, id_: str) -> Response:
        """Return the response of a finished request."""
        sampled, answer = self._sampled.pop(id_), self._tasks.pop(id_).result()["meta_info"]
        for log_prob, token, _ in answer.get("output_token_logprobs") or ():
            sampled.tokens.append(token)
            sampled.log_probs.append(log_prob)
        kind = answer["finish_reason"]["type"]
        if kind not in ("stop", "length", "abort"):
            raise MegatuneError(Finding(f"SGLang ended a request with {kind}", "actor_infer"), ExitCode.INTERNAL)
        finish: Literal["stop", "length", "abort"] = kind
        experts = answer.get("routed_experts")
        if self._num_layers is None or experts is None:
            return sampled.response(finish)
        tokens = len(sampled.request.token_ids) + len(sampled.tokens) - 1
        chosen = np.frombuffer(base64.b64decode(experts), np.int32).reshape(tokens, self._num_layers, -1)
        return sampled.response(finish, experts=chosen)

    def abort(self) -> list[Response]:
        """Abort all requests; see `RolloutEngine.abort`."""
        gone = list(self._tasks)
        if gone:
            self._run(asyncio.sleep(0))  # so that the newest requests reach the scheduler
            for each in gone:
                self._engine.tokenizer_manager.abort_request(rid=each)
            self._run(asyncio.wait(self._tasks.values()))
        return [self._ended(each) for each in gone]

    def connect(self, route: Route, first: int) -> None:
        """Connect this process, which passes weights on to SGLang's processes; see `RolloutEngine.connect`."""
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self._receiver = Receiver(route, first, device)

    def begin_update(self, version: int, num_tensors: int) -> None:
        """Begin an update; see `RolloutEngine.begin_update`. After an aborted one, SGLang is still in its update."""
        super().begin_update(version, num_tensors)
        if not self._is_updating:
            self._check(self._engine.begin_weight_update(), "does not begin an update of its weights")
            self._is_updating = True

    def _take(self, bucket: PackedBucket, names: Sequence[str]) -> None:
        with self._receiver.opened(bucket) as tensors:
            # SGLang's processes open copies, because memory that this process has opened cannot be shared again.
            good = [(name, tensors[name].clone()) for name in names]
            self._check(self._engine.update_weights_from_tensor(good, flush_cache=False), "refuses weights")

    def _finish(self, version: int, *, whole: bool) -> None:
        self._is_updating = False
        self._check(self._engine.end_weight_update(), "does not end an update of its weights")
        flushed = self._engine.flush_cache()
        self._check((flushed.success, flushed.message), "keeps keys and values of older weights")

    def _check(self, result: tuple[bool, str], what: str) -> None:
        if not result[0]:
            raise MegatuneError(Finding(f"SGLang {what}", "actor_infer", result[1]), ExitCode.INTERNAL)

    def _free(self, level: int) -> None:
        self._released = {*MEMORY_TAGS} if level > 1 else {"cache"}
        self._engine.release_memory_occupation(tags=[MEMORY_TAGS[part] for part in sorted(self._released)])

    def _restore(self, parts: Collection[Memory]) -> None:
        if tags := [MEMORY_TAGS[part] for part in parts if part in self._released]:
            self._engine.resume_memory_occupation(tags=tags)

    def close(self) -> None:
        """End SGLang's processes; see `RolloutEngine.close`."""
        self._engine.shutdown()
