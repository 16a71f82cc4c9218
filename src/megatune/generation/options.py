"""How text is generated, and the combinations that would have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatune.errors import ExitCode, Finding, MegatuneError


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """The options of `megatune infer`. None leaves a choice to the model's own generation_config.json.

    Attributes:
        max_new_tokens: tokens of an answer at most; the model's context ends it sooner.
        temperature: 0 takes the likeliest token at every step.
        top_p: sample from the likeliest tokens that reach this probability together, in (0, 1].
        top_k: sample from this many of the likeliest tokens.
        repetition_penalty: above 1 makes tokens that have occurred less likely.
        seed: of the sampling, for every answer anew; None for another answer every time.
        system: the system message; None for the chat template's default.
        raw: continue the prompt as it is, without the chat template.
        enable_thinking: the switch of chat templates that have one; None for the template's default.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    system: str | None = None
    raw: bool = False
    enable_thinking: bool | None = None


def check_options(options: GenerationOptions) -> None:
    """Refuse values out of range and choices that would have no effect.

    Raises:
        MegatuneError: (SETTINGS) with one finding for every problem.
    """
    findings = [*_out_of_range(options), *_without_effect(options)]
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)


def _out_of_range(options: GenerationOptions) -> Iterator[Finding]:
    penalty = options.repetition_penalty
    if options.max_new_tokens < 1:
        yield Finding(f"{options.max_new_tokens} is too small", "--max_new_tokens", fix="--max_new_tokens 1 or more")
    if not 0 <= options.temperature < float("inf"):
        yield Finding(f"{options.temperature} is out of range", "--temperature", fix="--temperature 0 or more")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        yield Finding(f"{options.top_p} is out of range", "--top_p", fix="a probability above 0, at most 1")
    if options.top_k is not None and options.top_k < 1:
        yield Finding(f"{options.top_k} is too small", "--top_k", fix="--top_k 1 or more")
    if penalty is not None and not 0 < penalty < float("inf"):
        yield Finding(f"{penalty} is out of range", "--repetition_penalty", fix="--repetition_penalty 1")


def _without_effect(options: GenerationOptions) -> Iterator[Finding]:
    why = "temperature 0 always takes the likeliest token"
    for flag, value in (("--top_p", options.top_p), ("--top_k", options.top_k)):
        if options.temperature == 0 and value is not None:
            yield Finding("has no effect", flag, why, "add --temperature 0.7")
    for flag, given in (("--system", options.system), ("--enable_thinking", options.enable_thinking)):
        if options.raw and given is not None:
            yield Finding("has no effect", flag, "--raw leaves the chat template out", f"drop {flag} or --raw")
