"""Text from a checkpoint through Transformers' generate: answers to prompts, and a chat on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.generation.inputs import GenerationOptions, check_options, check_writes, find_model, has_tokenizer
from megatune.generation.pictures import Picture, PromptPictures, generate_inputs, read_pictures

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model wrote.

    Attributes:
        text: without special tokens.
        num_tokens: generated, the stop token included.
        stopped: whether the model ended by itself, with a stop token, and not at the limit of tokens.
    """

    text: str
    num_tokens: int
    stopped: bool


class Generator:
    """A model with its tokenizer, ready to write.

    Args:
        model: a causal language model, or a vision-language model, in eval mode.
        source: the folder it came from, for messages.
        pictures: of the first message of every conversation; None for a model that takes none.

    Raises:
        MegatuneError: (SETTINGS) options that don't hold; (INPUT) a chat is asked for and there is no chat template.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        options: GenerationOptions,
        source: str,
        pictures: PromptPictures | None = None,
    ) -> None:
        check_options(options)
        self.model, self.tokenizer, self.options, self.source = model, tokenizer, options, source
        self.pictures = pictures
        template = tokenizer.chat_template
        if not options.raw and template is None:
            why = "it may be a base model, which continues text and doesn't chat"
            raise MegatuneError(Finding("the tokenizer has no chat template", source, why, "add --raw"), ExitCode.INPUT)
        if options.enable_thinking is not None and "enable_thinking" not in str(template):
            why = f"the chat template of {source} has no such switch"
            finding = Finding("has no effect", "--enable_thinking", why, "leave it out")
            raise MegatuneError(finding, ExitCode.SETTINGS)

    @classmethod
    def load(cls, path: Path, options: GenerationOptions, adapters: Sequence[Path] = ()) -> Generator:
        """Load a Hugging Face model, a checkpoint-N, or the newest checkpoint of a run, onto this machine's device.

        Args:
            adapters: folders of adapters to apply, in order; the last one's tokenizer is taken where it has one.

        Raises:
            MegatuneError: (SETTINGS) options that don't hold; (INPUT) what is missing or can't be read; (DATA) a
                picture that can't be read.
        """
        folder = find_model(path)
        check_writes(folder, adapters)
        pictures = read_pictures(folder, options)
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            of_tokenizer = next((each for each in reversed(adapters) if has_tokenizer(each)), folder)
            tokenizer = AutoTokenizer.from_pretrained(of_tokenizer, local_files_only=True)
            model_type = AutoConfig.from_pretrained(folder, local_files_only=True).model_type
            shows = model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
            model, loading = (AutoModelForImageTextToText if shows else AutoModelForCausalLM).from_pretrained(
                folder, local_files_only=True, dtype="auto", output_loading_info=True
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise _cannot_load(folder, str(error)) from error
        # Transformers fills what is missing with random numbers, and its warning is silenced above.
        if missing := sorted(loading["missing_keys"]):
            raise _cannot_load(folder, f"{len(missing)} tensors are missing: {', '.join(missing[:3])}")
        if adapters:
            from megatune.bridge.peft_model import apply_adapter, merge_adapters

            model = apply_adapter(merge_adapters(model, adapters[:-1]), adapters[-1]).model
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        source = str(adapters[-1] if adapters else folder)
        return cls(model.to(device).eval(), tokenizer, options, source, pictures)

    def answer(self, messages: list[Message], on_text: Callable[[str], None] | None = None) -> Reply:
        """Write the assistant's next message.

        Args:
            messages: the conversation so far; it ends with the user's message. The pictures are the first one's.
            on_text: gets the text piece by piece, as it is written.

        Raises:
            MegatuneError: (INPUT) the chat template refuses the messages; (DATA) they fill the model's context, or
                the first one has not a tag for each picture.
        """
        switches = {}
        if self.options.enable_thinking is not None:
            switches["enable_thinking"] = self.options.enable_thinking
        messages, shown = self._shown(messages)
        if self.options.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.options.system}, *messages]
        try:
            inputs = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **switches
            )
        except TemplateError as error:
            finding = Finding(f"the chat template refuses the messages: {error}", self.source, fix="try --raw")
            raise MegatuneError(finding, ExitCode.INPUT) from error
        return self._generate(inputs, shown, on_text)

    def complete(self, prompt: str, on_text: Callable[[str], None] | None = None) -> Reply:
        """Continue a text, without the chat template.

        Raises:
            MegatuneError: (DATA) the text is empty, fills the model's context, or has not a tag for each picture.
        """
        (message,), shown = self._shown([{"role": "user", "content": prompt}])
        return self._generate(self.tokenizer(message["content"], return_tensors="pt"), shown, on_text)

    def reply(
        self, prompt: str, on_text: Callable[[str], None] | None = None, history: Sequence[Message] = ()
    ) -> Reply:
        """Complete a prompt, without the history, where the options say raw; else answer it."""
        if self.options.raw:
            return self.complete(prompt, on_text)
        return self.answer([*history, {"role": "user", "content": prompt}], on_text)

    def _shown(self, messages: list[Message]) -> tuple[list[Message], tuple[Picture, ...]]:
        """Place the pictures in the user's first message; return them in the order of their tokens."""
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if self.pictures is None or first is None:
            return messages, ()
        text, shown = self.pictures.placed(messages[first]["content"])
        return [*messages[:first], {**messages[first], "content": text}, *messages[first + 1 :]], shown

    def _generate(self, inputs: Any, shown: tuple[Picture, ...], on_text: Callable[[str], None] | None) -> Reply:
        prompt_ids = inputs["input_ids"].to(self.model.device)  # [1, T]
        num_prompt_tokens = prompt_ids.shape[1]
        of_pictures = generate_inputs(self.pictures.vision, inputs["input_ids"], shown) if self.pictures else {}
        if self.options.seed is not None:
            torch.manual_seed(self.options.seed)
        with torch.inference_mode():
            generated = self.model.generate(
                input_ids=prompt_ids,
                attention_mask=inputs["attention_mask"].to(self.model.device),
                max_new_tokens=self._room_for(num_prompt_tokens),
                streamer=_Stream(self.tokenizer, on_text) if on_text else None,
                **{name: tensor.to(self.model.device) for name, tensor in of_pictures.items()},
                **self._sampling(),
            )
        new_ids = generated[0, num_prompt_tokens:].tolist()
        text = self.tokenizer.decode(new_ids, skip_special_tokens=True)
        stop_ids = self.model.generation_config.eos_token_id
        stop_ids = [stop_ids] if isinstance(stop_ids, int) else stop_ids or ()
        return Reply(text, len(new_ids), stopped=bool(new_ids) and new_ids[-1] in stop_ids)

    def _sampling(self) -> dict[str, Any]:
        """Return the options of `generate` that are not left to the model's generation config."""
        options = self.options
        chosen = {"do_sample": options.temperature > 0, "repetition_penalty": options.repetition_penalty}
        if options.temperature > 0:
            chosen |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
        return {name: value for name, value in chosen.items() if value is not None}

    def _room_for(self, num_prompt_tokens: int) -> int:
        """Return tokens that may be generated after a prompt."""
        if num_prompt_tokens == 0:
            raise MegatuneError(Finding("the prompt is empty", "--prompt", fix="give some text"), ExitCode.DATA)
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if context is None:
            return self.options.max_new_tokens
        if num_prompt_tokens >= context:
            what, why = f"the prompt has {num_prompt_tokens:,} tokens", f"the model reads {context:,} tokens at most"
            fix = "shorten it; in a chat, 'clear' forgets what was said"
            if self.options.pictures:
                fix = "shorten it, or make the pictures smaller with --image_max_pixels or --video_max_pixels"
            raise MegatuneError(Finding(what, "--prompt", f"{why}, its answer included", fix), ExitCode.DATA)
        return min(self.options.max_new_tokens, context - num_prompt_tokens)


class _Stream(TextStreamer):
    """Hands generated text to a function as soon as its last word is whole."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)


def _cannot_load(folder: Path, why: str) -> MegatuneError:
    what, fix = "the model cannot be loaded", "copy or save the model again"
    return MegatuneError(Finding(what, str(folder), why.strip().partition("\n")[0], fix), ExitCode.INPUT)


def answer_prompts(generator: Generator, prompts: Iterable[str], *, stream: bool) -> None:
    """Print the answer to each prompt, each without the others; empty prompts are passed over."""
    for prompt in prompts:
        if prompt.strip():
            print_reply(generator, prompt.rstrip("\r\n"), stream=stream)


def print_reply(generator: Generator, prompt: str, *, stream: bool) -> None:
    """Print the answer to one prompt.

    Raises:
        MegatuneError: as `Generator.reply`.
    """
    _finish(generator.reply(prompt, _print_piece if stream else None), stream)


def chat(generator: Generator, *, stream: bool) -> None:
    """Chat with the user until `exit` or the end of input; `clear` forgets the conversation.

    Ctrl-C while an answer is written drops that turn; at the prompt it is raised to the caller.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (importing it gives input() line editing and a history)
    print("exit or Ctrl-D ends, clear forgets what was said, Ctrl-C stops an answer", file=sys.stderr)
    history: list[Message] = []
    while True:
        try:
            prompt = input("User: ").strip()
        except EOFError:
            print()
            return
        if prompt == "exit":
            return
        if prompt == "clear":
            history.clear()
        elif prompt:
            _take_turn(generator, history, prompt, stream)


def _take_turn(generator: Generator, history: list[Message], prompt: str, stream: bool) -> None:
    """Ask one question and print its answer, both added to the history unless the user stops it."""
    print("Assistant: ", end="", flush=True)
    try:
        reply = generator.reply(prompt, _print_piece if stream else None, history)
        history += [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply.text}]
        _finish(reply, stream)
    except KeyboardInterrupt:
        print("\n(stopped, and forgotten)", file=sys.stderr)
    except MegatuneError as error:  # a conversation too long, say; the user can clear it and continue
        print(f"\n{error}", file=sys.stderr)


def _finish(reply: Reply, streamed: bool) -> None:
    print("" if streamed else reply.text, flush=True)
    if not reply.stopped:
        print(f"(cut after {reply.num_tokens} tokens; --max_new_tokens sets the limit)", file=sys.stderr)


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)
