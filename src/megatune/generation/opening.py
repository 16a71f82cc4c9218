"""Opens what a user names: a model, a checkpoint or adapters, their backend, and the system message."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.generation.adapters import AdaptedModel, adapted_model
from megatune.generation.inputs import nearest_folder
from megatune.hub.megatron import is_torch_dist
from megatune.hub.models import is_hub_id, open_model

if TYPE_CHECKING:
    from megatune.generation.generator import LoadBackend


def model_or_adapters(model: str | None, base: str | None, adapters: list[str]) -> tuple[str, AdaptedModel]:
    """Return the name of what is asked, and what it is: a model with its adapters, or adapters that name their base."""
    if model is not None:
        return model, adapted_model(model, base, adapters)
    first, *more = adapters
    adapted = adapted_model(first, base)
    if more or not adapted.adapters:  # which refuses those that are none
        adapted = adapted_model(adapted.base, adapters=adapters)
    return first, adapted


def backend_loader(vllm: dict[str, Any] | None) -> LoadBackend:
    """Return what loads the backend: Transformers, or vLLM with these arguments."""
    if vllm is None:
        from megatune.generation.transformers_backend import TransformersBackend

        return TransformersBackend.load
    from megatune.generation.vllm import VllmBackend

    return partial(VllmBackend.load, arguments=vllm)


def model_dir(name: str, revision: str, cache_dir: str | None) -> Path:
    """Return the folder that is named, or that a model on a hub is fetched into."""
    path = Path(name)
    if path.is_dir() and is_torch_dist(path):
        what, why = f"{name} is in Megatron-Core's format", "answers are generated with Transformers"
        fix = f"megatune export --to_hf true --mcore_model {name} --output_dir OUT, and then OUT"
        raise MegatuneError(Finding(what, "MODEL", why, fix), ExitCode.INPUT)
    if not is_hub_id(name) and not path.is_dir():
        return path  # `find_model` says what is wrong with it
    try:
        return open_model(name, revision, cache_dir).fetch()
    except MegatuneError as error:
        if path.is_dir() or (near := nearest_folder(path)) is None:
            raise
        findings = [replace(each, fix=f"did you mean {near}? Else {each.fix}") for each in error.findings]
        raise MegatuneError(findings, ExitCode.INPUT) from error


def system_message(value: str | None) -> str | None:
    """Return the system message: a text, or what a .txt file has."""
    if value is None or not value.endswith(".txt"):
        return value
    try:
        return Path(value).read_text(encoding="utf-8").strip("\n")
    except (OSError, ValueError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        finding = Finding(f"{value} cannot be read", "--system", why, "name a text file of UTF-8, or write the text")
        raise MegatuneError(finding, ExitCode.INPUT) from error
