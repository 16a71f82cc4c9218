"""Model families: each is one file of declarations, listed here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from megatune.architecture import Architecture
from megatune.errors import ExitCode, Finding, MegatuneError, closest, with_article
from megatune.families import (
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    gemma3,
    gemma3_text,
    gemma4,
    gemma4_text,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granite,
    hy_v3,
    internvl,
    kimi_k2,
    llama,
    minimax_m2,
    ministral3,
    mistral,
    mistral3,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen2_vl,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    qwen3_vl_moe,
    scores,
    seed_oss,
    smollm3,
)
from megatune.families.family import Config, Family
from megatune.hub.models import no_folder
from megatune.references import ref, remove

_MODULES = (
    llama, qwen2, qwen3, mixtral, qwen2_moe, qwen3_moe, deepseek_v3, qwen3_next, qwen2_vl, qwen2_5_vl, qwen3_vl,
    qwen3_vl_moe, qwen3_5, qwen3_5_moe, mistral, seed_oss, granite, smollm3, phi3, deepseek_v2, glm4_moe, glm4_moe_lite,
    hy_v3, ernie4_5_moe, gemma3_text, olmo3, minimax_m2, gpt_oss, ministral3, mistral3, kimi_k2, gemma3, internvl,
    gemma4_text, gemma4, glm, glm4, olmo2, olmoe, dots1, ernie4_5, exaone4,
)  # fmt: skip
FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (*(module.FAMILY for module in _MODULES), qwen3_5.TEXT, qwen3_5_moe.TEXT)
}


def read_config(model_dir: str | Path) -> dict[str, object]:
    """Read the checkpoint's config.json.

    Raises:
        MegatuneError: INPUT, when there is no such folder or file, or it is not JSON.
    """
    folder = Path(model_dir)
    path = folder / "config.json"
    if not folder.is_dir():
        raise no_folder(str(model_dir))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        why, fix = "it describes the model", "give the folder of a checkpoint"
        raise MegatuneError(Finding("there is no config.json", str(folder), why, fix), ExitCode.INPUT) from None
    except (OSError, ValueError, RecursionError) as error:
        why = "objects are nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise MegatuneError(Finding(f"cannot be read: {why}", str(path)), ExitCode.INPUT) from None
    if not isinstance(config, dict):
        raise MegatuneError(Finding("is not a JSON object", str(path)), ExitCode.INPUT)
    return config


def load_architecture(
    model_dir: str | Path, stage: str | None = None, num_labels: int | None = None, mtp_num_layers: int = 0
) -> Architecture:
    """Read a checkpoint's config.json as an Architecture.

    Args:
        stage, num_labels, mtp_num_layers: `Settings.task` of a run: the trained model is returned, see `as_trained`.

    Raises:
        MegatuneError: INPUT, with every reason why this engine cannot compute the model; SETTINGS, if the stage cannot
            train it.
    """
    where = str(Path(model_dir) / "config.json")
    architecture = read_architecture(read_config(model_dir), where)
    return architecture if stage is None else as_trained(architecture, where, stage, num_labels, mtp_num_layers)


def as_trained(
    architecture: Architecture, where: str, stage: str, num_labels: int | None = None, mtp_num_layers: int = 0
) -> Architecture:
    """Return the model that a stage trains, see `scores.as_trained`, with the given number of MTP layers.

    Raises:
        MegatuneError: SETTINGS, if the stage cannot train it, or its family does not support MTP layers.
    """
    trained = scores.as_trained(architecture, where, stage, num_labels)
    if mtp_num_layers and FAMILIES[architecture.model_type].mtp is None:
        having = ", ".join(sorted(name for name, family in FAMILIES.items() if family.mtp is not None))
        what = f"{ref('mtp_num_layers', mtp_num_layers)} with {with_article(architecture.model_type)}"
        why = f"multi-token prediction layers are supported for {having}"
        raise MegatuneError(Finding(what, where, why, remove("mtp_num_layers")), ExitCode.SETTINGS)
    return replace(trained, mtp_num_layers=mtp_num_layers)


def read_architecture(config: Config, where: str) -> Architecture:
    """Read a parsed config.json as an Architecture.

    Raises:
        MegatuneError: INPUT, with every reason why this engine cannot compute the model.
    """
    model_type = str(config.get("model_type", ""))
    family = FAMILIES.get(model_type)
    if family is None:
        near = closest(model_type, FAMILIES)
        hint = f" (nearest: {near})" if near else ""
        why = f"supported families: {', '.join(sorted(FAMILIES))}{hint}"
        if "auto_map" in config:
            why = f"it needs code from its repository, which is never run; {why}"
        what, fix = f"model_type {model_type!r} is not supported", "train a checkpoint of one of these families"
        raise MegatuneError(Finding(what, where, why, fix), ExitCode.INPUT)
    findings = family.check(config, where)
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    return family.architecture(config)


__all__ = ["FAMILIES", "Family", "as_trained", "load_architecture", "read_architecture", "read_config"]
