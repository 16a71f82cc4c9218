"""Renders messages to the text of a prompt, with ROLL's template names or those of megatune."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from megatune.config.groups.data import DataSettings
from megatune.config.groups.run import ModelSettings
from megatune.config.settings import Settings
from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, Message
from megatune.data.formats.swift import SwiftFormat
from megatune.data.templates import Thinking, load_template
from megatune.data.templates.chat_template import FIXED_DATE
from megatune.data.templates.named import NAMED_TEMPLATES
from megatune.data.templates.rendering import RenderLimitError, limit_error, render, template_errors
from megatune.data.templates.swift_table import template_of_swift
from megatune.data.vision import Placed, VisionInput
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.rl.rollout import PromptData

Messages = Sequence[Mapping[str, str]]
Writer = Callable[[Messages], str]


class PromptRow(NamedTuple):
    """The prompt of a row.

    Attributes:
        messages: the messages without the answer.
        prompt: the text of the prompt, template included.
        placed: the prompt's images.
        answer: the text of the row's own answer after the prompt; None if there is none, or it is not needed.
    """

    messages: list[dict[str, str]]
    prompt: str
    placed: tuple[Placed, ...]
    answer: str | None = None


# DeepSeek-R1-Zero's prompt of a base model, with the answer in a box.
BASE = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer, ensuring that "
    "the final result in the answer is enclosed in \\boxed{}. The reasoning process and answer are enclosed within "
    "'<think>' '</think>' and '<answer>' '</answer>' tags, respectively, i.e., <think> reasoning process here </think> "
    "<answer> answer here </answer>. User: {question} Assistant:"
)
EMPTY = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
ROLL_TEMPLATES = ("native", "qwen2_5", "qwen3", "chatml", "base", "empty", "longcot_V3")


def prompt_writer(name: str | None, tokenizer: PreTrainedTokenizerBase) -> Writer:
    """Return a function that renders messages with a template, and raises RowError for messages that it refuses.

    Args:
        name: native, qwen2_5 and None are the tokenizer's chat template; qwen3 is the same with enable_thinking,
            longcot_V3 the same followed by <think>; base and empty take one user message; any other name is a template
            of data/templates, or a YAML file.

    Raises:
        MegatuneError: (SETTINGS) there is no such template; (INPUT) the tokenizer has no chat template.
    """
    if name == "longCOT_qwen2.5":
        what = "template: longCOT_qwen2.5 is not supported"
        why = "it is the tokenizer's chat template with a long system message"
        fix = "use native, with the system message in the rows"
        raise MegatuneError(Finding(what, why=why, fix=fix), ExitCode.SETTINGS)
    if name in ("base", "empty"):
        form = BASE if name == "base" else EMPTY
        return lambda messages: form.replace("{question}", _single_question(messages, name))
    if name == "chatml":
        return _chatml
    if name in (None, "native", "default", "qwen2_5"):
        return _chat_template(tokenizer)
    if name == "qwen3":
        return _chat_template(tokenizer, enable_thinking=True)
    if name == "longcot_V3":
        native = _chat_template(tokenizer)
        return lambda messages: native(messages) + "<think>\n"
    try:
        template = load_template(name, tokenizer)
    except MegatuneError as error:
        if error.exit_code != ExitCode.SETTINGS or name in NAMED_TEMPLATES:
            raise
        names = ", ".join(dict.fromkeys((*ROLL_TEMPLATES, *NAMED_TEMPLATES)))
        finding = Finding(f"template: {name!r} is unknown", fix=f"one of {names}, or a path ending in .yaml")
        raise MegatuneError(finding, ExitCode.SETTINGS) from error

    def write(messages: Messages) -> str:
        turns = template.render(_conversation(messages), Thinking())
        before = [piece for turn in turns[:-1] for piece in (*turn.prompt, *turn.completion)]
        return "".join([*before, *turns[-1].prompt])

    return write


def conversation_writer(tokenizer: PreTrainedTokenizerBase) -> Writer:
    """Return a function that renders conversations that end with an answer with the tokenizer's chat template; see
    `prompt_writer`."""
    return _chat_template(tokenizer, add_generation_prompt=False)


def swift_reader(
    data: PromptData, tokenizer: PreTrainedTokenizerBase, vision: VisionInput | None = None, *, answers: bool = False
) -> Callable[[Mapping[str, Any]], PromptRow]:
    """Return a function that reads a row by ms-swift's rules: the messages without the answer, the prompt, and with
    `answers` the template's text of the answer. It raises RowError for rows that ms-swift skips.

    Raises:
        MegatuneError: (SETTINGS) there is no such template; (INPUT) no template is known for the model.
    """
    names = ("conversation_rules", "template", "default_system", "enable_thinking")
    values = {name: getattr(data, name) for name in names}
    model = ModelSettings(model_name_or_path=str(tokenizer.name_or_path))
    settings = Settings(model=model, data=DataSettings(**values))
    template = template_of_swift(settings, tokenizer)
    form = SwiftFormat(swift_version=settings.data.swift_version)

    def read(row: Mapping[str, Any]) -> PromptRow:
        conversation = form.to_question(row, media=vision is not None)
        asked, last = conversation.messages, conversation.messages[-1]
        if last.role == "assistant":
            asked = asked[:-1]
        if not asked:
            raise RowError("no-question", "the only message is the answer")
        placed: tuple[Placed, ...] = ()
        written = replace(conversation, messages=asked)
        if vision is not None:
            written, placed = vision.place(written, {})
        prompt, answer = _text(written), None
        if answers and last.role == "assistant":
            whole = _text(replace(written, messages=(*written.messages, last)))
            answer = whole.removeprefix(prompt) if whole.startswith(prompt) else None
        system = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
        messages = [*system, *({"role": each.role, "content": each.content} for each in asked)]
        return PromptRow(messages, prompt, placed, answer)

    def _text(conversation: Conversation) -> str:
        return "".join(piece for turn in template.render(conversation, Thinking()) for piece in turn.pieces)

    return read


def encode_prompts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, is_complete: bool = False
) -> list[list[int]]:
    """Tokenize prompts, and add the BOS token unless the template wrote it.

    ROLL always adds it, so that its prompts of Llama models begin with two.

    Args:
        is_complete: whether the texts include all special tokens.
    """
    bos = str(tokenizer.bos_token)
    begun = [is_complete or (bool(tokenizer.bos_token) and text.startswith(bos)) for text in texts]
    ids: list[list[int]] = [[] for _ in texts]
    for has_begun in set(begun):
        indices = [index for index, each in enumerate(begun) if each == has_begun]
        encoded = tokenizer([texts[index] for index in indices], add_special_tokens=not has_begun)["input_ids"]
        for index, each in zip(indices, encoded, strict=True):
            ids[index] = each
    return ids


def _chat_template(tokenizer: PreTrainedTokenizerBase, **options: Any) -> Writer:
    if tokenizer.chat_template is None:
        why = "it may be a base model's, which continues text"
        finding = Finding("the tokenizer has no chat template", str(tokenizer.name_or_path), why, "template: base")
        raise MegatuneError(finding, ExitCode.INPUT)

    source: str = tokenizer.get_chat_template()
    given = {**tokenizer.special_tokens_map, "add_generation_prompt": True, **FIXED_DATE, **options}

    def write(messages: Messages) -> str:
        try:
            return render(source, messages, **given)
        except RenderLimitError as error:
            raise limit_error(error) from error
        except template_errors() as error:
            raise RowError("refused-by-template", "the chat template refuses the messages", str(error)) from error

    return write


def _chatml(messages: Messages) -> str:
    turns = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
    return f"{turns}<|im_start|>assistant\n"


def _single_question(messages: Messages, name: str) -> str:
    if [each["role"] for each in messages] != ["user"]:
        roles = ", ".join(each["role"] for each in messages)
        raise RowError("not-one-question", f"template {name} takes exactly one user message", f"there are {roles}")
    return messages[0]["content"]


def _conversation(messages: Messages) -> Conversation:
    """Return a conversation with an empty answer after the messages; the prompt ends before it."""
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    rest = messages[1:] if messages[0]["role"] == "system" else messages
    asked = [Message(each["role"], each["content"]) for each in rest]  # type: ignore[arg-type]
    return Conversation((*asked, Message("assistant", "")), system)
