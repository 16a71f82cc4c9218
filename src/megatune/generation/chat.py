"""Conversations on a terminal, and prompts from a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable

from megatune.errors import MegatuneError
from megatune.generation.infer import Generator, Message, Reply


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
    """One question and its answer, both added to the history unless the user stops it."""
    on_text = _print_piece if stream else None
    question: Message = {"role": "user", "content": prompt}
    print("Assistant: ", end="", flush=True)
    try:
        if generator.options.raw:
            reply = generator.complete(prompt, on_text)
        else:
            reply = generator.answer([*history, question], on_text)
            history += [question, {"role": "assistant", "content": reply.text}]
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
