"""The options of the verbs that write text, `infer` and `serve`: which model, how it writes, and what computes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from megatune.cli.command import Command
from megatune.config.options import Flag, Given, foreign_keys
from megatune.config.setting import Group
from megatune.errors import Finding

if TYPE_CHECKING:
    from megatune.generation.adapters import AdaptedModel
    from megatune.generation.options import GenerationOptions

FOREIGN = foreign_keys("write")


class ModelOptions(Group):
    """model."""

    model: Annotated[str | None, Flag("MODEL")] = None
    """MODEL by a flag: a Hugging Face model, a checkpoint-N, a run's output_dir, each with a model or an adapter, or
    an id on a hub"""
    adapters: Annotated[list[str], Flag("A ...", commas=True)] = Field(default=[])
    """folders of adapters on MODEL, applied in this order; without MODEL, on the base that they name"""
    model_name_or_path: Annotated[str | None, Flag("BASE")] = None
    """where MODEL is an adapter: its base (what its adapter_config.json names)"""
    model_revision: Annotated[str, Flag("REVISION")] = "main"
    """branch, tag or commit of a model on a hub"""
    cache_dir: Annotated[str | None, Flag("DIR")] = None
    """where files of a hub are kept (the hub's own cache)"""


class QuestionOptions(Group):
    """questions."""

    system: str | None = None
    """the system message, or a .txt file with it (the chat template's own)"""
    enable_thinking: bool | None = None
    """the thinking switch of chat templates that have one (the template's own)"""


class MediaOptions(Group):
    """images and videos, as in training."""

    image_max_pixels: int | None = None
    """larger images are scaled down to this number of pixels"""
    image_min_pixels: int | None = None
    """smaller images are scaled up to this number of pixels"""
    video_max_pixels: int | None = None
    """larger frames are scaled down to this number of pixels"""
    video_min_pixels: int | None = None
    """smaller frames are scaled up to this number of pixels"""
    video_fps: float | None = None
    """frames that are sampled of each second of a video"""
    video_maxlen: int | None = None
    """frames that are sampled of a video at most"""


class SamplingOptions(Group):
    """sampling (what is left out comes from the model's generation_config.json)."""

    max_new_tokens: int = 512
    """tokens of an answer at most"""
    temperature: Annotated[float | None, Flag("T")] = 0.0
    """0: greedy decoding; model: as generation_config.json says (default: 0)"""
    top_p: float | None = None
    """sample from the most likely tokens that reach this probability together"""
    top_k: Annotated[int | None, Flag("K")] = None
    """sample from the K most likely tokens"""
    repetition_penalty: float | None = None
    """above 1 makes tokens that have occurred less likely"""
    seed: int | None = None
    """the same seed samples the same answer"""
    stop_words: Annotated[list[str], Flag("TEXT ...")] = Field(default=[])
    """end an answer after one of these, in addition to the model's own stop tokens"""


class BackendOptions(Group):
    """backend."""

    infer_backend: Annotated[str, Flag("NAME")] = "transformers"
    """transformers (pt is the same), or vllm where it is installed"""
    vllm_tensor_parallel_size: int | None = None
    """GPUs that vLLM spreads the model over"""
    vllm_gpu_memory_utilization: float | None = None
    """fraction of a GPU's memory for vLLM"""
    vllm_max_model_len: int | None = None
    """tokens of a prompt and its answer at most"""


class WriterOptions(BackendOptions, SamplingOptions, MediaOptions, QuestionOptions, ModelOptions):
    """The options of both verbs."""


_VLLM = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len")


class Checked(NamedTuple):
    """What the options say, found good.

    Attributes:
        name: of the model, as it was given.
    """

    name: str
    options: GenerationOptions
    adapted: AdaptedModel
    vllm: dict[str, Any] | None  # vLLM's arguments; None for Transformers


def check(
    command: Command[Any],
    given: Given[Any],
    more: Iterable[Finding] = (),
    pictures: Iterable[tuple[str, str]] = (),
    *,
    brings_pictures: bool = False,
) -> Checked:
    """Check the options before the seconds that loading takes.

    Args:
        more: what else is wrong.
        pictures: kind and file of images and videos of the first message.
        brings_pictures: whether what is asked later may have images and videos of its own.

    Raises:
        MegatuneError: (SETTINGS) options; (INPUT) an adapter, a picture or a file of the system message that is
            missing; (UNAVAILABLE) a backend that is not installed.
    """
    from megatune.generation.opening import model_or_adapters, system_message
    from megatune.generation.options import GenerationOptions, PictureFile, check_options

    asked = given.options
    model, base = _model(given)
    given.stop([*_model_findings(command, given, model), *_backend_findings(asked), *more])
    say_ignored(command, given)
    values = {each.name: getattr(asked, each.name) for each in fields(GenerationOptions) if hasattr(asked, each.name)}
    values |= {"stop_words": tuple(asked.stop_words), "system": system_message(asked.system)}
    options = GenerationOptions(**values, pictures=tuple(PictureFile(kind, path) for kind, path in pictures))  # type: ignore[arg-type]
    check_options(options, brings_pictures=brings_pictures)
    name, adapted = model_or_adapters(model, base, asked.adapters)
    vllm = None
    if asked.infer_backend == "vllm":
        vllm = {each: value for each in _VLLM if (value := getattr(asked, f"vllm_{each}")) is not None}
        from megatune.generation.vllm_backend import check_vllm

        check_vllm(options, adapted.adapters)
    return Checked(name, options, adapted, vllm)


def say_ignored(command: Command[Any], given: Given[Any]) -> None:
    """Print on stderr which keys change nothing, a line for each reason."""
    keys: dict[str, list[str]] = {}
    for entry in given.entries:
        if (why := command.foreign.ignored.get(entry.key)) is not None:
            keys.setdefault(why, []).append(entry.key)
    for why, names in keys.items():
        print(f"accepted   {', '.join(names)}: {why}", file=sys.stderr)


def _model(given: Given[Any]) -> tuple[str | None, str | None]:
    """Return the model, and the base of one that is an adapter; a file's model_name_or_path is the model."""
    asked = given.options
    model, base = next(iter(given.words), asked.model), asked.model_name_or_path
    if model is None and base is not None and (not asked.adapters or given.origin("model_name_or_path") != "flag"):
        return base, None
    return model, base


def _model_findings(command: Command[Any], given: Given[Any], model: str | None) -> Iterator[Finding]:
    if given.words and given.options.model is not None:
        why = f"MODEL is {given.words[0]} already"
        yield Finding("names the model a second time", "--model", why, "leave one of them out")
    if model is None and not given.options.adapters and not given.findings:
        fix = f"{command.program} MODEL; in a file, model_name_or_path: FOLDER, or the id of a model on a hub"
        yield Finding("model_name_or_path is missing", command.program, fix=fix)


def _backend_findings(options: BackendOptions) -> list[Finding]:
    name = options.infer_backend
    if name not in ("transformers", "vllm"):
        what = f"{name} is not supported" if name in ("sglang", "lmdeploy") else f"{name!r} is unknown"
        return [Finding(what, "--infer_backend", fix="transformers, or vllm where it is installed")]
    given = [each for each in _VLLM if getattr(options, f"vllm_{each}") is not None and name != "vllm"]
    why = "vLLM is not the backend"
    return [Finding("has no effect", f"--vllm_{each}", why, "add --infer_backend vllm") for each in given]
