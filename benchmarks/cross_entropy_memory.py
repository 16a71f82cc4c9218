"""Memory and time of the output layer and the loss, fused against the plain path, forward and backward.

Each case has a process of its own, which first does the same with a few tokens. Memory is the most above what the
weight and its main gradient take: the process's anonymous memory on a CPU, the allocator's on a GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from load_memory import MIB, Peak
from reporting import add_output_flag, finish

LIMIT = 1800.0  # seconds for one case
VOCABULARY, TOKENS = 151_936, 4_096  # of Qwen3


def serve(pipe: Connection, fused: bool, dtype: str, hidden_size: int, share: float) -> None:
    """One case: sends bytes, seconds of the wall and of processors, the mean loss, and the gradient's norm."""
    import torch

    from megatune.architecture import Architecture
    from megatune.config.groups.optimizer import PrecisionSettings
    from megatune.config.groups.parallel import ParallelSettings
    from megatune.config.groups.performance import PerformanceSettings
    from megatune.config.settings import Settings
    from megatune.engine import device, groups
    from megatune.engine.model import build_model
    from megatune.launch.world import LOOPBACK, find_free_port

    groups.join(0, 1, 0, LOOPBACK, find_free_port(), timeout=60.0)
    parallel = ParallelSettings(use_distributed_optimizer=False)
    groups.build(parallel, seed=0, timeout=60.0)
    architecture = Architecture(
        model_type="qwen3", num_layers=1, hidden_size=hidden_size, ffn_hidden_size=64, num_attention_heads=1,
        num_query_groups=1, kv_channels=64, vocab_size=VOCABULARY, max_position_embeddings=TOKENS, norm_epsilon=1e-6,
        rotary_base=1e6, tie_word_embeddings=True,
    )  # fmt: skip
    performance = PerformanceSettings(cross_entropy_loss_fusion=fused)
    precision = PrecisionSettings(bf16=dtype == "bf16")
    (chunk,) = build_model(architecture, Settings(parallel=parallel, performance=performance, precision=precision))
    model = chunk.module
    weight = model.shared_embedding_or_output_weight()
    torch.nn.init.normal_(weight, std=0.02)
    generator = torch.Generator().manual_seed(0)

    def once(tokens: int) -> tuple[float, torch.Tensor]:
        """Loss over `tokens` tokens, and the gradient of the weight."""
        chunk.zero_grad_buffer()
        hidden_states = torch.randn(tokens, 1, hidden_size, generator=generator).to(weight.device, weight.dtype)
        labels = torch.randint(VOCABULARY, (1, tokens), generator=generator)
        labels[torch.rand(1, tokens, generator=generator) >= share] = -100
        trained = (labels.reshape(-1) >= 0).nonzero()[:, 0].to(weight.device)
        loss = model.head(hidden_states.requires_grad_(), labels.to(weight.device), trained).sum() / len(trained)
        loss.backward()
        return loss.item(), weight.main_grad

    once(8)
    memory = Peak()
    if device.HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated() if device.HAS_GPU else 0
    wall, cpu = time.perf_counter(), time.process_time()
    loss, gradient = once(TOKENS)
    device.synchronize()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    anonymous, _ = memory.stop()
    most = torch.cuda.max_memory_allocated() - allocated if device.HAS_GPU else anonymous
    pipe.send((most, wall, cpu, loss, torch.linalg.vector_norm(gradient).item()))
    groups.leave()


def measure(*case: Any) -> tuple[float, ...]:
    """The answer of `serve`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, *case), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(LIMIT):
            sys.exit(f"no answer in {LIMIT:.0f} s")
        return ours.recv()
    except EOFError:
        sys.exit("a case ended early; its error is above")
    finally:
        process.join(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024, metavar="N", help="hidden size of the model (1024)")
    add_output_flag(parser)
    arguments = parser.parse_args()
    rows, gaps = [], []
    for dtype in ("fp32", "bf16"):
        plain = measure(False, dtype, arguments.hidden, 1.0)
        fused = measure(True, dtype, arguments.hidden, 1.0)
        quarter = measure(True, dtype, arguments.hidden, 0.25)
        gaps.append(max(1e-7, *(abs(ours / other - 1) for ours, other in zip(fused[3:], plain[3:], strict=True))))
        for name, of in (("plain", plain), ("fused", fused), ("fused, a quarter of the tokens trained", quarter)):
            rows.append(
                (f"{dtype}, {name}", f"{of[0] / MIB:.0f}", f"{plain[0] / of[0]:.1f}", f"{of[1]:.1f}", f"{of[2]:.1f}",
                 f"{of[2] / plain[2]:.2f}")
            )  # fmt: skip
    header = ("path", "peak, MiB", "times less", "seconds", "CPU seconds", "ratio")
    note = (
        f"Vocabulary {VOCABULARY}, {TOKENS} tokens, hidden size {arguments.hidden}, one process. The plain path is the "
        "output layer and Megatron-Core's vocabulary-parallel cross-entropy. The peak is what forward and backward add "
        "to the weight and its fp32 main gradient; it includes the hidden states and their gradient, "
        f"{TOKENS * arguments.hidden * 4 * 2 / MIB:.0f} MiB in fp32. The ratio is of CPU seconds, which are steadier "
        "where others use the machine. One measured pass each. Loss and norm of the weight's gradient agree within "
        f"{gaps[0]:.0e} in fp32 and {gaps[1]:.0e} in bf16."
    )
    finish("cross-entropy-memory", "Memory of the output layer and the loss", header, rows, note, arguments.output)


if __name__ == "__main__":
    main()
