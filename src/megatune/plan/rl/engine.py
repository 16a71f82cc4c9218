"""An engine that samples responses: what its devices hold, and how many sequences it samples at once."""

from __future__ import annotations

from dataclasses import dataclass

from megatune.architecture import Architecture
from megatune.config.rl.settings import InferRole
from megatune.plan.case import PlannedModel
from megatune.plan.flops import num_parameters
from megatune.plan.machine import Machine
from megatune.plan.memory.estimate import COMMUNICATOR, CONTEXT, CPU_PROCESS
from megatune.plan.rl.question import Lengths

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# vLLM's and SGLang's own defaults.
_SHARE, _MAX_NUM_SEQS, _MAX_BATCHED_TOKENS = 0.9, 256, 8192
_CPU_CACHE, _CPU_CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE", 4
# Of the memory that is free once its weights are loaded, what the built-in engine's cache may have: of a device, and of
# a machine without one (rl.rollout.model.room_of_cache).
_GPU_SHARE, _CPU_SHARE = 0.5, 0.25
# Captured CUDA graphs; an assumption, vLLM reports 0.5 to 2 GiB at start.
GRAPHS = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes of one device of an engine.

    Attributes:
        weights: of the device's share.
        cache: of keys and values; below 0 where weights leave no room.
        workspace: activations of a prefill, and logits.
        framework: what stays while the engine sleeps: the device's context, the libraries', and captured graphs.
        sequences: that one engine samples at once, of those that it is given.
        cached_tokens: that `cache` of an engine's devices holds together.
    """

    weights: int
    cache: int
    workspace: int
    framework: int
    sequences: int
    cached_tokens: int

    @property
    def total(self) -> int:
        """All of it, while it samples."""
        return self.weights + max(0, self.cache) + self.workspace + self.framework


def key_value_bytes(architecture: Architecture, itemsize: int) -> int:
    """Return bytes of one token's keys and values in all layers; with latent attention, of its latent, which every
    engine keeps: the built-in one caches what Transformers hands over."""
    if architecture.mla is not None:
        return architecture.num_layers * architecture.latent_size * itemsize
    # The state of a gated delta net is as large whatever the number of tokens.
    layers = sum(not architecture.is_delta_layer(layer) for layer in range(architecture.num_layers))
    return layers * 2 * architecture.key_value_size * itemsize


def cache_shards(architecture: Architecture, devices: int) -> int:
    """Return over how many devices keys and values are cut: no more than there are heads; a latent is on all."""
    return 1 if architecture.mla is not None else min(devices, architecture.num_query_groups)


def engine_memory(
    role: InferRole, model: PlannedModel, machine: Machine, lengths: Lengths, *, samples: int, max_running: int
) -> EngineMemory:
    """Return what each device of the role's engines holds.

    Args:
        samples: of a step, over all engines.
        max_running: requests in flight to one engine.
    """
    architecture, size, devices = model.architecture, ITEMSIZE[role.dtype], role.devices_per_engine
    on_cpu = machine.device.generation == "cpu"
    weights = num_parameters(architecture) * size // devices
    given = min(-(-samples // role.num_engines), max_running)
    process = CPU_PROCESS if on_cpu else CONTEXT + (COMMUNICATOR if devices > 1 else 0)
    of_token = key_value_bytes(architecture, size) // cache_shards(architecture, devices)
    if role.engine == "builtin":  # it makes room for as many of the longest as it may sample
        room = _CPU_SHARE * machine.device.memory * machine.gpus_per_node
        if not on_cpu:
            room = _GPU_SHARE * (machine.device.memory - weights - process)
        sequences = max(1, min(given, int(room // (lengths.longest * of_token))))
        return EngineMemory(
            weights=weights,
            cache=sequences * lengths.longest * of_token,
            workspace=8 * sequences * architecture.vocab_size + _activations(architecture, sequences, size),
            framework=process,
            sequences=sequences,
            cached_tokens=sequences * lengths.longest,
        )
    config = role.config
    asked = min(given, int(config.get("max_num_seqs") or config.get("max_running_requests") or _MAX_NUM_SEQS))
    at_once = int(config.get("max_num_batched_tokens") or _MAX_BATCHED_TOKENS)
    workspace = (8 * asked * architecture.vocab_size + _activations(architecture, at_once, size)) // devices
    if on_cpu:
        cache = int(float(role.system_envs.get(_CPU_CACHE) or _CPU_CACHE_GIB) * 2**30)
    elif role.engine == "vllm":  # all but graphs stays below the share
        share = float(config.get("gpu_memory_utilization") or _SHARE)
        cache = int(share * machine.device.memory) - weights - workspace - process
    else:  # weights and cache do
        cache = int(float(config.get("mem_fraction_static") or _SHARE) * machine.device.memory) - weights
    tokens = max(0, cache) // max(of_token, 1)
    has_graphs = not (on_cpu or config.get("enforce_eager") or config.get("disable_cuda_graph"))
    return EngineMemory(
        weights=weights,
        cache=cache,
        workspace=workspace,
        framework=process + has_graphs * GRAPHS,
        sequences=max(1, min(asked, int(tokens // lengths.mean))),
        cached_tokens=tokens,
    )


def _activations(architecture: Architecture, tokens: int, size: int) -> int:
    """Return bytes of a layer's tensors at once: four hidden states, gate, up and their product."""
    channels = architecture.ffn_hidden_size
    if (moe := architecture.moe) is not None:
        channels = moe.router_topk * moe.moe_ffn_hidden_size + moe.shared_expert_intermediate_size
    return tokens * (4 * architecture.hidden_size + 3 * channels) * size
