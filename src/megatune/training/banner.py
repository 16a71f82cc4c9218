"""The summary that a run prints before its first step, and the details that it writes to a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.groups.performance import RecomputeSettings
from megatune.config.load import Loaded
from megatune.config.pipeline import pipeline_chunks
from megatune.config.rules.rule import has_effect
from megatune.config.settings import ParallelSettings, Settings, counted_steps
from megatune.config.values import counted
from megatune.engine import device
from megatune.engine.groups import RankCoordinates
from megatune.engine.layers import linear
from megatune.engine.layers.attention.choice import describe
from megatune.engine.optimizer import shards_optimizer
from megatune.families.quantized import form_of
from megatune.families.trained import (
    adapted_modules,
    frozen_parts,
    kind_of_adapters,
    num_adapter_parameters,
    whole_modules,
)
from megatune.hub.models import MAIN
from megatune.plan.estimate import Estimate
from megatune.plan.flops import num_parameters
from megatune.plan.memory.tensors import num_trained_parameters
from megatune.plan.pages.words import fullest, seconds
from megatune.training.loop import Trainer
from megatune.training.measurements import profile_dir, profiled_ranks

_FUSIONS = ("rms_norm_fusion", "apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion")


@dataclass(frozen=True, slots=True)
class Start:
    """Information on the start of a run in addition to its trainer.

    Attributes:
        asked: the user's settings; None if no command line started the run.
        planned: the plan for the actual rows, or None.
        lines: lines for the details: plans, and which checkpoints were verified or skipped.
    """

    asked: Loaded | None = None
    planned: Estimate | None = None
    lines: Sequence[str] = ()


def summary(trainer: Trainer, resumed: Path | None, start: Start) -> Iterator[str]:
    """Yield the lines printed before the first step: warnings, and one each on model, layout, data, loss and plan."""
    settings, assembly, feed = trainer.settings, trainer.assembly, trainer.feed
    architecture, coords = assembly.architecture, assembly.coords
    yield from (line for line in start.lines if line.startswith(("warning", "skipped")))
    yield from (f"warning    {line}" for line in (*feed.warnings, *_too_long_a_warmup(trainer)))
    counts = _counts(settings, architecture)
    yield f"model      {_model(settings)}: {architecture.model_type}, {counts}{_base(settings)}"
    yield from _kept(trainer)
    layout = " × ".join(_layout(settings.parallel, coords, architecture))
    yield f"layout     {layout} on {coords.world_size} × {device.name()}, {settings.precision.params_dtype}"
    template = "" if settings.run.stage == "pt" else f"; template {_template(settings, start.asked)}"
    yield f"data       {feed.summary}{template}"
    if loss := trainer.objective.describe():
        yield f"loss       {loss}{_reference(trainer)}"
    if start.planned is not None:
        yield f"plan       {fullest(start.planned)}; about {seconds(start.planned.time.total)} a step"
    if start.asked is not None and (words := _shares(start.asked.settings, trainer.schedule.total_steps)):
        yield f"steps      {', '.join(words)}, as ratios of {trainer.schedule.total_steps}"
    if resumed is not None:
        yield f"resume     {_resume(trainer, resumed)}"


def _model(settings: Settings) -> str:
    """Return the model's name, with its revision unless it is `main`."""
    revision = settings.model.model_revision
    return f"{settings.model.model_name_or_path}" + ("" if revision == MAIN else f" at {revision[:12]}")


def _counts(settings: Settings, architecture: Architecture) -> str:
    trained, every = num_trained_parameters(architecture, settings.finetuning), num_parameters(architecture)
    if settings.finetuning.finetuning_type == "lora":
        return f"{every:,} parameters, {kind_of_adapters(settings.finetuning)} of {trained:,} trained"
    return f"{every:,} parameters" + (f", {trained:,} of them trained" if trained < every else "")


def _template(settings: Settings, asked: Loaded | None) -> str:
    """Return the template's name and where it was set."""
    name, origin = settings.data.template, (asked.origins if asked is not None else {}).get("data.template", "")
    is_of_model = name is None
    if version := settings.data.swift_version:
        name = f"ms-swift {version}'s {'for the model' if is_of_model else name}"
    elif is_of_model:
        name = "of the model's tokenizer"
    where = {"default": "not set", "override": "command line", "flag": "command line"}.get(origin, origin)
    return f"{name} ({where})" if where else str(name)


def _too_long_a_warmup(trainer: Trainer) -> Iterator[str]:
    """Yield a warning if the run ends before the end of its warm-up."""
    rate, steps = trainer.learning_rate, trainer.schedule.total_steps
    if rate.warmup_steps >= steps:
        reached = f"the learning rate reaches {rate.at(steps - 1):.3g}, not {rate.learning_rate:g}"
        yield f"warm-up takes {counted(rate.warmup_steps, 'step')}, all of the run's {steps}: {reached}"


def _shares(settings: Settings, total_steps: int) -> list[str]:
    """Return the intervals that were given as ratios of the run, in steps, if they have an effect."""
    counts = counted_steps(settings, total_steps).items()
    return [f"{path.partition('.')[2]} {steps}" for path, steps in counts if has_effect(settings, path)]


def _reference(trainer: Trainer) -> str:
    """Describe the reference model; "" if the loss has none."""
    if trainer.reference is None:
        return ""
    preference, finetuning = trainer.settings.preference, trainer.settings.finetuning
    chain = list(finetuning.adapter_name_or_path)
    if preference.ref_model is not None:
        return f", compared with {' + '.join((preference.ref_model, *preference.ref_model_adapters))}"
    if finetuning.finetuning_type != "lora":
        return ", compared with the model that the run starts from"
    if not chain or finetuning.create_new_adapter:
        return f", compared with the base {'and ' + ', '.join(chain) if chain else 'without adapter'}"
    *merged, last = chain
    base = f"the base and {', '.join(merged)}" if merged else "the base without adapter"
    return f", compared with {base} (create_new_adapter: true compares with {last})"


def _resume(trainer: Trainer, resumed: Path) -> str:
    """Describe the resumed checkpoint: steps done, steps left, and state that is not restored."""
    settings, step, last = trainer.settings, trainer.state.step, trainer.schedule.total_steps
    fresh = {"optimizer": settings.run.no_load_optim, "random numbers": settings.run.no_load_rng}
    named = " and ".join(name for name, is_fresh in fresh.items() if is_fresh)
    left = f" of {last}, so nothing is left to train: raise max_steps or num_train_epochs" if step >= last else ""
    return f"{resumed}: {counted(step, 'step')} done{left}" + (f", with a new {named}" if named else "")


def banner(trainer: Trainer, resumed: Path | None) -> Iterator[str]:
    """Yield the details of model, layout, data, schedule and checkpoint."""
    settings, assembly, schedule = trainer.settings, trainer.assembly, trainer.schedule
    architecture, coords, parallel = assembly.architecture, assembly.coords, settings.parallel
    yield (
        f"model      {_model(settings)}: {architecture.model_type}, "
        f"{architecture.num_layers} layers, {num_parameters(architecture):,} parameters"
    )
    if (weights := settings.model.mcore_model) is not None and resumed is None:
        yield f"weights    {weights}, in Megatron-Core's format"
    yield from _kept(trainer)
    if trained := _trained(settings, architecture):
        yield f"trained    {trained}"
    if begun := _begun(settings.finetuning, resumed):
        yield f"adapters   {begun}"
    yield (
        f"layout     {' × '.join(_layout(parallel, coords, architecture))} on {coords.world_size} × {device.name()} "
        f"({device.BACKEND}, {torch.get_num_threads()} threads each)"
    )
    masters = _base(settings) + _masters(settings, architecture)
    kind = "distributed " if shards_optimizer(parallel, settings.optimizer) else ""
    narrow = [name for name in ("exp_avg", "exp_avg_sq") if getattr(settings.optimizer, f"{name}_dtype") == "bf16"]
    averages = f", {' and '.join(narrow)} in bf16" if narrow else ""
    averages += _on_host(settings)
    yield f"numbers    {settings.precision.params_dtype}{masters}; {kind}{settings.optimizer.optimizer}{averages}"
    yield f"kernels    {'; '.join(_kernels(settings, architecture))}"
    if kept := _recompute(settings.recompute):
        yield f"recompute  {kept}"
    yield from (f"data       {line}" for line in trainer.feed.lines)
    if loss := trainer.objective.describe():
        yield f"loss       {loss}{_reference(trainer)}"
    batch = settings.batch
    yield (
        f"batch      {counted(batch.per_device_train_batch_size, 'row')} × "
        f"{batch.gradient_accumulation_steps} micro-batch{'es' * (batch.gradient_accumulation_steps != 1)} × "
        f"dp {coords.dp_size} = {counted(schedule.global_batch_size, 'row')} a step"
    )
    number = schedule.num_epochs
    epochs = "" if number is None else f", {schedule.steps_per_epoch} an epoch ({number:.2f} epochs)"
    yield f"schedule   {counted(schedule.total_steps, 'step')}{epochs}, into {settings.run.output_dir}"
    if resumed is not None:
        yield f"resume     {_resume(trainer, resumed)}"
    if ranks := profiled_ranks(settings):
        first, last = settings.logging.profile_step_start + 1, settings.logging.profile_step_end
        done = "; before the step at which this run resumes, so not repeated" if trainer.state.step >= last else ""
        numbers = ", ".join(map(str, ranks))
        yield f"profile    steps {first} to {last} of rank {numbers}, in {profile_dir(settings)}{done}"


def _kept(trainer: Trainer) -> Iterator[str]:
    if names := trainer.assembly.carried.names:
        yield f"kept       {len(names)} tensors that this model does not use ({names[0]}, ...): written back unchanged"


def _begun(trainable: FinetuningSettings, resumed: Path | None) -> str:
    """Describe which adapter training continues, and which are merged into the base; "" for a new adapter."""
    chain = list(trainable.adapter_name_or_path)
    last = None if trainable.create_new_adapter or not chain else chain.pop()
    merged = [f"merged into the base: {', '.join(chain)}"] if chain else []
    return "; ".join([*([f"training of {last} continues"] if last is not None and resumed is None else []), *merged])


def _base(settings: Settings) -> str:
    """Describe the quantization of the base; "" if it is not quantized."""
    if (form := form_of(settings.finetuning)) is None:
        return ""
    return f", base in {form.kind}" + (" with double quantization" if form.double else "")


def _masters(settings: Settings, architecture: Architecture) -> str:
    """Describe the fp32 tensors of a 16-bit model."""
    if settings.precision.params_dtype == "float32":
        return ""
    if settings.finetuning.finetuning_type != "lora":
        return ", fp32 master weights and gradients"
    whole = whole_modules(architecture, settings.finetuning)
    return ", fp32 adapters" + (f" and master weights of {', '.join(whole)}" if whole else "")


def _on_host(settings: Settings) -> str:
    optimizer = settings.optimizer
    if not optimizer.optimizer_cpu_offload:
        return ""
    what = "averages" if settings.precision.params_dtype == "float32" else "averages and master weights"
    share = optimizer.optimizer_offload_fraction
    return f", {'' if share == 1 else f'{share:.0%} of '}{what} on the host"


def _trained(settings: Settings, architecture: Architecture) -> str:
    """Describe trained, adapted and frozen parts, and parts with other learning rates; "" if all parts are trained
    alike."""
    trainable, optimizer = settings.finetuning, settings.optimizer
    rates = {"vision tower": optimizer.vision_lr, "mergers": optimizer.merger_lr}
    own = [f"{part} at a highest learning rate of {rate:g}" for part, rate in rates.items() if rate is not None]
    frozen = frozen_parts(architecture, trainable)
    if not frozen and not own and trainable.finetuning_type != "lora":
        return ""
    trained, all_of_them = num_trained_parameters(architecture, trainable), num_parameters(architecture)
    parts = [*([f"frozen: {', '.join(frozen)}"] if frozen else []), *own]
    if trainable.finetuning_type != "lora":
        return "; ".join((f"{trained:,} of {all_of_them:,} parameters", *parts))
    all_of_them += num_adapter_parameters(architecture, trainable)
    what = f"{kind_of_adapters(trainable)} on {adapted_modules(architecture, trainable)}"
    if whole := whole_modules(architecture, trainable):
        parts.insert(0, f"whole: {', '.join(whole)}")
    if (ratio := trainable.loraplus_lr_ratio) is not None:
        parts.append(f"B at {ratio:g} times the learning rate (LoRA+)")
    counts = f"{trained:,} of {all_of_them:,} parameters ({100 * trained / all_of_them:.2g} %)"
    return "; ".join((f"{counts}: {what}", *parts))


def _layout(parallel: ParallelSettings, coords: RankCoordinates, architecture: Architecture) -> Iterator[str]:
    yield f"tp {coords.tp_size}{' + sp' if parallel.sequence_parallel else ''}"
    if coords.cp_size > 1:
        yield f"cp {coords.cp_size} ({parallel.cp_comm_type})"
    chunks = [str(chunk.num_layers) for chunk in pipeline_chunks(parallel, architecture.num_layers)]
    uneven = f" ({' + '.join(chunks)} layers)" if len(set(chunks)) > 1 else ""
    yield f"pp {coords.pp_size}{'' if parallel.virtual_stages else uneven}"
    if parallel.virtual_stages:
        yield f"vpp {parallel.virtual_stages}{uneven}"
    if architecture.moe is not None:
        yield f"ep {coords.ep_size}" + (f" + etp {coords.etp_size}" if coords.etp_size > 1 else "")
    yield f"dp {coords.dp_size}"


def _kernels(settings: Settings, architecture: Architecture) -> Iterator[str]:
    """Yield the kernels in use where there is a choice."""
    performance = settings.performance
    yield f"attention: {describe(settings, architecture)}"
    if architecture.moe is not None:
        experts = settings.experts
        yield f"experts: {'grouped' if experts.moe_grouped_gemm else 'one by one'}, {experts.moe_token_dispatcher_type}"
    if scaling := settings.precision.fp8:
        slow = "" if device.HAS_GPU else ", slowly on a CPU"
        yield f"linear layers: 8-bit floats, scaled {scaling}{slow}"
    if layers := linear.describe(settings, architecture):
        yield layers
    if not architecture.num_labels:
        yield f"cross-entropy: {'in chunks' if performance.cross_entropy_loss_fusion else 'whole logits'}"
    fused = [name for name in _FUSIONS if getattr(performance, name)]
    if fused:
        yield f"with {', '.join(fused)}"
    why = device.why_not_compiled() or ("" if performance.compile_operators else "compile_operators is false")
    if device.HAS_GPU and why:
        yield f"fused operators are not compiled, which is slower: {why}"


def _recompute(recompute: RecomputeSettings) -> str:
    if recompute.recompute_granularity == "full":
        count = recompute.recompute_num_layers
        return f"full, {recompute.recompute_method or 'uniform'}{f', {count} layers' if count else ''}"
    return ", ".join(recompute.selective_modules)
