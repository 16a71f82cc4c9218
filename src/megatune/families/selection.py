"""The settings that select what is trained, with LLaMA-Factory's names (see `config.groups.finetuning`), and a safe
match of regular expressions that users and adapter files contain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.weights import Stack

# The setting that freezes each part of the model.
FREEZE_SETTINGS = {
    Stack.DECODER: "freeze_language_model",
    Stack.VISION: "freeze_vision_tower",
    Stack.PROJECTOR: "freeze_multi_modal_projector",
    Stack.DEEPSTACK: "freeze_deepstack_mergers",
}


class Selection(Protocol):
    """Settings that select what is trained; immutable and hashable."""

    def __hash__(self) -> int: ...
    @property
    def finetuning_type(self) -> str: ...
    @property
    def freeze_trainable_layers(self) -> int: ...
    @property
    def freeze_trainable_modules(self) -> Sequence[str]: ...
    @property
    def freeze_extra_modules(self) -> Sequence[str]: ...
    @property
    def use_llama_pro(self) -> bool: ...
    @property
    def freeze_language_model(self) -> bool: ...
    @property
    def freeze_vision_tower(self) -> bool: ...
    @property
    def freeze_multi_modal_projector(self) -> bool: ...
    @property
    def freeze_deepstack_mergers(self) -> bool | None: ...
    @property
    def lora_rank(self) -> int: ...
    @property
    def lora_alpha(self) -> int | None: ...
    @property
    def lora_target(self) -> Sequence[str]: ...
    @property
    def additional_target(self) -> Sequence[str]: ...
    @property
    def use_rslora(self) -> bool: ...
    @property
    def use_dora(self) -> bool: ...
    @property
    def quantization_bit(self) -> int | None: ...
    @property
    def quantization_type(self) -> str: ...
    @property
    def double_quantization(self) -> bool: ...


def is_frozen(stack: Stack, selection: Selection) -> bool:
    """Return whether a part of the model is frozen, including adapters."""
    frozen: bool | None = getattr(selection, FREEZE_SETTINGS[stack])
    return selection.freeze_vision_tower if frozen is None else frozen  # deepstack mergers by default like the tower


_SECONDS = 1.0  # timeout of a match: nested repetitions may backtrack forever, all others take microseconds


def is_whole_match(pattern: str, text: str) -> bool:
    """Return whether a regular expression, valid for Python's re, matches the whole text, as `re.fullmatch`.

    Raises:
        MegatuneError: SETTINGS, if that takes longer than a second.
    """
    import regex  # here, because few runs need it, and it takes a tenth of a quick command's import time

    try:
        return bool(regex.fullmatch(pattern, text, timeout=_SECONDS))
    except TimeoutError as error:
        what = f"the regular expression {pattern!r:.100} does not finish on {text!r:.60}"
        why = f"it was still running after {_SECONDS:g} s: nested repetitions have too many ways to match"
        finding = Finding(what, "", why, "write each repetition once, such as .* in place of (.*)*")
        raise MegatuneError(finding, ExitCode.SETTINGS) from error
