"""Answers: conversations and texts that a backend continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatune.generation.inputs import check_writes, find_model
from megatune.generation.options import GenerationOptions, Sampling, check_options
from megatune.generation.pictures import Picture, PromptPictures, read_pictures
from megatune.generation.prompt import Backend, IsStopped, OnText, Reply
from megatune.generation.prompter import Message, Prompter
from megatune.generation.transformers_backend import TransformersBackend, load_tokenizer

LoadBackend = Callable[[Path, PreTrainedTokenizerBase, Sequence[Path], Any], Backend]


class Generator(Prompter):
    """A model with its tokenizer, ready to write; see `Prompter`.

    Raises:
        MegatuneError: (INPUT) also where a chat is asked for and there is no chat template.
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
        super().__init__(tokenizer, options, source, backend.context, pictures)
        self.backend = backend
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
            chats: whether a model without a chat template is refused, unless the options say raw.

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

    def answer(
        self,
        messages: Sequence[Message],
        on_text: OnText | None = None,
        sampling: Sampling | None = None,
        is_stopped: IsStopped | None = None,
    ) -> Reply:
        """Write the assistant's next message.

        Args:
            messages: the conversation so far; it ends with the user's message. The pictures are the first one's.
            on_text: gets the text piece by piece, as it is written.
            sampling: in place of the options'.
            is_stopped: asked after every token; True ends the answer there.

        Raises:
            MegatuneError: (INPUT) the chat template refuses the messages; (DATA) they fill the model's context, or
                the first one has not a tag for each picture.
        """
        prompt = self.chat_prompt(*self._shown(messages))
        return self.backend.write(prompt, sampling or self.options, on_text, is_stopped)

    def complete(
        self,
        prompt: str,
        on_text: OnText | None = None,
        sampling: Sampling | None = None,
        is_stopped: IsStopped | None = None,
    ) -> Reply:
        """Continue a text, without the chat template.

        Raises:
            MegatuneError: (DATA) the text is empty, fills the model's context, or has not a tag for each picture.
        """
        (message,), shown = self._shown([{"role": "user", "content": prompt}])
        return self.backend.write(
            self.text_prompt(message["content"], shown), sampling or self.options, on_text, is_stopped
        )

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
