"""Generates answers: renders conversations and texts to prompts, and continues them with a backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatune.data.media.processor import pad_media
from megatune.data.templates.rendering import render, template_errors
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.generation.inputs import check_writes, find_model
from megatune.generation.media import MediaItem, PromptMedia, check_placeholders, load_media
from megatune.generation.options import GenerationOptions, check_options
from megatune.generation.prompt import Backend, OnText, Prompt, Reply
from megatune.generation.transformers_backend import TransformersBackend, load_tokenizer

Message = Mapping[str, Any]  # {"role": "system" | "user" | "assistant" | "tool", "content": text}


class TooLongError(MegatuneError):
    """A prompt that leaves no room for an answer in the model's context."""


class Generator:
    """A model with its tokenizer, chat template and generation options.

    Args:
        source: the model's folder, for messages.
        media: images and videos of the first message of every conversation; None for a text-only model.
        chats: whether a model without a chat template is refused, unless the options are raw.

    Raises:
        MegatuneError: (SETTINGS) enable_thinking without a switch in the chat template; (INPUT) no chat template.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: PreTrainedTokenizerBase,
        options: GenerationOptions,
        source: str,
        media: PromptMedia | None = None,
        *,
        chats: bool = True,
    ) -> None:
        self.backend, self.tokenizer, self.options, self.source = backend, tokenizer, options, source
        self.media = media
        if options.enable_thinking is not None:
            self.check_thinking()
        if chats and not options.raw:
            self.check_template()

    @classmethod
    def load(
        cls,
        path: Path,
        options: GenerationOptions,
        adapters: Sequence[Path] = (),
        *,
        vllm: Mapping[str, Any] | None = None,
        accepts_media: bool = False,
        chats: bool = True,
    ) -> Generator:
        """Load a Hugging Face model, a checkpoint-N, or the newest checkpoint of a run.

        Args:
            adapters: folders of adapters to apply, in order; the last one's tokenizer is used if it has one.
            vllm: vLLM's engine arguments; None for Transformers.
            accepts_media: whether later prompts may have their own images and videos.
            chats: see above.

        Raises:
            MegatuneError: (SETTINGS) invalid options; (INPUT) a file that is missing or cannot be read; (DATA) an image
                or video that cannot be read.
        """
        check_options(options, accepts_media=accepts_media)
        folder = find_model(path)
        check_writes(folder, adapters)
        media = load_media(folder, options)
        tokenizer = load_tokenizer(folder, adapters)
        backend: Backend
        if vllm is None:
            backend = TransformersBackend.load(folder, tokenizer, adapters, media.vision if media else None)
        else:
            from megatune.generation.vllm import VllmBackend

            backend = VllmBackend.load(folder, adapters, vllm)
        source = str(adapters[-1] if adapters else folder)
        return cls(backend, tokenizer, options, source, media, chats=chats)

    def answer(self, messages: Sequence[Message], on_text: OnText | None = None) -> Reply:
        """Generate the assistant's next message.

        Args:
            messages: the conversation so far, which ends with the user's message. Images and videos belong to the first
                message.
            on_text: gets the text piece by piece as it is generated.

        Raises:
            MegatuneError: (INPUT) the chat template refuses the messages; (DATA) they fill the model's context, or
                their tags do not match the images and videos.
        """
        prompt = self.chat_prompt(*self._place_media(messages))
        return self.backend.write(prompt, self.options, on_text)

    def complete(self, prompt: str, on_text: OnText | None = None) -> Reply:
        """Continue a text, without the chat template.

        Raises:
            MegatuneError: (DATA) the text is empty, fills the model's context, or its tags do not match the images and
                videos.
        """
        (message,), media = self._place_media([{"role": "user", "content": prompt}])
        return self.backend.write(self.text_prompt(message["content"], media), self.options, on_text)

    def reply(self, prompt: str, on_text: OnText | None = None, history: Sequence[Message] = ()) -> Reply:
        """Answer a prompt; with the raw option, complete it without the history."""
        if self.options.raw:
            return self.complete(prompt, on_text)
        return self.answer([*history, {"role": "user", "content": prompt}], on_text)

    def _place_media(self, messages: Sequence[Message]) -> tuple[Sequence[Message], tuple[MediaItem, ...]]:
        """Place images and videos in the user's first message, and return them in the order of their tokens."""
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if self.media is None or first is None:
            return messages, ()
        text, media = self.media.placed(messages[first]["content"])
        return [*messages[:first], {**messages[first], "content": text}, *messages[first + 1 :]], media

    def chat_prompt(
        self,
        messages: Sequence[Message],
        media: tuple[MediaItem, ...] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        enable_thinking: bool | None = None,
    ) -> Prompt:
        """Render a conversation with the chat template, with the options' system message if it has none.

        Args:
            messages: with the placeholders of `media` in their contents.
            enable_thinking: replaces the options' value.

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
        # The template writes the special tokens.
        return self._checked(Prompt(self._tokens(text, add_special_tokens=False), media))

    def text_prompt(self, text: str, media: tuple[MediaItem, ...] = ()) -> Prompt:
        """Return the prompt of a text that contains the placeholders of `media`.

        Raises:
            MegatuneError: (DATA) it is empty, is not valid Unicode, or fills the model's context.
        """
        return self._checked(Prompt(self._tokens(text), media))

    def _tokens(self, text: str, **options: bool) -> list[int]:
        """Tokenize a text, or raise DATA if it has half of a surrogate pair, which UTF-8 cannot express."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"the prompt has {text[error.start]!r}, half of a surrogate pair"
            why, fix = "bytes of a command line that are not UTF-8 become such characters", "write it as UTF-8"
            raise MegatuneError(Finding(what, "--prompt", why, fix), ExitCode.DATA) from error
        spaced = text if self.media is None else pad_media(text, self.media.vision.text)
        found: list[int] = self.tokenizer(spaced, **options)["input_ids"]
        return found

    def check_template(self) -> None:
        """Raise INPUT if the tokenizer has no chat template."""
        if self.tokenizer.chat_template is None:
            what, why = "the tokenizer has no chat template", "it may be a base model, which continues text"
            raise MegatuneError(Finding(what, self.source, f"{why} and doesn't chat", "add --raw"), ExitCode.INPUT)

    def check_thinking(self) -> None:
        """Raise SETTINGS if the chat template has no thinking switch."""
        if "enable_thinking" not in str(self.tokenizer.chat_template):
            why = f"the chat template of {self.source} has no such switch"
            finding = Finding("has no effect", "--enable_thinking", why, "leave it out")
            raise MegatuneError(finding, ExitCode.SETTINGS)

    def _checked(self, prompt: Prompt) -> Prompt:
        """Raise DATA if a prompt is empty, leaves no room for an answer, or has placeholders without an image or
        video."""
        num_tokens, context = len(prompt.token_ids), self.backend.context
        if num_tokens == 0:
            raise MegatuneError(Finding("the prompt is empty", "--prompt", fix="give some text"), ExitCode.DATA)
        if context is not None and num_tokens >= context:
            what, why = f"the prompt has {num_tokens:,} tokens", f"the model reads {context:,} tokens at most"
            fix = "shorten it; in a chat, 'clear' forgets what was said"
            if prompt.media:
                fix = "shorten it, or make images and videos smaller with --image_max_pixels or --video_max_pixels"
            raise TooLongError(Finding(what, "--prompt", f"{why}, its answer included", fix), ExitCode.DATA)
        if self.media is not None:
            check_placeholders(self.media.vision, prompt)
        return prompt
