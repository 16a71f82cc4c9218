"""Flags of `swift infer` and `swift deploy` that `infer` and `serve` refuse by name, or pass over with a line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatune.cli.own_flags import add_flag
from megatune.errors import Finding

# The values that change nothing, and what to do in place of others.
_REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "num_beams": (("1",), "beam search is not built; leave it out"),
    "logprobs": (("false",), "probabilities of tokens are not written; leave it out"),
    "top_logprobs": ((), "probabilities of tokens are not written; leave it out"),
    "structured_outputs_regex": ((), "answers are not held to a pattern; leave it out"),
    "val_dataset_sample": ((), "write the number behind the data set: --val_dataset NAME#N"),
    "load_data_args": (("false",), "name the data set: --val_dataset NAME"),
    "merge_lora": (("false",), "`megatune export --merge_lora` writes a merged model; adapters need none to be asked"),
    "dataset": ((), "name what is to be answered: --val_dataset NAME"),
    "template": ((), "a checkpoint's tokenizer has its chat template; leave it out"),
    "use_chat_template": (("true",), "--raw leaves the chat template out"),
    "task_type": (("causal_lm",), "only models that write text are asked"),
    "torch_dtype": ((), "a model is loaded in the dtype of its config.json; leave it out"),
    "device_map": ((), "a model is loaded onto one device; --infer_backend vllm spreads it over several"),
    "quant_bits": ((), "models are not quantized here; leave it out"),
    "max_length": ((), "prompts are not cut: what the model's context does not hold is refused; leave it out"),
    "max_pixels": ((), "write --image_max_pixels"),
    "ssl_keyfile": ((), "put a proxy with TLS before the endpoint"),
    "ssl_certfile": ((), "put a proxy with TLS before the endpoint"),
}
# Those that change no answer, and why.
_PASSED_OVER = {
    "attn_impl": "Transformers chooses the attention",
    "dataset_num_proc": "rows are read as they are answered",
    "load_args": "config.json says what a checkpoint is",
    "load_from_cache_file": "rows are read as they are answered",
    "log_interval": "no statistics are printed",
    "max_logprobs": "probabilities of tokens are refused",
    "model_type": "config.json says it",
    "owned_by": "it is megatune",
    "reranker_use_activation": "only models that write text are asked",
    "verbose": "--log_level says what the endpoint prints",
    "write_batch_size": "answers are written as soon as they are there",
}


def add(parser: argparse.ArgumentParser) -> None:
    """Declare them, out of sight."""
    for name in (*_REFUSED, *_PASSED_OVER):
        add_flag(parser, name, dest=f"swift_{name}", nargs="*", help=argparse.SUPPRESS)


def findings(args: argparse.Namespace) -> list[Finding]:
    """Return what to say of those that are refused."""
    found = []
    for name, (neutral, fix) in _REFUSED.items():
        given: Sequence[str] | None = getattr(args, f"swift_{name}")
        if given is not None and (" ".join(given).lower() or "true") not in neutral:
            found.append(Finding("is not built", f"--{name}", fix=fix))
    return found


def say_passed_over(args: argparse.Namespace) -> None:
    """Print a line on stderr for each flag that is given and changes nothing."""
    for name, why in _PASSED_OVER.items():
        if getattr(args, f"swift_{name}") is not None:
            print(f"--{name}: passed over: {why}", file=sys.stderr)
