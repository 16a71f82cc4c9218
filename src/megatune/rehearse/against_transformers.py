"""Stages 5 and 6: load the final model in Transformers, and compare the small model's logits, loss and gradients in the
layout with Transformers."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.config.groups.run import PAIR_STAGES
from megatune.config.settings import BatchSettings, ExpertSettings, FinetuningSettings, PrecisionSettings, Settings
from megatune.errors import ExitCode, Finding
from megatune.rehearse.outcome import Outcome, failed, passed, skipped
from megatune.rehearse.ranks import Watcher, local_world, redirect_output, timeout_finding

if TYPE_CHECKING:
    from megatune.rehearse.stages import Context


_MERGED = 1e-4  # of the largest logit: fp32 sums in another order
_TOKENS = 24


def load_in_transformers(output: Path, base: Path | None) -> tuple[str, list[Finding]]:
    """Load a final model in Transformers and run a forward pass.

    Args:
        base: the base model of an adapter; None if the folder has a full model.

    Returns:
        A description, and findings.
    """
    import torch

    from megatune.data.encode import load_tokenizer
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
            problems.append(Finding(f"{output.name}: Transformers computes NaN or infinite logits"))
        tokenizer = load_tokenizer(base or output)
    number = sum(parameter.numel() for parameter in model.parameters())
    found = f"{kind}, {number:,} parameters, all tensors match; its tokenizer has {len(tokenizer):,} tokens"
    return found, problems


def _keys(output: Path) -> list[Finding]:
    """Compare the tensors in the files with those of Transformers' model."""
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
    """Return Transformers' model with the adapter, applied by peft."""
    import torch

    from megatune.bridge.peft_model import apply_adapter
    from megatune.families.peft_config import num_scores
    from megatune.verify.reference import load_reference_model

    model: Any = load_reference_model(base, torch.float32, scores=num_scores(adapter))
    return apply_adapter(model, adapter).model.eval()


def compute(model: Any) -> Any:
    """Return the logits of some tokens, fp32 [1, tokens, vocabulary], or the scores of a classifier or reward model."""
    import torch

    size = min(model.get_input_embeddings().weight.shape[0], 200)
    with torch.no_grad():
        return model(input_ids=torch.arange(_TOKENS)[None] % size).logits.float()


def merged_lines(settings: Settings, base: Path, output: Path) -> tuple[str, list[Finding]]:
    """Merge the adapter like merge_lora, and compare the merged model with base model and adapter."""
    import torch

    from megatune.training.conversion import merge_run
    from megatune.verify.reference import load_reference_model

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        target = output / "merged"
        if not target.is_dir():
            merge_run(settings, base, output)
        expected = compute(with_adapter(base, output))
        merged = compute(load_reference_model(target, torch.float32))
    error = ((merged - expected).abs().max() / expected.abs().max()).item()
    dtype = _dtype(target)
    tolerance = _MERGED if dtype == "float32" else 2e-2
    if not error <= tolerance:
        what = f"logits of the merged model differ from base and adapter by {error:.1e} of the largest logit"
        return "", [Finding(what, why=f"more than {tolerance:.0e}")]
    return f"; merged, its logits are within {error:.1e} of those of base and adapter ({dtype}: {tolerance:.0e})", []


def _dtype(folder: Path) -> str:
    from megatune.families import read_config

    config = read_config(folder)
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


_ROWS, _LENGTH = 8, 48


def compare_with_transformers(context: Context, name: str, limit: float) -> Outcome:
    """Compare in fp32, so that differences come from the layout and not from rounding.

    Args:
        name: of the stage.
        limit: seconds for the whole comparison.
    """
    settings = context.settings
    from megatune.verify.checkpoints import with_adapters
    from megatune.verify.question import samples_of
    from megatune.verify.run import RanksFailed, verify_layout

    model_dir = context.output("whole") if context.architecture.num_labels else context.model_dir
    if not (model_dir / "config.json").is_file():
        return skipped(name, "it needs the trained scores of stage 2, which did not write a model")
    samples = samples_of(context.architecture, _ROWS, _LENGTH, context.settings.run.seed)
    proven = _settings(context)
    log = context.folder / "launch" / "verify.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    watcher = Watcher(limit)
    try:
        with redirect_output(log), with_adapters(proven, model_dir, context.architecture) as adapted:
            verdict = verify_layout(model_dir, adapted, samples, local_world(context.world_size), look=watcher)
    except RanksFailed as ended:
        why = (
            timeout_finding(limit)
            if watcher.timed_out
            else Finding("the comparison failed", fix=f"--keep DIR keeps {log.name}")
        )
        return failed(name, [why], ExitCode(ended.args[0]))
    wrong = [one for one in verdict.differences if not one.passes]
    if wrong:
        findings = [
            Finding(f"{one.name} differs by {one.error:.1e}, more than {one.tolerance:.0e}") for one in wrong[:5]
        ]
        return failed(name, findings, ExitCode.DIFFERENT)
    worst = max((one for one in verdict.differences if one.tolerance), key=lambda one: one.error / one.tolerance)
    gradients = len(verdict.differences) - 3
    found = f"logits, loss and {gradients} gradients within their tolerances in fp32; closest is {worst.name}: "
    found += f"{worst.error:.1e} of {worst.tolerance:.0e}"
    if bits := settings.finetuning.quantization_bit:
        found += f"; the base model is not quantized to {bits} bits on either side"
    stage = settings.run.stage
    if stage in (*PAIR_STAGES, "kto", "cls"):
        found += f"; the loss of {stage} is not compared"
    return passed(name, found)


def _settings(context: Context) -> Settings:
    """Return settings that compute the same as Transformers: the full model or adapters, without routing losses."""
    settings, parallel = context.settings, context.settings.parallel
    steps = -(-_ROWS * parallel.model_parallel_size // context.world_size)
    if parallel.virtual_stages:
        steps = -(-steps // parallel.pipeline_model_parallel_size) * parallel.pipeline_model_parallel_size
    finetuning = settings.finetuning
    if finetuning.finetuning_type != "lora":
        frozen = context.architecture.vision is None  # a missing vision encoder may not be trained
        finetuning = FinetuningSettings(freeze_vision_tower=frozen, freeze_multi_modal_projector=frozen)
    finetuning = finetuning.model_copy(update={"quantization_bit": None})
    plain = ExpertSettings()
    routing = {
        name: getattr(plain, name)
        for name in (
            "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_expert_capacity_factor",
            "moe_pad_expert_input_to_capacity", "moe_router_load_balancing_type", "moe_router_bias_update_rate",
        )
    }  # fmt: skip
    return settings.model_copy(
        update={
            "batch": BatchSettings(per_device_train_batch_size=1, gradient_accumulation_steps=steps),
            "finetuning": finetuning,
            "experts": settings.experts.model_copy(update=routing),
            "precision": PrecisionSettings(),
        }
    )
