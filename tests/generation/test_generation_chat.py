"""`megatune infer`: one prompt, lines of a pipe, and a conversation that remembers."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import tiny_model

from megatune.cli import infer
from megatune.errors import ExitCode, MegatuneError
from megatune.generation.answering import chat
from megatune.generation.dataset import ResultFile
from megatune.generation.generator import Generator
from megatune.generation.options import GenerationOptions, MediaFile
from megatune.generation.vllm import check_vllm

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

        def read(_prompt: str = "") -> str:
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", read)

    return give


def run(command: str, *more: str) -> int:
    return infer.run("infer", [*command.split(), *more])


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
    monkeypatch.setattr("megatune.generation.answering._print_piece", _interrupt_once())
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


def test_commands_are_those_of_swift(
    generator: Generator, say: Say, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def asked(*contents: str, system: str | None = None) -> str:
        roles = ("user", "assistant")
        turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
        return generator.answer([*([{"role": "system", "content": system}] if system else []), *turns]).text

    say(
        "MULTI-LINE", "one", "two#", "clear#", "single-line#",
        "Hi", "reset-system", "Be brief.", "Hi", "reset-system", "default-system", "Hi", "QUIT", "never read",
    )  # fmt: skip
    with ResultFile(tmp_path / "turns.jsonl") as results:
        chat(generator, stream=False, results=results)
    brief = asked("Hi", system="Be brief.")
    assert answers(capsys.readouterr().out) == [asked("one\ntwo"), asked("Hi"), brief, asked("Hi")]
    turns = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [turn["messages"][-1]["content"] for turn in turns] == [asked("one\ntwo"), asked("Hi"), brief, asked("Hi")]
    assert turns[2]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_the_system_message_may_be_a_file_and_swift_names_the_model(
    qwen3: Path, generator: Generator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "system.txt").write_text("Be brief.\n", encoding="utf-8")
    system = ["--system", str(tmp_path / "system.txt")]
    stop = [
        "--stop_words",
        "\0",
        "--stream",
        "false",
        "--num_beams",
        "1",
        "--write_batch_size",
        "9",
        "--infer_backend",
        "pt",
    ]
    assert run(f"--model {qwen3} --max_new_tokens 8", *system, *stop, "--prompt", "Hi") == ExitCode.DONE
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    printed = capsys.readouterr()
    assert printed.out == generator.answer(turns).text + "\n"
    assert printed.err.startswith("accepted   write_batch_size: every answer is written as soon as it is complete\n")
    with pytest.raises(MegatuneError, match="cannot be read") as raised:
        run(str(qwen3), "--prompt", "Hi", "--system", str(tmp_path / "other.txt"))
    assert raised.value.exit_code == ExitCode.INPUT


def test_what_is_not_built_is_refused_by_name(qwen3: Path) -> None:
    flags = "--num_beams 4 --logprobs true --val_dataset_sample 10 --infer_backend lmdeploy --vllm_max_model_len 9"
    with pytest.raises(MegatuneError) as raised:
        run(f"{qwen3} --model {qwen3} --prompt x {flags}")
    assert raised.value.exit_code == ExitCode.SETTINGS
    named = ["--num_beams", "--logprobs", "--val_dataset_sample", "--model", "--infer_backend"]
    assert [finding.where for finding in raised.value.findings] == named
    assert all(finding.fix for finding in raised.value.findings)


def test_vllm_takes_no_pictures_and_one_adapter(qwen3: Path) -> None:
    with pytest.raises(MegatuneError, match="several adapters at once are not supported") as raised:
        check_vllm(GenerationOptions(media=(MediaFile("image", "a.png"),)), [qwen3, qwen3])
    assert raised.value.exit_code == ExitCode.SETTINGS
    assert len(raised.value.findings) == 2


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_missing_is_named(qwen3: Path) -> None:
    with pytest.raises(MegatuneError, match="vLLM is not installed") as raised:
        run(f"{qwen3} --infer_backend vllm --prompt x")
    assert raised.value.exit_code == ExitCode.UNAVAILABLE
    assert "an environment with vLLM" in raised.value.findings[0].fix
