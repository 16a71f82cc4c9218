"""The chat template that is saved with a model, by which other programs ask it: whether it is the one that trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatune.config.settings import Settings
from megatune.data.encode import load_tokenizer, make_encoder
from megatune.data.templates import has_chat_template
from megatune.data.templates.chat_template import ChatTemplate
from megatune.data.templates.jinja import as_jinja, prompt_difference
from megatune.data.templates.turns import Template, Thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT_TEMPLATE = "chat_template.jinja"


def chat_template_notes(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[str]]:
    """Return what to say of the chat template that is saved, and what to warn of."""
    if (template := _other_template(settings, tokenizer)) is None:
        return [], []
    if not tokenizer.chat_template:
        try:
            as_jinja(template, tokenizer)
        except ValueError as error:
            return [], [_unwritten(template, error)]
        return [f"the tokenizer has no chat template: {CHAT_TEMPLATE} with the text of {template.name} is saved"], []
    if settings.data.template is None:  # ms-swift's for the model
        return [], []
    thinking = Thinking(settings.data.enable_thinking)
    difference = prompt_difference(template, tokenizer, thinking, settings.data.default_system or "")
    return [], [_asked_otherwise(template, difference)] if difference else []


def write_chat_template(settings: Settings, source: Path, folder: Path) -> None:
    """Write the template that trains into a folder with a model, where the tokenizer in `source` has none."""
    if has_chat_template(source):
        return
    tokenizer = load_tokenizer(source)
    if not tokenizer.chat_template and (template := _other_template(settings, tokenizer)) is not None:
        try:
            text = as_jinja(template, tokenizer)
        except ValueError:  # said when the run began
            return
        (folder / CHAT_TEMPLATE).write_text(text, encoding="utf-8")


def _other_template(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> Template | None:
    """Return what trains if it is not the tokenizer's own chat template; None of texts, too, and of prompts of
    reinforcement learning, which have keys of their own."""
    data = settings.data
    if settings.run.stage == "pt" or (data.template is None and not data.swift_version):
        return None
    template = make_encoder(settings, tokenizer).template
    return None if isinstance(template, ChatTemplate) else template


def _unwritten(template: Template, error: ValueError) -> str:
    return (
        f"the tokenizer has no chat template, and template {template.name} cannot be saved as one: {error}; "
        f"`megatune infer`, vLLM and others cannot chat with the model until its folder has a {CHAT_TEMPLATE}"
    )


def _asked_otherwise(template: Template, difference: str) -> str:
    return (
        f"template {template.name} is not the tokenizer's chat template, which is saved with the model: "
        f"`megatune infer`, vLLM and others will ask it with {difference}, and its answers may be bad; "
        "remove template to train with the tokenizer's"
    )
