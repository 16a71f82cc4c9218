"""`megatune infer`: chats with a model, or answers a prompt, lines of input or data sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from megatune.cli.command import Command
from megatune.config.options import Flag, ParsedArguments
from megatune.config.setting import Count, Group
from megatune.data.text_scores import ROUGES, Scored, require_libraries, text_scores
from megatune.errors import ExitCode, Finding
from megatune.generation.options import WriterOptions
from megatune.processes import quick_imports


class PromptOptions(Group):
    """prompt."""

    prompt: str | None = None
    """the prompt to answer"""
    stream: bool | None = None
    """print answers while they are generated (default on a terminal, except for data sets)"""
    raw: bool = False
    """continue the plain prompt, without the chat template"""
    image: Annotated[list[str], Flag("FILE", repeats=True)] = Field(default=[])
    """an image for the model, at <image> in the prompt or before its text; may be repeated"""
    video: Annotated[list[str], Flag("FILE", repeats=True)] = Field(default=[])
    """a video for the model, at <video> in the prompt or before its text; may be repeated"""


class RowOptions(Group):
    """data sets."""

    dataset_dir: Annotated[str, Flag("DIR")] = "data"
    """the folder of dataset_info.json, and of files that are not in the working folder"""
    result_path: Annotated[str | None, Flag("FILE")] = None
    """a new file for the answers (for data sets: MODEL/infer_result/TIMESTAMP.jsonl)"""
    max_batch_size: Count = 1
    """rows that Transformers answers in one batch"""
    model_name: Annotated[list[str] | None, Flag("TEXT ...")] = None
    """replaces {{name}} in the rows; two texts: for Chinese and for other rows (from MODEL's run.yaml)"""
    model_author: Annotated[list[str] | None, Flag("TEXT ...")] = None
    """replaces {{author}} in the rows, likewise"""


class DatasetOptions(RowOptions):
    """data sets."""

    val_dataset: Annotated[list[str], Flag("D ...")] = Field(default=[])
    """answer these: names, files or ids as in training; NAME#N samples N rows"""
    metric: Literal["acc", "rouge"] | None = None
    """acc: print the fraction of answers that equal the reference answer; rouge: also print ROUGE and BLEU"""


class InferOptions(WriterOptions, DatasetOptions, PromptOptions):
    """The options of `megatune infer`."""


COMMAND = Command(
    name="infer",
    usage="MODEL | FILE.yaml [--OPTION ...]",
    about="Answers --prompt or the rows of --val_dataset; without either, chats on a terminal or answers each line of "
    "its input. FILE.yaml has options, like LLaMA-Factory's files for `chat`.",
    options=InferOptions,
    system="write",
    most_words=1,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Load the model and answer."""
    return answer(COMMAND.read(words))


def answer(given: ParsedArguments[InferOptions]) -> int:
    """Load the model and answer.

    Raises:
        MegatuneError: (SETTINGS) options; (INPUT) missing files of the model, an adapter, an image or a video; (DATA)
            an image or video that cannot be read, or a prompt that is empty, too long or lacks a tag for one of them;
            (UNAVAILABLE) a backend that is not installed; the hub's reason to refuse the model.
    """
    options = given.options
    media = [(entry.key, entry.value.text or entry.value.data[0]) for entry in given.entries
             if entry.key in ("image", "video")]  # fmt: skip
    from megatune.generation.inference_config import resolve_config

    if options.metric == "rouge":
        require_libraries("--metric rouge")
    findings, has_rows = _findings(options, bool(media)), bool(options.val_dataset)
    config = resolve_config(given, findings, media, accepts_media=has_rows)
    with quick_imports():
        from megatune.generation import answering

    if options.val_dataset:
        outcome, _ = answering.answer_datasets(config, options.val_dataset, options, stream=bool(options.stream))
        if options.metric is not None:
            print("\n".join(_scores(outcome.scored, options.metric)))
    else:
        stream = False if options.stream is None and config.vllm is not None else options.stream
        answering.answer(config, options, options.prompt, stream=stream)
    return ExitCode.DONE


def _scores(answers: Sequence[Scored], metric: str) -> Iterator[str]:
    """Yield a line for each score of --metric."""
    if not answers:
        yield f"{metric}: no row has a reference answer"
        return
    scores = text_scores(answers)
    yield f"acc: {scores['exact_match']:.4f}"
    if metric == "rouge":
        yield from (f"{name}: {scores[name]:.4f}" for name in (*ROUGES, "bleu"))


def _findings(options: InferOptions, has_media: bool) -> Iterator[Finding]:
    """Yield findings for options that contradict each other."""
    if options.val_dataset:
        for flag, used in (("--prompt", options.prompt), ("--image, --video", has_media), ("--raw", options.raw)):
            if used:
                why = "prompts come from --val_dataset and are rendered with the chat template"
                yield Finding("has no effect", flag, why, f"remove {flag} or --val_dataset")
        if options.stream and options.max_batch_size > 1:
            why = "with --stream rows are answered one by one"
            yield Finding("has no effect", "--max_batch_size", why, "remove it or --stream")
    else:
        for flag, used in (("--max_batch_size", options.max_batch_size > 1), ("--metric", options.metric)):
            if used:
                yield Finding("has no effect", flag, "there are no rows to answer", "add --val_dataset NAME")
    if options.stream and options.infer_backend == "vllm":
        why = "vLLM returns complete answers here; `megatune serve` streams with it"
        yield Finding("is not supported", "--stream", why, "remove it")
