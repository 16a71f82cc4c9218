"""Answers on a terminal: to one prompt, to lines of input, and a chat with commands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatune.errors import MegatuneError
from megatune.generation.generator import Generator, Message
from megatune.generation.prompt import Reply
from megatune.generation.results import ResultFile

_COMMANDS = (
    "exit, quit or Ctrl-D ends, clear forgets the conversation, reset-system asks for another system message,\n"
    "multi-line takes lines up to one that ends with #, single-line goes back, Ctrl-C stops an answer"
)


def answer_prompts(
    generator: Generator, prompts: Iterable[str], *, stream: bool, results: ResultFile | None = None
) -> None:
    """Print the answer to each prompt, each without the others; empty prompts are passed over."""
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
    """What was said, and how the next input is read.

    Attributes:
        system: that the user gave; None leaves it to the options.
        messages: without the system message.
        many_lines: input ends with a line that ends with #.
        asks_system: the next input is the system message.
    """

    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    many_lines: bool = False
    asks_system: bool = False

    @property
    def history(self) -> list[Message]:
        """The messages, after the user's system message where there is one."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.messages]

    def read(self) -> str:
        """Read what the user says next, of one line or more."""
        signs = "M" * self.many_lines + "S" * self.asks_system
        question = f"User{f' [{signs}]' if signs else ''}: "
        if not self.many_lines:
            return input(question).strip()
        lines = [input(question)]
        while not lines[-1].endswith("#"):
            lines.append(input())
        return "\n".join(lines)[:-1]

    def take_command(self, text: str) -> bool:
        """Do what a text says if it is a command; return whether it is."""
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

    The commands are SWIFT's: a line that is multi-line, single-line, reset-system or clear, in any case. Ctrl-C while
    an answer is written drops that turn; at the prompt it is raised to the caller.
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
    """Ask one question and print its answer, both added to the history unless the user stops it."""
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
