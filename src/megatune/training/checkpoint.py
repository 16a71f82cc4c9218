"""Checkpoints: a Hugging Face model as it is, and beside it what a resume needs.

checkpoint-N/training/ holds the optimizer under Hugging Face names (any layout reads them), state.json, and each
rank's random numbers. Nothing in it is a pickle.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import safetensors.torch

from megatune import __version__
from megatune.architecture import Architecture
from megatune.bridge.adapter_writer import write_adapter_config
from megatune.bridge.assemble import Assembly, load_optimizer
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.bridge.save import save_adapters, save_optimizer, save_weights
from megatune.config.settings import Settings
from megatune.engine import device, groups
from megatune.engine.model import gather_parameters
from megatune.engine.optimizer import load_scalars, main_shards, scalars
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.adapters import ADAPTER_CONFIG
from megatune.families.trained import trained_weights
from megatune.families.weights import hf_shapes
from megatune.plan.flops import num_parameters
from megatune.plan.memory.tensors import num_trained_parameters
from megatune.training.agreement import on_rank_0
from megatune.training.megatron import write_beside
from megatune.training.storage.files import ensure_room, write_atomically, writing
from megatune.training.storage.model_files import reward_config, small_files, with_dtype
from megatune.training.storage.store import CheckpointStore, rotate

_TRAINING = "training"
_STATE = "state.json"
# Of the model itself, whose adapters are loaded onto it.
_OF_MODEL = ("config.json", "generation_config.json")


@dataclass(slots=True)
class TrainState:
    """How far a run has come.

    Attributes:
        step: optimizer steps done.
        rows_digest: of all that determines the rows (data/cache/key.py).
        global_batch_size: rows per step; with `seed` it determines which rows a step trains.
        best_loss, best_step: the lowest evaluation loss so far, and the step it was measured at.
        stream: where streamed data resumes (data/streaming/blocks.py); None without streaming.
        base: digest of what adapters are beside (training/base.py); "" without adapters.
        reference: digest of the model that pairs are compared with (training/reference.py); "" without one.
        reward_sum, reward_pairs: of the pairs trained, see `objectives.preference.RunningReward`.
    """

    step: int = 0
    rows_digest: str = ""
    global_batch_size: int = 0
    seed: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    stream: dict[str, Any] | None = None
    base: str = ""
    reference: str = ""
    reward_sum: float = 0.0
    reward_pairs: float = 0.0


def save_checkpoint(
    store: CheckpointStore, assembly: Assembly, settings: Settings, state: TrainState, source: Path
) -> Path:
    """Write, digest and commit the checkpoint of `state.step`, then delete those beyond save_total_limit. Collective.

    Args:
        source: the model's own folder: its tokenizer and configuration go into the checkpoint.

    Raises:
        MegatuneError: CANNOT_WRITE; earlier checkpoints are as they were.
    """
    gather_parameters(assembly.model)
    needed = _bytes_needed(assembly, settings)
    on_rank_0(lambda: ensure_room(store.output_dir, needed))
    folder = on_rank_0(lambda: store.begin(state.step))
    with writing(folder, needed):
        files = list(_write(folder, assembly, settings, state))
        if assembly.place.rank == 0:
            files += _copy_model_files(source, folder, settings, assembly.architecture)
    digests = [digest for part in groups.gather(store.digest(state.step, files)) for digest in part]
    model = {key: getattr(settings.model, key) for key in ("model_name_or_path", "model_revision")}
    rows = {"layout": _layout(assembly, settings), "consumed_rows": state.step * state.global_batch_size}
    metadata = {"megatune": __version__, **model, **rows}

    def commit() -> Path:
        path = store.commit(state.step, digests, metadata)
        best = [] if state.best_step is None else [store.checkpoint(state.best_step)]
        rotate(store.output_dir, settings.checkpoint.save_total_limit, [path, *best])
        return path

    return on_rank_0(commit)


def _write(folder: Path, assembly: Assembly, settings: Settings, state: TrainState) -> Iterator[Path]:
    model = assembly.parameters, assembly.architecture, assembly.place
    if _has_adapters(settings):
        yield from save_adapters(folder, *model, settings.finetuning)
    else:
        yield from save_weights(folder, *model, form=assembly.form)
    if settings.checkpoint.save_format == "torch_dist" and assembly.place.rank == 0:
        yield from write_beside(folder, assembly.architecture, assembly.form, state.step)
    if settings.checkpoint.save_only_model:
        return
    training = folder / _TRAINING
    training.mkdir(exist_ok=True)
    shards = main_shards(assembly.optimizer)
    yield from save_optimizer(training, assembly.parameters, shards, assembly.architecture, assembly.place)
    path = training / f"rng-{assembly.place.rank:05d}.safetensors"
    safetensors.torch.save_file(device.rng_state(), path)
    yield path
    if assembly.place.rank == 0:
        content = {**asdict(state), "optimizer": scalars(assembly.optimizer), "layout": _layout(assembly, settings)}
        write_atomically(training / _STATE, json.dumps(content, indent=1))
        yield training / _STATE


def _copy_model_files(source: Path, folder: Path, settings: Settings, architecture: Architecture) -> list[Path]:
    """Copy tokenizer, chat template and generation settings; config.json gets the dtype that was trained. Beside
    adapters there is their own configuration instead of the model's."""
    names = [path.name for path in small_files(source)]
    if _has_adapters(settings):
        names = [name for name in names if name not in _OF_MODEL]
    for name in names:
        shutil.copyfile(source / name, folder / name)
    if _has_adapters(settings):
        base, finetuning = settings.model.model_name_or_path, settings.finetuning
        write_adapter_config(folder, architecture, finetuning, base or str(source), dropout=finetuning.lora_dropout)
        return [*(folder / name for name in names), folder / ADAPTER_CONFIG]
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = with_dtype(config, settings.precision.params_dtype)
    if architecture.num_labels:
        config = reward_config(config, source)
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return [folder / name for name in names]


def _bytes_needed(assembly: Assembly, settings: Settings) -> int:
    """Return the bytes of the checkpoint's tensors."""
    trained = num_trained_parameters(assembly.architecture, settings.finetuning)
    parameters = trained if _has_adapters(settings) else num_parameters(assembly.architecture)
    model = parameters * (4 if settings.precision.params_dtype == "float32" else 2)
    model *= 2 if settings.checkpoint.save_format == "torch_dist" else 1
    if settings.checkpoint.save_only_model:
        return model
    kinds = {"adam": 2, "sgd": 1}[settings.optimizer.optimizer] + (settings.precision.params_dtype != "float32")
    return model + 4 * kinds * trained


def _has_adapters(settings: Settings) -> bool:
    return settings.finetuning.finetuning_type == "lora"


def _layout(assembly: Assembly, settings: Settings) -> dict[str, Any]:
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    return {
        **{name: getattr(settings.parallel, name) for name in sizes},
        "virtual_pipeline_model_parallel_size": settings.parallel.virtual_stages,
        "data_parallel_size": assembly.place.dp_size,
        "params_dtype": settings.precision.params_dtype,
    }


def read_state(checkpoint: Path) -> TrainState | None:
    """Read how far the run had come; None where the checkpoint is a model only."""
    path = checkpoint / _TRAINING / _STATE
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    return TrainState(**{field.name: content[field.name] for field in fields(TrainState) if field.name in content})


def load_checkpoint(checkpoint: Path, assembly: Assembly, settings: Settings, expected: TrainState) -> TrainState:
    """Restore optimizer, counters and random numbers into an assembly whose weights came from this checkpoint.

    Args:
        expected: what this run would train on; a run may not continue with other rows or another batch unnoticed.

    Raises:
        MegatuneError: SETTINGS, naming what was changed; INPUT, when the state cannot be read.
    """
    training = checkpoint / _TRAINING
    content = json.loads((training / _STATE).read_text(encoding="utf-8"))
    counters, layout = content.pop("optimizer"), content.pop("layout")
    state = TrainState(**content)
    findings = list(_changed(checkpoint, state, expected))
    if not settings.run.no_load_optim:
        findings += _trained_otherwise(training, assembly, settings)
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    if not settings.run.no_load_optim:
        shards = main_shards(assembly.optimizer)
        load_optimizer(checkpoint, assembly.parameters, shards, assembly.architecture, settings.finetuning)
        load_scalars(assembly.optimizer, counters)
    path = training / f"rng-{assembly.place.rank:05d}.safetensors"
    # Another layout has other ranks; no number is drawn in training that their states could change.
    if layout == _layout(assembly, settings) and path.is_file() and not settings.run.no_load_rng:
        device.set_rng_state(safetensors.torch.load_file(path))
    return state


def _changed(checkpoint: Path, state: TrainState, expected: TrainState) -> Iterator[Finding]:
    size = "rows per step (batch size × accumulation × data-parallel size)"
    for what, name in ((size, "global_batch_size"), ("seed", "seed")):
        before, after = getattr(state, name), getattr(expected, name)
        if before != after:
            changed = f"{what} was {before}, and is {after} in this run"
            why = "rows already trained could not be told from those to come"
            fix = f"set it to {before} again, or start anew with overwrite_output_dir: true"
            yield Finding(changed, str(checkpoint), why, fix)
    if state.rows_digest != expected.rows_digest:
        what = "the training rows are others than those the run began with"
        why = "a file of the data sets, the tokenizer, the template or another data setting was changed"
        fix = "put it back, or start anew with overwrite_output_dir: true"
        yield Finding(what, str(checkpoint), why, fix)
    if state.base != expected.base:
        what = "the adapters were trained beside another base"
        why = "the model's weights, or those of an adapter merged into them, are others than then, or in other bits"
        fix = "name the base that the run began with, or start anew from the adapters: adapter_name_or_path"
        yield Finding(what, str(checkpoint), why, fix)
    elif state.reference != expected.reference:
        what = "answers were compared with another reference"
        why = "the weights of ref_model, or of the model that the run started from, are others than then"
        fix = "name the reference that the run began with, or start anew with overwrite_output_dir: true"
        yield Finding(what, str(checkpoint), why, fix)


def _trained_otherwise(training: Path, assembly: Assembly, settings: Settings) -> Iterator[Finding]:
    """Compare what the run trains with what the checkpoint has optimizer state of."""
    held = {name.partition("/")[2] for name in SafetensorsFolder(training, "optimizer").names()}
    architecture = assembly.architecture
    trained = {
        name
        for weight, layer in trained_weights(architecture, settings.finetuning)
        for name in hf_shapes(weight, architecture, layer)
    }
    if not held or held == trained:  # plain SGD keeps nothing
        return
    less, more = sorted(held - trained), sorted(trained - held)
    what = "other weights were trained than this run trains"
    lists = ((more, "has no optimizer state of"), (less, "has some that this run would freeze, of"))
    why = "; ".join(f"it {said} {len(names)} tensors, such as {names[0]}" for names, said in lists if names)
    fix = "train the same ones again (finetuning_type, freeze_*), or start anew from it: model_name_or_path"
    yield Finding(what, str(training), why, fix)
