"""Resolves and checks the options of commands that generate text: model, adapters, generation options and backend."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatune.config.options import ParsedArguments
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.generation.inputs import AdaptedModel, adapted_model, nearest_folder
from megatune.generation.options import BackendOptions, GenerationOptions, MediaFile, check_options
from megatune.hub.megatron import is_torch_dist
from megatune.hub.models import is_hub_id, open_model
from megatune.hub.vocabulary import as_adapted
from megatune.references import assign, ref

_VLLM = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len")


class InferenceConfig(NamedTuple):
    """The checked options of a command.

    Attributes:
        name: name of the model, as given.
        vllm: vLLM's arguments; None for Transformers.
    """

    name: str
    options: GenerationOptions
    adapted: AdaptedModel
    vllm: dict[str, Any] | None


def resolve_config(
    given: ParsedArguments[Any],
    more: Iterable[Finding] = (),
    media: Iterable[tuple[str, str]] = (),
    *,
    accepts_media: bool = False,
) -> InferenceConfig:
    """Check the options before the model is loaded.

    Args:
        more: further findings.
        media: kind and file of images and videos of the first message.
        accepts_media: whether later prompts may have their own images and videos.

    Raises:
        MegatuneError: (SETTINGS) options; (INPUT) an adapter, an image, a video or a system message file that is
            missing; (UNAVAILABLE) a backend that is not installed.
    """
    options = given.options
    model, base = model_and_base(given)
    given.stop([*model_findings(given, model), *_backend_findings(options), *more])
    for line in given.lines:
        print(line, file=sys.stderr)
    values = {name: getattr(options, name) for name in GenerationOptions.model_fields if hasattr(options, name)}
    files = tuple(MediaFile(*each) for each in media)  # type: ignore[arg-type]
    values |= {"system": _system_message(options.system), "media": files}
    generation = GenerationOptions(**values)
    check_options(generation, accepts_media=accepts_media)
    name, adapted = _model_or_adapters(model, base, options.adapters)
    if options.infer_backend != "vllm":
        return InferenceConfig(name, generation, adapted, None)
    from megatune.generation.vllm import check_vllm

    check_vllm(generation, adapted.adapters)
    vllm = {each: value for each in _VLLM if (value := getattr(options, f"vllm_{each}")) is not None}
    return InferenceConfig(name, generation, adapted, vllm)


def model_and_base(given: ParsedArguments[Any]) -> tuple[str | None, str | None]:
    """Return the model, and the base if the model is an adapter; model_name_or_path of a file is the model."""
    options = given.options
    model, base = next(iter(given.words), options.model), options.model_name_or_path
    if model is None and base is not None and (not options.adapters or given.origin("model_name_or_path") != "flag"):
        return base, None
    return model, base


def model_findings(given: ParsedArguments[Any], model: str | None) -> Iterator[Finding]:
    """Yield findings about how the model is named."""
    if given.words and given.options.model is not None:
        why = f"MODEL is {given.words[0]} already"
        yield Finding("names the model a second time", "--model", why, "leave one of them out")
    if model is None and not given.options.adapters and not given.findings:
        key = "model_name_or_path"
        fix = f"{given.program} MODEL; in a file, {assign(key, 'FOLDER')}, or the id of a model on a hub"
        yield Finding(f"{ref(key)} is missing", given.program, fix=fix)


def _backend_findings(options: BackendOptions) -> list[Finding]:
    name = options.infer_backend
    if name not in ("transformers", "vllm"):
        what = f"{name} is not supported" if name in ("sglang", "lmdeploy") else f"{name!r} is unknown"
        return [Finding(what, "--infer_backend", fix="write transformers, or vllm if it is installed")]
    given = [each for each in _VLLM if getattr(options, f"vllm_{each}") is not None and name != "vllm"]
    why = "vLLM is not the backend"
    return [Finding("has no effect", f"--vllm_{each}", why, "add --infer_backend vllm") for each in given]


def _model_or_adapters(model: str | None, base: str | None, adapters: list[str]) -> tuple[str, AdaptedModel]:
    """Return the model's name, and the model with its adapters, or the base of adapters without a model."""
    if model is not None:
        return model, adapted_model(model, base, adapters)
    first, *more = adapters
    adapted = adapted_model(first, base)
    if more or not adapted.adapters:  # raises for folders without an adapter
        adapted = adapted_model(adapted.base, adapters=adapters)
    return first, adapted


def model_dir(adapted: AdaptedModel, revision: str, cache_dir: str | None) -> Path:
    """Return the model's folder, downloaded from a hub if needed, with the tokens that its adapters add."""
    name, path = adapted.base, Path(adapted.base)
    if path.is_dir() and is_torch_dist(path):
        what, why = f"{name} is in Megatron-Core's format", "answers are generated with Transformers"
        fix = f"megatune export --to_hf true --mcore_model {name} --output_dir OUT, and then OUT"
        raise MegatuneError(Finding(what, "MODEL", why, fix), ExitCode.INPUT)
    if not is_hub_id(name) and not path.is_dir():
        return path  # `find_model` reports the problem
    try:
        return as_adapted(open_model(name, revision, cache_dir), adapted.adapters).fetch()
    except MegatuneError as error:
        if path.is_dir() or (near := nearest_folder(path)) is None:
            raise
        findings = [replace(each, fix=f"did you mean {near}? Else {each.fix}") for each in error.findings]
        raise MegatuneError(findings, ExitCode.INPUT) from error


def _system_message(value: str | None) -> str | None:
    """Return the system message: a text, or the content of a .txt file."""
    if value is None or not value.endswith(".txt"):
        return value
    try:
        return Path(value).read_text(encoding="utf-8").strip("\n")
    except (OSError, ValueError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        finding = Finding(f"{value} cannot be read", "--system", why, "name a text file of UTF-8, or write the text")
        raise MegatuneError(finding, ExitCode.INPUT) from error
