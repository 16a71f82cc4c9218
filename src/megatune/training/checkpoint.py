"""Checkpoints: a Hugging Face model and the training state to resume from.

checkpoint-N/training/ holds the optimizer state under Hugging Face names (which any layout can read), state.json, and
the RNG state of each rank. It contains no pickles.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch

from megatune.architecture import Architecture
from megatune.bridge.adapter_files import ADAPTER, adapter_files, finish_adapter, write_adapter_config
from megatune.bridge.assemble import Assembly, load_optimizer
from megatune.bridge.checked_files import end_check
from megatune.bridge.file_set import FileSet
from megatune.bridge.file_stream import SmallFile, WrittenFile
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.bridge.shard_files import ShardFiles, optimizer_files
from megatune.config.settings import Settings
from megatune.engine import device, groups
from megatune.engine.optimizer import load_scalars, main_shards, scalars
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.trained import trained_weights
from megatune.families.weights import hf_shapes
from megatune.hub.digests import FileDigest
from megatune.training.conversion import write_torch_dist
from megatune.training.model_files import scored_config, small_files, with_dtype, write_chat_template
from megatune.training.storage.manifest import TRAINING_FOLDER
from megatune.training.train_state import STATE_NAME, TrainState, changed_since, read_state

# In state.json: the token whose embedding gets no gradient. Saving a reward model may add one to config.json; a resumed
# run must not use it if the initial model had none, as in Transformers.
_PADDING_TOKEN = "padding_token"
_MODEL_FILES = ("config.json", "generation_config.json")  # not copied next to adapters


class CheckpointFiles:
    """The files of a checkpoint that this rank writes. Created by all ranks together.

    Args:
        extra: small files by name that rank 0 adds to the training state.

    Attributes:
        num_bytes: size of all tensors.
        model_bytes: size of the tensors of the model, or of the adapters.
    """

    def __init__(
        self, assembly: Assembly, settings: Settings, state: TrainState, extra: Mapping[str, bytes] | None = None
    ) -> None:
        parameters, layout = assembly.parameters, (assembly.architecture, assembly.coords)
        self._sets: list[FileSet | ShardFiles] = []
        if _has_adapters(settings):
            self._sets = [adapter_files(parameters, *layout)]
        else:
            self._sets = [FileSet("model", parameters, *layout, form=assembly.form, carried=assembly.carried)]
        self._small: list[SmallFile] = []
        if not settings.checkpoint.save_only_model:
            shards = main_shards(assembly.optimizer)
            self._sets.append(optimizer_files(parameters, shards, *layout, folder=TRAINING_FOLDER))
            numbers = safetensors.torch.save(device.rng_state())
            self._small.append(SmallFile(f"{TRAINING_FOLDER}{_rng_name(assembly)}", numbers))
        if self._small and assembly.coords.rank == 0:
            content = asdict(state) | {
                "optimizer": scalars(assembly.optimizer),
                "layout": layout_of(assembly, settings),
                _PADDING_TOKEN: assembly.model[0].module.padding_token,
            }
            own = {STATE_NAME: json.dumps(content, indent=1).encode()}
            self._small += [
                SmallFile(f"{TRAINING_FOLDER}{name}", data) for name, data in {**(extra or {}), **own}.items()
            ]
        self.num_bytes = sum(files.num_bytes for files in self._sets)
        self.model_bytes = self._sets[0].num_bytes

    def __iter__(self) -> Iterator[WrittenFile]:
        """Yield the files, each of which has to be read before the next. Collective. The rank's shard of the optimizer
        state comes first, as it needs no communication."""
        for files in reversed(self._sets):
            yield from files.files()
        yield from self._small


def complete_checkpoint(
    folder: Path, digests: Sequence[FileDigest], assembly: Assembly, settings: Settings, source: Path, step: int
) -> list[FileDigest]:
    """Complete a checkpoint on one rank after all ranks have written their files.

    Args:
        digests: of the files that the ranks wrote.
        assembly: its weights may have changed since then, and are not read.
        source: the model's folder, from which tokenizer and configuration are copied.

    Returns:
        Digests of the unchanged files; all other files have none yet.
    """
    if _has_adapters(settings):
        finish_adapter(folder, assembly.architecture, settings.finetuning)
        digests = [file for file in digests if not file.name.startswith(ADAPTER)]
    elif settings.checkpoint.save_format == "torch_dist":
        write_torch_dist(folder, assembly.architecture, assembly.form, step)
    _copy_model_files(source, folder, settings, assembly.architecture)
    return list(digests)


def _rng_name(assembly: Assembly) -> str:
    return f"rng-{assembly.coords.rank:05d}.safetensors"


def _copy_model_files(source: Path, folder: Path, settings: Settings, architecture: Architecture) -> None:
    """Copy tokenizer, chat template and generation settings, and write config.json with the dtype of training. Adapters
    get an adapter_config.json instead of the model's configuration."""
    names = [path.name for path in small_files(source)]
    if _has_adapters(settings):
        names = [name for name in names if name not in _MODEL_FILES]
    for name in names:
        shutil.copyfile(source / name, folder / name)
    write_chat_template(settings, source, folder)
    if _has_adapters(settings):
        base, finetuning = settings.model.model_name_or_path, settings.finetuning
        write_adapter_config(folder, architecture, finetuning, base or str(source), dropout=finetuning.lora_dropout)
        return
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = with_dtype(config, settings.precision.params_dtype)
    if architecture.num_labels:
        config = scored_config(config, source, architecture.num_labels, settings.run.label_kind)
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _has_adapters(settings: Settings) -> bool:
    return settings.finetuning.finetuning_type == "lora"


def layout_of(assembly: Assembly, settings: Settings) -> dict[str, Any]:
    """Return the settings that determine which rank holds which tensors."""
    sizes = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
    )
    return {
        **{name: getattr(settings.parallel, name) for name in sizes},
        "expert_tensor_parallel_size": settings.parallel.expert_tensor_size,
        "virtual_pipeline_model_parallel_size": settings.parallel.virtual_stages,
        "data_parallel_size": assembly.coords.dp_size,
        "params_dtype": settings.precision.params_dtype,
    }


def check_continues(checkpoint: Path, architecture: Architecture, settings: Settings, expected: TrainState) -> None:
    """Check that rows, batch size and trained weights are those of the checkpoint, before anything is loaded.

    Args:
        expected: the initial state of this run.

    Raises:
        MegatuneError: SETTINGS, naming the changes.
    """
    state = read_state(checkpoint)
    assert state is not None, "a checkpoint that was chosen has training state"
    findings = list(changed_since(checkpoint, state, expected))
    if not settings.run.no_load_optim:
        findings += _trained_weights_changed(checkpoint / TRAINING_FOLDER, architecture, settings)
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)


def load_checkpoint(checkpoint: Path, assembly: Assembly, settings: Settings) -> TrainState:
    """Restore optimizer, counters and RNG state of a checkpoint that `check_continues` accepted, and from which the
    assembly's weights were loaded.

    Raises:
        MegatuneError: INPUT, if the state cannot be read.
        DamagedCheckpointError: files read since `choose_checkpoint` are damaged.
    """
    training = checkpoint / TRAINING_FOLDER
    content = json.loads((training / STATE_NAME).read_text(encoding="utf-8"))
    if _PADDING_TOKEN in content:
        for chunk in assembly.model:
            chunk.module.padding_token = content[_PADDING_TOKEN]
    state = read_state(checkpoint)
    assert state is not None, "a checkpoint that was chosen has training state"
    if not settings.run.no_load_optim:
        shards = main_shards(assembly.optimizer)
        load_optimizer(checkpoint, assembly.parameters, shards, assembly.architecture, settings.finetuning)
        load_scalars(assembly.optimizer, content["optimizer"])
    path = training / _rng_name(assembly)
    # With another layout, the RNG state is that of a new run. Only lora_dropout uses it in training.
    if _is_same(content["layout"], layout_of(assembly, settings)) and path.is_file() and not settings.run.no_load_rng:
        device.set_rng_state(safetensors.torch.load_file(path))
    _raise_damage(checkpoint)
    return state


class DamagedCheckpointError(MegatuneError):
    """Raised on every rank if files of a checkpoint are found to be damaged while they are read."""


def _raise_damage(checkpoint: Path) -> None:
    """Raise an error if any rank found damaged files while loading. Collective."""
    check = end_check()
    mine = [] if check is None else [*check.problems.values()]
    if problems := sorted({problem for part in groups.all_gather_object(mine) for problem in part}):
        raise DamagedCheckpointError([Finding(each, str(checkpoint)) for each in problems], ExitCode.INPUT)


def _is_same(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Compare layouts. Checkpoints of earlier versions lack some of the sizes."""
    return all(now.get(name) == value for name, value in then.items())


def _trained_weights_changed(training: Path, architecture: Architecture, settings: Settings) -> Iterator[Finding]:
    """Compare the weights that the run trains with those that have optimizer state in the checkpoint."""
    held = {name.partition("/")[2] for name in SafetensorsFolder(training, "optimizer").names()}
    trained = {
        name
        for weight, layer in trained_weights(architecture, settings.finetuning)
        for name in hf_shapes(weight, architecture, layer)
    }
    if not held or held == trained:  # plain SGD has no state
        return
    less, more = sorted(held - trained), sorted(trained - held)
    what = "the trained weights have changed since this checkpoint"
    lists = ((more, "no optimizer state", ""), (less, "optimizer state", " that this run would freeze"))
    why = "; ".join(
        f"it has {has} for {len(names)} tensors{end}, such as {names[0]}" for names, has, end in lists if names
    )
    fix = "train the same ones again (finetuning_type, freeze_*), or start a new run from it: model_name_or_path"
    yield Finding(what, str(training), why, fix)
