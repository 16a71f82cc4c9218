"""Runs `megatune infer`: answers rows of data sets, a prompt, lines of input, or a chat at the terminal, and prints or
stores the answers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatune.config.settings import DataSettings
from megatune.config.values import construct
from megatune.data.prompts import read_questions
from megatune.data.samples import Replacements, replacements
from megatune.data.sources import resolve_datasets
from megatune.errors import MegatuneError
from megatune.generation.dataset import Outcome, ResultFile, answer_rows, default_path
from megatune.generation.generator import Generator, Message
from megatune.generation.inference_config import InferenceConfig, model_dir
from megatune.generation.inputs import find_model
from megatune.generation.prompt import Reply

_COMMANDS = (
    "exit, quit or Ctrl-D ends, clear forgets the conversation, reset-system asks for another system message,\n"
    "multi-line takes lines up to one that ends with #, single-line goes back, Ctrl-C stops an answer"
)


def answer(config: InferenceConfig, options: Any, prompt: str | None, *, stream: bool | None) -> None:
    """Answer a prompt, lines of input, or a user at the terminal.

    Args:
        options: with model_revision, cache_dir and result_path.
        stream: whether to print answers while they are generated; None to do so at a terminal.
    """
    folder = model_folder(config, options)
    with ExitStack() as stack:
        results = stack.enter_context(ResultFile(Path(options.result_path))) if options.result_path else None
        generator = Generator.load(folder, config.options, config.adapted.adapters, vllm=config.vllm)
        at_terminal = sys.stdin.isatty() if prompt is None else sys.stdout.isatty()
        stream = at_terminal if stream is None else stream
        if prompt is not None:
            print_reply(generator, prompt, stream=stream, results=results)
        elif at_terminal:
            chat(generator, stream=stream, results=results)
        else:
            answer_prompts(generator, sys.stdin, stream=stream, results=results)
    if results is not None:
        print(f"answers are in {results.path}", file=sys.stderr)


def answer_datasets(
    config: InferenceConfig, names: Sequence[str], options: Any, *, stream: bool
) -> tuple[Outcome, Path]:
    """Answer the rows of data sets, print a summary, and return the outcome and the file of answers.

    Args:
        options: with those of `cli.infer.RowOptions`, model_revision and cache_dir.
    """
    sources, folder = resolve_datasets(names, options.dataset_dir, "sft"), model_folder(config, options)
    own = Path(config.name)  # answers do not go to a hub's cache
    default = default_path(own if own.is_dir() else Path("result") / own.name)
    path = Path(options.result_path) if options.result_path else default
    placeholders = placeholders_of(own, {name: getattr(options, name) for name in ("model_name", "model_author")})
    outcome = Outcome()
    with ResultFile(path) as results:
        generator = Generator.load(
            folder, config.options, config.adapted.adapters, vllm=config.vllm, accepts_media=True
        )
        rows = read_questions(sources, placeholders, outcome.leave_out, media=generator.media is not None)
        size, media_dir = options.max_batch_size, options.dataset_dir
        answer_rows(generator, rows, results, outcome, batch_size=size, media_dir=media_dir, show=stream)
    left_out = f", {outcome.left_out} left out" if outcome.left_out else ""
    print(f"{outcome.answered} answers are in {path}{left_out}", file=sys.stderr)
    return outcome, path


def model_folder(config: InferenceConfig, options: Any) -> Path:
    """Return the folder of the model, downloaded if it is on a hub."""
    return find_model(model_dir(config.adapted, options.model_revision, options.cache_dir))


def placeholders_of(model: Path, values: dict[str, Any]) -> Replacements:
    """Return the replacements of placeholders: `values` of model_name and model_author, or else those of the run that
    trained the model."""
    for folder in (model, model.parent):
        if (path := folder / "run.yaml").is_file() and None in values.values():
            with suppress(yaml.YAMLError, UnicodeDecodeError):  # not a file of ours
                written = construct(path.read_text(encoding="utf-8"))
                known = written if isinstance(written, dict) else {}
                values = {name: value or known.get(name) for name, value in values.items()}
    return replacements(DataSettings(**values))


def answer_prompts(
    generator: Generator, prompts: Iterable[str], *, stream: bool, results: ResultFile | None = None
) -> None:
    """Print the answer to each prompt, independently; skip empty prompts."""
    for prompt in prompts:
        if prompt.strip():
            print_reply(generator, prompt.rstrip("\r\n"), stream=stream, results=results)


def print_reply(generator: Generator, prompt: str, *, stream: bool, results: ResultFile | None = None) -> None:
    """Print the answer to one prompt.

    Raises:
        MegatuneError: as `Generator.reply`.
    """
    reply = generator.reply(prompt, _print_piece if stream else None)
    _finish(reply, stream)
    if results is not None:
        results.add_turn([{"role": "user", "content": prompt}], reply.text)


@dataclass(slots=True)
class _Chat:
    """The conversation, and how the next input is read.

    Attributes:
        system: the user's system message; None for that of the options.
        messages: the conversation without the system message.
        many_lines: whether input ends with a line that ends with #.
        asks_system: whether the next input is the system message.
    """

    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    many_lines: bool = False
    asks_system: bool = False

    @property
    def history(self) -> list[Message]:
        """The messages, after the user's system message if there is one."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.messages]

    def read(self) -> str:
        """Read the user's next input, of one or more lines."""
        modes = "M" * self.many_lines + "S" * self.asks_system
        prompt = f"User{f' [{modes}]' if modes else ''}: "
        if not self.many_lines:
            return input(prompt).strip()
        lines = [input(prompt)]
        while not lines[-1].endswith("#"):
            lines.append(input())
        return "\n".join(lines)[:-1]

    def take_command(self, text: str) -> bool:
        """Execute a text if it is a command; return whether it is."""
        if self.asks_system:
            self.system, self.asks_system = None if text.strip() == "default-system" else text, False
            self.messages.clear()
            return True
        match text.strip().lower():
            case "clear":
                self.messages.clear()
            case "multi-line":
                self.many_lines = True
            case "single-line":
                self.many_lines = False
            case "reset-system":
                self.asks_system = True
                print("the next input is the system message (default-system: the model's own)", file=sys.stderr)
            case "":
                pass
            case _:
                return False
        return True


def chat(generator: Generator, *, stream: bool, results: ResultFile | None = None) -> None:
    """Chat with the user until `exit`, `quit` or the end of input.

    The commands are SWIFT's: a line multi-line, single-line, reset-system or clear, in any case. Ctrl-C during an
    answer drops that turn; at the prompt, it is raised.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (importing it gives input() line editing and a history)
    print(_COMMANDS, file=sys.stderr)
    state = _Chat()
    while True:
        try:
            text = state.read()
        except EOFError:
            print()
            return
        if not state.asks_system and text.strip().lower() in ("exit", "quit"):
            return
        if not state.take_command(text):
            _take_turn(generator, state, text, stream, results)


def _take_turn(generator: Generator, state: _Chat, prompt: str, stream: bool, results: ResultFile | None) -> None:
    """Print the answer to a question, and add both to the history unless the user stops it."""
    print("Assistant: ", end="", flush=True)
    try:
        reply = generator.reply(prompt, _print_piece if stream else None, state.history)
        asked = [*state.history, {"role": "user", "content": prompt}]
        state.messages += [asked[-1], {"role": "assistant", "content": reply.text}]
        _finish(reply, stream)
    except KeyboardInterrupt:
        print("\n(stopped, and forgotten)", file=sys.stderr)
    except MegatuneError as error:  # a conversation too long, say; the user can clear it and continue
        print(f"\n{error}", file=sys.stderr)
    else:
        if results is not None:
            results.add_turn(asked, reply.text)


def _finish(reply: Reply, streamed: bool) -> None:
    print("" if streamed else reply.text, flush=True)
    if not reply.stopped:
        print(f"(cut after {reply.num_tokens} tokens; --max_new_tokens sets the limit)", file=sys.stderr)


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)
