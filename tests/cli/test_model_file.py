"""`megatune infer FILE.yaml`: LLaMA-Factory's files of `chat` as flags."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from llamafactory_kit import Example, examples

from megatune.cli import infer
from megatune.cli.infer import InferOptions
from megatune.errors import ExitCode, MegatuneError
from megatune.generation.inference_config import model_and_base, model_findings

FILES = [example for example in examples() if example.verb == "infer"]


def read(*words: str) -> InferOptions:
    given = infer.COMMAND.read(words)
    print(*given.lines, sep="\n", file=sys.stderr)
    given.stop(model_findings(given, model_and_base(given)[0]))
    return given.options


@pytest.mark.parametrize("example", FILES, ids=lambda example: example.name)
def test_files_of_its_examples_name_a_model(
    example: Example, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = read(str(example.write(tmp_path)))
    assert args.model_name_or_path == example.keys["model_name_or_path"]
    assert args.adapters == [each for each in [example.keys.get("adapter_name_or_path")] if each]
    assert args.infer_backend == "transformers"
    assert "accepted   trust_remote_code: code of a repository is never run" in capsys.readouterr().err


def test_a_prompt_may_begin_like_a_flag() -> None:
    assert read("m", "--prompt", "--x=1 is what?", "--raw").prompt == "--x=1 is what?"


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.yaml"
    path.write_text("model_name_or_path: m\ntemperature: 1\nmax_new_tokens: 5\ntop_k: 3\ndefault_system: Be brief.\n")
    args = read(str(path), "--temperature", "0.5")
    assert (args.temperature, args.max_new_tokens, args.top_k, args.system) == (0.5, 5, 3, "Be brief.")
    # The defaults, too, where somebody asks for them.
    args = read(str(path), "--temperature=0", "--max-new-tokens", "512")
    assert (args.temperature, args.max_new_tokens) == (0, 512)


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "chat.yaml"
    path.write_text("temperature: hot\nquantization_bit: 4\nmodel_name_or_path: [a]\ntop_p: null\n")
    with pytest.raises(MegatuneError) as caught:
        read(str(path))
    assert caught.value.exit_code == ExitCode.SETTINGS
    assert [(each.what, each.where.rpartition(":")[2]) for each in caught.value.findings] == [
        ("temperature is 'hot'", "1"),
        ("quantization_bit: 4 is not supported", "2"),
        ("model_name_or_path is [a]", "3"),
    ]
    path.write_text("top_p: 0.5\n")
    with pytest.raises(MegatuneError, match="model_name_or_path is missing"):
        read(str(path))


def test_a_file_of_training_is_answered_with_what_it_trained(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: m\nstage: sft\ndataset: d\noutput_dir: out/first\nlearning_rate: 1e-5\n")
    assert [(each.what, each.fix) for each in infer.COMMAND.read([str(path)]).findings] == [
        (f"{path} is a training file", "megatune infer out/first, the model that it trained")
    ]
