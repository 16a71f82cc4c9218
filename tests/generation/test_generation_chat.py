"""`megatune infer`: one prompt, lines of a pipe, and a conversation that remembers."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import tiny_model

from megatune.cli import infer
from megatune.errors import ExitCode, MegatuneError
from megatune.generation.chat import chat
from megatune.generation.generator import Generator
from megatune.generation.options import GenerationOptions

Say = Callable[..., None]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory, "qwen3")


@pytest.fixture(scope="module")
def generator(qwen3: Path) -> Generator:
    return Generator.load(qwen3, GenerationOptions(max_new_tokens=8))


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Gives the terminal lines to read, then the end of input."""

    def give(*lines: str) -> None:
        left = iter(lines)

        def read(_prompt: str) -> str:
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", read)

    return give


def run(command: str, *more: str) -> int:
    parser = argparse.ArgumentParser()
    infer.add_parser(parser.add_subparsers())
    args = parser.parse_args(["infer", *command.split(), *more])
    return args.run(args)


def answers(printed: str) -> list[str]:
    return [text.removesuffix("\n") for text in printed.rstrip("\n").split("Assistant: ")[1:]]


def test_a_conversation_remembers_until_it_is_cleared(
    generator: Generator, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    say("Hi", "", "Hi", "clear", "Hi", "exit", "never read")
    chat(generator, stream=False)
    first, second, after_clear = answers(capsys.readouterr().out)

    turns = [{"role": "user", "content": "Hi"}]
    assert first == generator.answer(turns).text
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "Hi"}]
    assert second == generator.answer(turns).text
    assert after_clear == first


def test_a_conversation_that_is_too_long_can_be_cleared(
    generator: Generator, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    say("word " * 100, "Hi")
    chat(generator, stream=True)
    printed = capsys.readouterr()
    assert "64 tokens at most" in printed.err
    assert answers(printed.out)[1] == generator.answer([{"role": "user", "content": "Hi"}]).text


def test_ctrl_c_drops_the_answer_and_not_the_chat(
    generator: Generator, say: Say, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatune.generation.chat._print_piece", _interrupt_once())
    say("Hi", "Hi")
    chat(generator, stream=True)
    printed = capsys.readouterr()
    assert "(stopped, and forgotten)" in printed.err
    assert printed.out.rstrip("\n").endswith(generator.answer([{"role": "user", "content": "Hi"}]).text)


def _interrupt_once() -> Callable[[str], None]:
    interrupts = iter([KeyboardInterrupt()])

    def print_piece(text: str) -> None:
        for interrupt in interrupts:
            raise interrupt
        print(text, end="")

    return print_piece


@pytest.mark.parametrize("stream", ["", "--stream"])
def test_one_prompt(qwen3: Path, generator: Generator, stream: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{qwen3} --max-new-tokens 8 {stream}", "--prompt", "Who are you?") == ExitCode.DONE
    printed = capsys.readouterr()
    assert printed.out == generator.reply("Who are you?").text + "\n"
    assert printed.err == "(cut after 8 tokens; --max_new_tokens sets the limit)\n"


def test_lines_of_a_pipe_are_answered_one_by_one(
    qwen3: Path, generator: Generator, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\n你好\n"))
    assert run(f"{qwen3} --max_new_tokens 8") == ExitCode.DONE
    assert capsys.readouterr().out == "".join(generator.reply(prompt).text + "\n" for prompt in ("Hi", "你好"))


def test_flags_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(MegatuneError) as raised:
        run(f"{tmp_path / 'nowhere'} --top-p 0.5 --prompt x")
    assert raised.value.exit_code == ExitCode.SETTINGS
