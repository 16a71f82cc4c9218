"""The settings of a rehearsal: those of the file with smaller sizes; the number of processes, and another layout to
resume in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from megatune.architecture import Architecture
from megatune.config.rules import check
from megatune.config.settings import ParallelSettings, Settings, setting_value, with_settings
from megatune.config.values import shown
from megatune.rehearse.outcome import Change

_SAVED, _AFTER = 3, 3  # steps until and after the save: a wrong optimizer state shows in the second step after it
_SCALED = 28  # in fp16 about 24 steps are skipped, until the loss scale has decreased from 2^32
_TEXT, _WITH_MEDIA = 256, 1024  # tokens
_PIXELS = 128 * 128
_ROWS = 96
_EVALUATED = 8
_ANSWER = 4  # tokens
_TIMEOUT = 300  # seconds of a collective operation


def shrink_settings(
    settings: Settings, architecture: Architecture, layout: Mapping[str, Any], model_dir: str, output_dir: str
) -> tuple[Settings, list[Change]]:
    """Return settings for a few short steps in the file's layout, and the changes to report.

    Args:
        architecture: of the small model.
        layout: layout settings for the small model, by name.
    """
    changes = [
        *_layout(layout),
        *_batch(settings),
        *_data(settings, architecture),
        *_steps(settings),
        *_trained(settings, architecture),
        *_environment(settings, model_dir, output_dir),
    ]
    reported = []
    for path, value, why in changes:
        was = setting_value(settings, path)
        if was != value and why:
            reported.append(Change(path.partition(".")[2], shown(was), shown(value), why))
    return with_settings(settings, {path: value for path, value, _ in changes}), reported


_Changes = Iterator[tuple[str, Any, str]]  # "group.name", value, reason; changes without a reason are not reported


def _layout(layout: Mapping[str, Any]) -> _Changes:
    for name, value in layout.items():
        yield f"parallel.{name}", value, "for fewer layers, split in the same way"


def _batch(settings: Settings) -> _Changes:
    batch, parallel = settings.batch, settings.parallel
    pp = parallel.pipeline_model_parallel_size
    least = 2 * pp if parallel.virtual_stages and pp < 4 else max(pp, 2)
    steps = min(batch.gradient_accumulation_steps, least)
    yield "batch.gradient_accumulation_steps", steps, "a full pipeline, and sums over micro-batches"
    why = "two rows are enough"
    yield "batch.per_device_train_batch_size", min(batch.per_device_train_batch_size, 2), why
    evaluates = settings.evaluation.eval_strategy != "no"
    yield "batch.per_device_eval_batch_size", min(batch.per_device_eval_batch_size, 2), why if evaluates else ""


def _data(settings: Settings, architecture: Architecture) -> _Changes:
    data = settings.data
    has_media = architecture.vision is not None
    longest = min(data.cutoff_len, _WITH_MEDIA if has_media else _TEXT)
    yield "data.cutoff_len", longest, "shorter rows"
    if longest < data.cutoff_len and data.truncation_strategy in ("drop", "error"):
        yield "data.truncation_strategy", "budget", "keep rows that fit the file's cutoff_len"
    if has_media:
        for name in ("image_max_pixels", "video_max_pixels"):
            yield f"data.{name}", min(getattr(data, name), _PIXELS), "small images and videos"
        yield "data.video_maxlen", min(data.video_maxlen, 4), "few frames"
    yield "data.max_samples", min(data.max_samples or _ROWS, _ROWS), "stage 1 reads more rows"
    if data.val_size:
        yield "data.val_size", min(data.val_size, float(_EVALUATED)), "few rows to evaluate"
    if data.streaming:
        yield "data.buffer_size", min(data.buffer_size, 2 * _EVALUATED), "several blocks"
    yield "data.preprocessing_num_workers", None, ""
    yield "data.dataloader_num_workers", 0, "the ranks already use all cores"
    yield "data.tokenized_path", None, "the file's folder is not changed"
    yield "data.on_bad_row", "skip", "stage 1 reports bad rows"
    yield "data.max_bad_rows", None, ""


def _steps(settings: Settings) -> _Changes:
    optimizer, evaluation = settings.optimizer, settings.evaluation
    saved = _SCALED if settings.precision.fp16 else _SAVED
    yield "optimizer.max_steps", saved + _AFTER, "enough to save, resume and compare"
    if optimizer.warmup_steps > 1:
        yield "optimizer.warmup_steps", 1.0, "fewer steps"
    yield "optimizer.lr_scheduler_kwargs", _scheduler(optimizer.lr_scheduler_kwargs), "fewer steps"
    yield "checkpoint.save_strategy", "steps", f"a checkpoint at step {saved}"
    yield "checkpoint.save_steps", saved, f"a checkpoint at step {saved}"
    yield "checkpoint.save_total_limit", None, "checkpoints are compared"
    if evaluation.eval_strategy != "no":
        yield "evaluation.eval_strategy", "steps", f"an evaluation at step {saved}"
        yield "evaluation.eval_steps", saved, f"an evaluation at step {saved}"
    if settings.generates:
        if evaluation.eval_generate_steps:
            yield "evaluation.eval_generate_steps", saved, f"answers at step {saved}"
        yield "evaluation.eval_generate_samples", min(evaluation.eval_generate_samples, _EVALUATED), "few answers"
        yield "evaluation.eval_generate_tokens", min(evaluation.eval_generate_tokens, _ANSWER), "short answers"
    yield "logging.logging_steps", 1, "every step is compared"


def _scheduler(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return scheduler arguments for a few steps."""
    steps = {name: min(value, 2) for name, value in given.items() if name in ("num_decay_steps", "num_stable_steps")}
    return {**given, **steps}


def _trained(settings: Settings, architecture: Architecture) -> _Changes:
    finetuning, recompute = settings.finetuning, settings.recompute
    count, layers = finetuning.freeze_trainable_layers, architecture.num_layers
    if finetuning.finetuning_type == "freeze" and count:
        most = max(each for each in range(1, max(2, layers // 2 + 1)) if layers % each == 0)
        kept = min(abs(count), most)
        yield "finetuning.freeze_trainable_layers", kept if count > 0 else -kept, "fewer layers"
    if finetuning.adapter_name_or_path:
        yield "finetuning.adapter_name_or_path", [], "adapters of the real model do not fit the small one"
        yield "finetuning.create_new_adapter", False, "there is no adapter to start from"
    if recompute.recompute_num_layers:
        yield "recompute.recompute_num_layers", 1, "fewer layers"


def _environment(settings: Settings, model_dir: str, output_dir: str) -> _Changes:
    preference = settings.preference
    yield "model.model_name_or_path", model_dir, ""
    yield "model.mcore_model", None, "weights are random"
    yield "model.rope_scaling", None, "it is in config.json of the small model"
    yield "model.mtp_num_layers", 0, "the small model has no MTP layers"
    yield "model.model_revision", "main", ""
    yield "run.output_dir", output_dir, ""
    for name, value in (("overwrite_output_dir", False), ("resume_from_checkpoint", None), ("num_processes", None)):
        yield f"run.{name}", value, ""
    yield "run.ddp_timeout", min(settings.run.ddp_timeout, _TIMEOUT), "no collective takes longer"
    yield "run.max_restarts", 0, "failures must be visible"
    yield "run.exit_duration_in_mins", None, "a rehearsal is short"
    yield "run.memory_check", "off", "stage 1 checks it for the real model"
    if preference.ref_model:
        yield "preference.ref_model", model_dir, "the small model itself"
        yield "preference.ref_model_adapters", [], "they do not fit the small model"
    yield "checkpoint.push_to_hub", False, "nothing is uploaded"
    yield "checkpoint.hub_model_id", None, ""
    yield "logging.report_to", ["none"], "nothing is uploaded"
    yield "logging.use_swanlab", False, ""
    yield "logging.plot_loss", False, ""
    yield "logging.profile", False, "it is only useful for the real model"


MOST_PROCESSES = 32
_MOST_OTHER = 8


def rehearsal_world_size(parallel: ParallelSettings, world_size: int) -> int:
    """Return the smallest world size with two data-parallel replicas if the real run has several, for dense layers and
    for experts.

    Args:
        world_size: of the real run, which is valid for the layout.
    """
    smallest = parallel.smallest_world

    def has_replicas(world: int) -> tuple[bool, bool]:
        return world > parallel.model_parallel_size, world > parallel.expert_parallel_size

    wanted = has_replicas(world_size)
    for times in (1, 2):
        world = smallest * times
        if world_size % world == 0 and world <= MOST_PROCESSES and has_replicas(world) == wanted:
            return world
    return smallest


def describe_layout(parallel: ParallelSettings, world_size: int) -> str:
    """Return every size above 1, as in plans, and sequence parallelism: tp2 pp4 vpp2 ep8 dp4 sp."""
    words = parallel.layout_name(world_size, has_experts=parallel.expert_model_parallel_size > 1)
    return f"{words} sp" if parallel.sequence_parallel else words or "one process"


def other_layout(settings: Settings, world_size: int, architecture: Architecture) -> tuple[Settings, int] | None:
    """Return settings with another layout that trains the same rows per step, and its world size; None if there is
    none.

    The layout that differs in the most sizes is chosen, and of several the one with the fewest processes above one.
    """
    rows = settings.batch.gradient_accumulation_steps * (world_size // settings.parallel.model_parallel_size)
    before = settings.parallel.sizes(world_size)
    best: tuple[tuple[int, int], Settings, int] | None = None
    for changes, world in _candidates(settings.parallel, architecture):
        changed = with_settings(settings, {f"parallel.{name}": value for name, value in changes.items()})
        replicas = world // changed.parallel.model_parallel_size
        if rows % replicas:
            continue
        changed = with_settings(changed, {"batch.gradient_accumulation_steps": rows // replicas})
        now = changed.parallel.sizes(world)
        if now == before or check(changed, architecture, world):
            continue
        score = sum(now[name] != before[name] for name in now), -world if world > 1 else -_MOST_OTHER
        if best is None or score > best[0]:
            best = score, changed, world
    return None if best is None else best[1:]


def _candidates(parallel: ParallelSettings, architecture: Architecture) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield layouts of a few processes, without checking rules."""
    plain: dict[str, Any] = {
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "expert_tensor_parallel_size": 1 if architecture.moe is not None else None,
    }
    sizes, experts = (1, 2), (1, 2) if architecture.moe is not None else (1,)
    contexts = (1, 2) if parallel.context_parallel_size == 1 else (1,)
    for tp, pp, cp, ep, dp in product(sizes, sizes, contexts, experts, sizes):
        changes = {
            **plain,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "context_parallel_size": cp,
            "expert_model_parallel_size": ep,
            "sequence_parallel": tp > 1,
        }
        world = tp * pp * cp * dp
        if world <= _MOST_OTHER and world % (ep * pp) == 0:
            yield changes, world
