"""Time and memory of a gated delta net layer, forward and backward, beside Transformers' layer with its torch path.

Both have the sizes of layers of Qwen3.5-0.8B, half as many heads, and the same row of tokens, and take turns. Time is
that of one processor. Memory is what the graph keeps between forward and backward, weights aside.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from reporting import add_output_flag, finish

HIDDEN, HEADS, CHANNELS = 1024, 8, 128


def kept(weights: set[int]) -> tuple[Any, dict[int, int]]:
    """Return a context that counts what autograd keeps: bytes by storage, those of `weights` aside."""
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), found


def measured(compute: Callable[[], torch.Tensor], module: torch.nn.Module) -> tuple[float, int]:
    """Return the processor's seconds of a forward and a backward pass, and the bytes between them."""
    context, found = kept({each.untyped_storage().data_ptr() for each in module.parameters()})
    begin = time.process_time()
    with context:
        output = compute()
    output.float().square().sum().backward()
    return time.process_time() - begin, sum(found.values())


def layers(dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module, Any]:
    """Return our layer and Transformers', with random weights, and what must outlive them."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    from megatune.config.groups.optimizer import PrecisionSettings
    from megatune.config.groups.parallel import ParallelSettings
    from megatune.config.settings import Settings
    from megatune.engine import groups
    from megatune.engine.model import build_model
    from megatune.families import read_architecture
    from megatune.launch.world import LOOPBACK, find_free_port

    groups.join(0, 1, 0, LOOPBACK, find_free_port(), timeout=60.0)
    parallel = ParallelSettings(use_distributed_optimizer=False)
    groups.build(parallel, seed=0, timeout=60.0)
    config = Qwen3NextConfig(
        num_hidden_layers=1, hidden_size=HIDDEN, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=256, linear_num_key_heads=HEADS, linear_num_value_heads=HEADS, linear_key_head_dim=CHANNELS,
        linear_value_head_dim=CHANNELS, layer_types=["linear_attention"], mlp_only_layers=[0],
    )  # fmt: skip
    settings = Settings(parallel=parallel, precision=PrecisionSettings(bf16=dtype == torch.bfloat16))
    (chunk,) = build_model(read_architecture(config.to_dict(), "config.json"), settings)
    ours = chunk.module.decoder.layers[0].self_attention
    theirs = Qwen3NextGatedDeltaNet(config, 0).to(dtype)
    with torch.no_grad():
        for weight in (*ours.parameters(), *theirs.parameters()):
            weight.normal_(std=0.02)
    return ours, theirs, chunk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    add_output_flag(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    ours, theirs, chunk = layers(dtype)
    row = torch.randn(arguments.tokens, 1, HIDDEN, dtype=dtype)
    sequences = SimpleNamespace(boundaries=(0, arguments.tokens))

    def of_ours() -> torch.Tensor:
        chunk.zero_grad_buffer()
        return ours(row.clone().requires_grad_(), packed_seq_params=sequences)[0]  # type: ignore[no-any-return]

    def of_theirs() -> torch.Tensor:
        theirs.zero_grad()
        return theirs(row.transpose(0, 1).clone().requires_grad_())  # type: ignore[no-any-return]

    found: dict[str, list[tuple[float, int]]] = {"megatune": [], "Transformers": []}
    for number in range(arguments.rounds + 1):
        for name, compute, module in (("megatune", of_ours, ours), ("Transformers", of_theirs, theirs)):
            one = measured(compute, module)
            found[name] += [one] if number else []  # the first round warms up
    times = {name: statistics.median(seconds for seconds, _ in each) for name, each in found.items()}
    sizes = {name: each[0][1] / 2**20 for name, each in found.items()}
    ratios = [one / other for (one, _), (other, _) in zip(*found.values(), strict=True)]
    rows = [[name, f"{times[name]:.2f}", f"{sizes[name]:.1f}"] for name in found]
    rows.append(["ratio", f"{statistics.median(ratios):.2f}", f"{sizes['megatune'] / sizes['Transformers']:.2f}"])
    note = (
        f"One layer, {arguments.tokens} tokens in {arguments.dtype}: hidden size {HIDDEN}, {HEADS} heads of {CHANNELS} "
        f"channels. Medians of {arguments.rounds} rounds; ratios of rounds from {min(ratios):.2f} to {max(ratios):.2f}."
    )
    finish("delta-net", "A gated delta net layer", ("", "CPU seconds", "MiB kept"), rows, note, arguments.output)


if __name__ == "__main__":
    main()
