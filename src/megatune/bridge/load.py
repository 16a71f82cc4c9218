"""Loads a Hugging Face checkpoint into the engine: each rank reads the slices it owns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.parameters import LocalParameter
from megatune.bridge.reader import SafetensorsFolder
from megatune.engine.optimizer import MainShard
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES
from megatune.families.weights import hf_shapes, layers_of


def check_keys(folder: SafetensorsFolder, architecture: Architecture) -> None:
    """Account for every key of the checkpoint.

    Raises:
        MegatuneError: INPUT, naming every key that is missing, unknown or of another shape than config.json says.
    """
    family = FAMILIES[architecture.model_type]
    expected = {
        name: shape
        for weight in family.weight_map(architecture)
        for layer in layers_of(weight, architecture)
        for name, shape in hf_shapes(weight, architecture, layer).items()
    }
    names = folder.names()
    ignored = re.compile("|".join(family.ignored(architecture)))
    missing, unknown = expected.keys() - names, {key for key in names - expected.keys() if not ignored.fullmatch(key)}
    model_type, where = architecture.model_type, str(folder.folder)
    findings = []
    if missing:
        findings.append(
            Finding(
                f"{len(missing)} keys are missing: {_some(missing)}",
                where,
                f"config.json describes a {model_type} that has them",
                "use the config.json and the weights of one checkpoint",
            )
        )
    if unknown:
        findings.append(
            Finding(
                f"{len(unknown)} keys are unknown: {_some(unknown)}",
                where,
                f"a {model_type} has no place for them, and nothing is left out silently",
                "check that config.json names the right model_type, or remove them",
            )
        )
    for name, shape in expected.items():
        if name in names and folder.shape(name) != shape:
            findings.append(Finding(f"{name} is {list(folder.shape(name))}, config.json says {list(shape)}", where))
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)


def _some(keys: Iterable[str]) -> str:
    keys = sorted(keys)
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


@torch.no_grad()
def load_weights(model_dir: str | Path, parameters: Iterable[LocalParameter], architecture: Architecture) -> None:
    """Fill this rank's parameters from a Hugging Face checkpoint, cast to their dtype; padding is zero.

    Raises:
        MegatuneError: INPUT; see `check_keys` and SafetensorsFolder.
    """
    folder = SafetensorsFolder(model_dir)
    check_keys(folder, architecture)
    for local in parameters:
        folder.fill(local.parameter.data.view(-1), local.segments(architecture))


@torch.no_grad()
def load_optimizer(
    checkpoint: Path,
    parameters: Iterable[LocalParameter],
    shards: Mapping[Tensor, MainShard],
    architecture: Architecture,
) -> None:
    """Fill this rank's share of the optimizer from the training state of a checkpoint, whatever layout wrote it.

    Master weights come from the training state, or from the model itself where that was trained in fp32.

    Raises:
        MegatuneError: INPUT, when the state belongs to another optimizer or model.
    """
    folder, model = SafetensorsFolder(checkpoint / "training", "optimizer"), SafetensorsFolder(checkpoint)
    names = folder.names()
    kinds = {name.partition("/")[0] for name in names}
    for local in parameters:
        shard = shards.get(local.parameter)
        if shard is None:
            continue
        if set(shard.state) != kinds - {"main"}:
            raise MegatuneError(
                Finding(
                    f"holds {', '.join(sorted(kinds - {'main'})) or 'no state'}, this run's optimizer needs "
                    f"{', '.join(sorted(shard.state)) or 'none'}",
                    str(folder.folder),
                    "the optimizer was changed between the runs",
                    "resume with the same optimizer, or start from the checkpoint as a model (model_name_or_path)",
                ),
                ExitCode.INPUT,
            )
        segments = local.segments(architecture)
        for kind, target in {"main": shard.main, **shard.state}.items():
            source, prefix = (folder, f"{kind}/") if kind in kinds else (model, "")
            source.fill(target, segments, prefix, start=shard.start)
