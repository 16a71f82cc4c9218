"""The final model of a run as its users load it: by Transformers, with peft where it is an adapter, and merged."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from megatune.config.settings import Settings
from megatune.errors import Finding

_MERGED = 1e-4  # of the largest logit: fp32 sums in another order
_TOKENS = 24


def load_in_transformers(output: Path, base: Path | None) -> tuple[str, list[Finding]]:
    """Load a final model and compute with it.

    Args:
        base: of an adapter; None where the folder holds a whole model.

    Returns:
        What was seen, and what is wrong.
    """
    import torch

    from megatune.verify.reference import load_reference_model

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        if base is None:
            problems = _keys(output)
            model: Any = load_reference_model(output, torch.float32)
            kind = type(model).__name__
        else:
            model, problems = with_adapter(base, output), []
            kind = f"{type(model).__name__} with peft"
        logits = compute(model)
        if not torch.isfinite(logits).all():
            problems.append(Finding(f"{output.name}: Transformers computes numbers that are not finite"))
        text = _asked(output if base is None else base)
    number = sum(parameter.numel() for parameter in model.parameters())
    return f"{kind}, {number:,} parameters, every tensor accounted for{text}", problems


def _keys(output: Path) -> list[Finding]:
    """Hold the tensors of the files against those of Transformers' model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    from megatune.bridge.auto import register_types
    from megatune.families import load_architecture

    register_types()
    architecture = load_architecture(output)
    kind: Any = AutoModelForCausalLM
    if architecture.num_labels:
        kind = AutoModelForSequenceClassification
    elif architecture.vision is not None:
        kind = AutoModelForImageTextToText
    _, info = kind.from_pretrained(output, output_loading_info=True)
    return [
        Finding(f"Transformers finds {len(info[key])} {word} keys in {output.name}: {', '.join(sorted(info[key])[:3])}")
        for key, word in (("missing_keys", "missing"), ("unexpected_keys", "unexpected"), ("mismatched_keys", "other"))
        if info.get(key)
    ]


def with_adapter(base: Path, adapter: Path) -> Any:
    """Return Transformers' model with the adapter that peft puts beside it."""
    import torch

    from megatune.bridge.peft_model import apply_adapter
    from megatune.families.peft_config import has_score
    from megatune.verify.reference import load_reference_model

    model: Any = load_reference_model(base, torch.float32, as_reward_model=has_score(adapter))
    return apply_adapter(model, adapter).model.eval()


def compute(model: Any) -> Any:
    """Return the logits of some tokens: fp32 [1, tokens, vocabulary], of a reward model its scores."""
    import torch

    size = min(model.get_input_embeddings().weight.shape[0], 200)
    with torch.no_grad():
        return model(input_ids=torch.arange(_TOKENS)[None] % size).logits.float()


def _asked(folder: Path) -> str:
    """Load the tokenizer beside the model, and say so."""
    from megatune.data.encode import load_tokenizer

    return f"; its tokenizer has {len(load_tokenizer(folder)):,} tokens"


def merged_lines(settings: Settings, base: Path, output: Path) -> tuple[str, list[Finding]]:
    """Merge the adapter as merge_lora does, and compare the merged model with base and adapter."""
    import torch

    from megatune.training.merge import merge_run
    from megatune.verify.reference import load_reference_model

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        target = output / "merged"
        if not target.is_dir():
            merge_run(settings, base, output)
        beside = compute(with_adapter(base, output))
        merged = compute(load_reference_model(target, torch.float32))
    apart = ((merged - beside).abs().max() / beside.abs().max()).item()
    dtype = _dtype(target)
    tolerance = _MERGED if dtype == "float32" else 2e-2
    if not apart <= tolerance:
        what = f"the merged model computes other logits than base and adapter, by {apart:.1e} of the largest"
        return "", [Finding(what, why=f"more than {tolerance:.0e}")]
    return f"; merged, its logits are within {apart:.1e} of those of base and adapter ({dtype}: {tolerance:.0e})", []


def _dtype(folder: Path) -> str:
    from megatune.families import read_config

    config = read_config(folder)
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
