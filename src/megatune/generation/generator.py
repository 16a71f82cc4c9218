"""Answers: conversations and texts to the tokens that a model continues, and what its backend writes then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatune.data.media.processor import pad_media
from megatune.data.templates.rendering import render, template_errors
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.generation.inputs import check_writes, find_model
from megatune.generation.options import GenerationOptions, check_options
from megatune.generation.pictures import Picture, PromptPictures, check_placeholders, read_pictures
from megatune.generation.prompt import Backend, OnText, Prompt, Reply
from megatune.generation.transformers_backend import TransformersBackend, load_tokenizer

Message = Mapping[str, Any]  # {"role": "system" | "user" | "assistant" | "tool", "content": text}
LoadBackend = Callable[[Path, PreTrainedTokenizerBase, Sequence[Path], Any], Backend]


class TooLongError(MegatuneError):
    """A prompt that leaves no room for an answer in the model's context."""


class Generator:
    """A model with its tokenizer and chat template, and with what the options say of them, ready to write.

    Args:
        source: the folder it came from, for messages.
        pictures: of the first message of every conversation; None for a model that takes none.
        chats: whether a model without a chat template is refused, unless the options say raw.

    Raises:
        MegatuneError: (SETTINGS) a thinking switch that the chat template lacks; (INPUT) there is no chat template.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: PreTrainedTokenizerBase,
        options: GenerationOptions,
        source: str,
        pictures: PromptPictures | None = None,
        *,
        chats: bool = True,
    ) -> None:
        self.backend, self.tokenizer, self.options, self.source = backend, tokenizer, options, source
        self.pictures = pictures
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
        load_backend: LoadBackend = TransformersBackend.load,
        brings_pictures: bool = False,
        chats: bool = True,
    ) -> Generator:
        """Load a Hugging Face model, a checkpoint-N, or the newest checkpoint of a run.

        Args:
            adapters: folders of adapters to apply, in order; the last one's tokenizer is taken where it has one.
            load_backend: loads the model of a folder.
            brings_pictures: whether what is asked later may have images and videos of its own.
            chats: see above.

        Raises:
            MegatuneError: (SETTINGS) options that don't hold; (INPUT) what is missing or can't be read; (DATA) a
                picture that can't be read.
        """
        check_options(options, brings_pictures=brings_pictures)
        folder = find_model(path)
        check_writes(folder, adapters)
        pictures = read_pictures(folder, options)
        tokenizer = load_tokenizer(folder, adapters)
        backend = load_backend(folder, tokenizer, adapters, pictures.vision if pictures else None)
        source = str(adapters[-1] if adapters else folder)
        return cls(backend, tokenizer, options, source, pictures, chats=chats)

    def answer(self, messages: Sequence[Message], on_text: OnText | None = None) -> Reply:
        """Write the assistant's next message.

        Args:
            messages: the conversation so far; it ends with the user's message. The pictures are the first one's.
            on_text: gets the text piece by piece, as it is written.

        Raises:
            MegatuneError: (INPUT) the chat template refuses the messages; (DATA) they fill the model's context, or
                the first one has not a tag for each picture.
        """
        prompt = self.chat_prompt(*self._shown(messages))
        return self.backend.write(prompt, self.options, on_text)

    def complete(self, prompt: str, on_text: OnText | None = None) -> Reply:
        """Continue a text, without the chat template.

        Raises:
            MegatuneError: (DATA) the text is empty, fills the model's context, or has not a tag for each picture.
        """
        (message,), shown = self._shown([{"role": "user", "content": prompt}])
        return self.backend.write(self.text_prompt(message["content"], shown), self.options, on_text)

    def reply(self, prompt: str, on_text: OnText | None = None, history: Sequence[Message] = ()) -> Reply:
        """Complete a prompt, without the history, where the options say raw; else answer it."""
        if self.options.raw:
            return self.complete(prompt, on_text)
        return self.answer([*history, {"role": "user", "content": prompt}], on_text)

    def _shown(self, messages: Sequence[Message]) -> tuple[Sequence[Message], tuple[Picture, ...]]:
        """Place the pictures in the user's first message; return them in the order of their tokens."""
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if self.pictures is None or first is None:
            return messages, ()
        text, shown = self.pictures.placed(messages[first]["content"])
        return [*messages[:first], {**messages[first], "content": text}, *messages[first + 1 :]], shown

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
        return text if self.pictures is None else pad_media(text, self.pictures.vision.text)

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
        num_tokens, context = len(prompt.token_ids), self.backend.context
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
