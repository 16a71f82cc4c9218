"""Conversations and texts to the tokens that a model continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatune.data.media.processor import spaced
from megatune.data.templates.rendering import render
from megatune.data.templates.sandbox import template_errors
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.generation.options import GenerationOptions
from megatune.generation.pictures import Picture, PromptPictures, check_placeholders
from megatune.generation.prompt import Prompt

Message = Mapping[str, Any]  # {"role": "system" | "user" | "assistant" | "tool", "content": text}


class TooLongError(MegatuneError):
    """A prompt that leaves no room for an answer in the model's context."""


class Prompter:
    """A model's tokenizer and chat template, with what the options say of them.

    Args:
        source: the folder it came from, for messages.
        context: tokens of a prompt and its answer at most; None where the model does not say.
        pictures: of the first message of every conversation; None for a model that takes none.

    Raises:
        MegatuneError: (SETTINGS) a thinking switch that the chat template lacks.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: GenerationOptions,
        source: str,
        context: int | None,
        pictures: PromptPictures | None = None,
    ) -> None:
        self.tokenizer, self.options, self.source = tokenizer, options, source
        self.context, self.pictures = context, pictures
        if options.enable_thinking is not None:
            self.check_thinking()

    def chat_prompt(
        self,
        messages: Sequence[Message],
        pictures: tuple[Picture, ...] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        enable_thinking: bool | None = None,
    ) -> Prompt:
        """Write a conversation by the chat template, with the options' system message where it has none.

        Args:
            messages: in whose contents the placeholders of the pictures stand.
            enable_thinking: in place of the options'.

        Raises:
            MegatuneError: (INPUT) the chat template refuses the messages; (DATA) they fill the model's context.
        """
        self.check_template()
        switch = self.options.enable_thinking if enable_thinking is None else enable_thinking
        given: dict[str, Any] = {"add_generation_prompt": True}
        if switch is not None:
            given["enable_thinking"] = switch
        if self.options.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.options.system}, *messages]
        try:
            source = self.tokenizer.get_chat_template(tools=list(tools) or None)
            text = render(source, messages, list(tools) or None, **self.tokenizer.special_tokens_map, **given)
        except template_errors() as error:
            finding = Finding(f"the chat template refuses the messages: {error}", self.source, fix="try --raw")
            raise MegatuneError(finding, ExitCode.INPUT) from error
        text = self._spaced(text)
        # The template writes the special tokens.
        return self._checked(Prompt(self.tokenizer(text, add_special_tokens=False)["input_ids"], pictures))

    def text_prompt(self, text: str, pictures: tuple[Picture, ...] = ()) -> Prompt:
        """Make a prompt of a text, in which the placeholders of the pictures stand.

        Raises:
            MegatuneError: (DATA) it is empty, or fills the model's context.
        """
        return self._checked(Prompt(self.tokenizer(self._spaced(text))["input_ids"], pictures))

    def _spaced(self, text: str) -> str:
        return text if self.pictures is None else spaced(text, self.pictures.vision.text)

    def check_template(self) -> None:
        """Refuse a tokenizer without a chat template (INPUT)."""
        if self.tokenizer.chat_template is None:
            what, why = "the tokenizer has no chat template", "it may be a base model, which continues text"
            raise MegatuneError(Finding(what, self.source, f"{why} and doesn't chat", "add --raw"), ExitCode.INPUT)

    def check_thinking(self) -> None:
        """Refuse the thinking switch where the chat template has none (SETTINGS)."""
        if "enable_thinking" not in str(self.tokenizer.chat_template):
            why = f"the chat template of {self.source} has no such switch"
            finding = Finding("has no effect", "--enable_thinking", why, "leave it out")
            raise MegatuneError(finding, ExitCode.SETTINGS)

    def _checked(self, prompt: Prompt) -> Prompt:
        """Refuse a prompt that is empty, leaves no room for an answer, or has tokens of pictures that it lacks."""
        num_tokens, context = len(prompt.token_ids), self.context
        if num_tokens == 0:
            raise MegatuneError(Finding("the prompt is empty", "--prompt", fix="give some text"), ExitCode.DATA)
        if context is not None and num_tokens >= context:
            what, why = f"the prompt has {num_tokens:,} tokens", f"the model reads {context:,} tokens at most"
            fix = "shorten it; in a chat, 'clear' forgets what was said"
            if prompt.pictures:
                fix = "shorten it, or make images and videos smaller with --image_max_pixels or --video_max_pixels"
            raise TooLongError(Finding(what, "--prompt", f"{why}, its answer included", fix), ExitCode.DATA)
        if self.pictures is not None:
            check_placeholders(self.pictures.vision, prompt)
        return prompt
