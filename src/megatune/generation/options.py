"""The options of text generation: model, sampling and backend, shared by `infer`, `serve` and `evaluate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from megatune.config.options import Flag
from megatune.config.setting import Count, Group, Positive
from megatune.errors import ExitCode, Finding, MegatuneError, closest


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

    image_max_pixels: Count | None = None
    """larger images are scaled down to this number of pixels"""
    image_min_pixels: Count | None = None
    """smaller images are scaled up to this number of pixels"""
    crop_to_patches: bool | None = None
    """InternVL cuts an image into tiles, as in training with this setting"""
    video_max_pixels: Count | None = None
    """larger frames are scaled down to this number of pixels"""
    video_min_pixels: Count | None = None
    """smaller frames are scaled up to this number of pixels"""
    video_fps: Positive | None = None
    """frames that are sampled of each second of a video"""
    video_maxlen: Count | None = None
    """frames that are sampled of a video at most"""


class SamplingOptions(Group):
    """sampling (what is left out comes from the model's generation_config.json)."""

    max_new_tokens: Count = 512
    """tokens of an answer at most"""
    temperature: Annotated[float | None, Flag("T"), Field(ge=0)] = 0.0
    """0: greedy decoding; model: as generation_config.json says (default: 0)"""
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    """sample from the most likely tokens that reach this probability together"""
    top_k: Annotated[int | None, Flag("K"), Field(ge=1)] = None
    """sample from the K most likely tokens"""
    repetition_penalty: Positive | None = None
    """above 1 makes tokens that have occurred less likely"""
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    """the same seed samples the same answer"""
    stop_words: Annotated[list[str], Flag("TEXT ...")] = Field(default=[])
    """end an answer after one of these, in addition to the model's own stop tokens"""


class BackendOptions(Group):
    """backend."""

    infer_backend: Annotated[str, Flag("NAME")] = "transformers"
    """transformers (pt is the same), or vllm where it is installed"""
    vllm_tensor_parallel_size: Count | None = None
    """GPUs that vLLM spreads the model over"""
    vllm_gpu_memory_utilization: Annotated[float | None, Field(gt=0, le=1)] = None
    """fraction of a GPU's memory for vLLM"""
    vllm_max_model_len: Count | None = None
    """tokens of a prompt and its answer at most"""


class WriterOptions(BackendOptions, SamplingOptions, MediaOptions, QuestionOptions, ModelOptions):
    """The options of the verbs that write text."""


class MediaFile(NamedTuple):
    """A file of an image or a video."""

    kind: Literal["image", "video"]
    path: str


class Sampling(SamplingOptions):
    """The sampling options of one answer. None means the value in the model's generation_config.json."""

    keep_stop_word: bool = True
    """whether the text that ended an answer belongs to it"""


class GenerationOptions(Sampling, MediaOptions, QuestionOptions):
    """The options of a `Generator`: default sampling options, system message, images and videos."""

    raw: bool = False
    """continue the prompt as it is, without the chat template"""
    media: tuple[MediaFile, ...] = ()
    """images and videos of the first message, in order"""


def check_options(options: GenerationOptions, *, accepts_media: bool = False) -> None:
    """Raise if options would have no effect, or files of images and videos are missing.

    Args:
        accepts_media: whether later prompts may have their own images and videos.

    Raises:
        MegatuneError: (SETTINGS) with one finding for each problem; (INPUT) with one for each missing file.
    """
    if findings := [*_without_effect(options, accepts_media)]:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    if findings := [_missing_file(each) for each in options.media if not Path(each.path).is_file()]:
        raise MegatuneError(findings, ExitCode.INPUT)


def _without_effect(options: GenerationOptions, accepts_media: bool) -> Iterator[Finding]:
    if not all(options.stop_words):
        yield Finding("an empty text ends every answer", "--stop_words", fix="leave it out")
    why = "temperature 0 means greedy decoding"
    for flag, value in (("--top_p", options.top_p), ("--top_k", options.top_k)):
        if options.temperature == 0 and value is not None:
            yield Finding("has no effect", flag, why, "add --temperature 0.7")
    for flag, given in (("--system", options.system), ("--enable_thinking", options.enable_thinking)):
        if options.raw and given is not None:
            yield Finding("has no effect", flag, "--raw leaves the chat template out", f"drop {flag} or --raw")
    kinds = {item.kind for item in options.media}
    for name in MediaOptions.model_fields:
        kind = "video" if name.startswith("video") else "image"
        if getattr(options, name) is not None and kind not in kinds and not accepts_media:
            yield Finding("has no effect", f"--{name}", f"there is no {kind}", f"add --{kind}, or leave it out")


def _missing_file(item: MediaFile) -> Finding:
    path = Path(item.path)
    if path.is_dir():
        return Finding(f"{path} is a folder", f"--{item.kind}", fix=f"name a file: --{item.kind} {path}/FILE")
    siblings = [child.name for child in path.parent.iterdir() if child.is_file()] if path.parent.is_dir() else []
    fix = "check the path; it is relative to the folder in which the command runs"
    if nearest := closest(path.name, siblings):
        fix = f"did you mean {path.parent / nearest}?"
    return Finding(f"there is no file {path}", f"--{item.kind}", fix=fix)
