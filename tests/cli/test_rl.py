"""`megatune rl` before anything starts: what is wrong with a command line, a file and this machine's engines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatune.cli.main import main
from megatune.errors import ExitCode

FILES = Path(__file__).parents[1] / "config" / "roll_files"
_PYTHON = "actor_infer.strategy_args.strategy_config.py_executable"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], ExitCode.SETTINGS, "no settings file"),
        (["a.yaml", "b.yaml"], ExitCode.SETTINGS, "'b.yaml' is one word too many"),
        (["a.yaml", "--max_steps", "3"], ExitCode.SETTINGS, "write role.key=value, without dashes"),
        (["a.yaml", "--evalute", "model"], ExitCode.SETTINGS, "did you mean --evaluate?"),
        (["nobody.yaml"], ExitCode.INPUT, "there is no settings file nobody.yaml"),
        (["--config_path", "examples/x", "--config-name=rlvr"], ExitCode.INPUT, "examples/x/rlvr.yaml"),
        (
            ["--config_path", str(FILES), "--config_name", "qwen3_8b", "max_step=3"],
            ExitCode.SETTINGS,
            "mean max_steps?",
        ),
    ],
)
def test_command_lines(words, code, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["rl", *words]) == code
    assert says in capsys.readouterr().err


def test_train_knows_whose_file_it_is(capsys):
    assert main(["train", str(FILES / "qwen3_8b.yaml")]) == ExitCode.SETTINGS
    assert f"fix: megatune rl {FILES / 'qwen3_8b.yaml'}" in capsys.readouterr().err


def test_a_file_of_training_has_no_roles(capsys, tmp_path):
    path = tmp_path / "my run.yaml"
    path.write_text("model_name_or_path: m\ndataset: d\noutput_dir: out\n")
    assert main(["rl", str(path)]) == ExitCode.SETTINGS
    assert capsys.readouterr().err.splitlines() == [
        f"{path} has no roles: it is a training file",
        f"    fix: megatune train '{path}'",
    ]


def test_engines_that_are_not_installed_are_named_with_what_helps(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # not installed, wherever this runs
    file = str(FILES / "colocated_vllm_packing.yaml")
    assert main(["rl", file]) == ExitCode.SETTINGS
    said = capsys.readouterr().err
    line = next(n for n, text in enumerate(Path(file).read_text().splitlines(), 1) if "strategy_name: vllm" in text)
    assert f"colocated_vllm_packing.yaml:{line}: actor_infer has strategy_name vllm" in said
    assert "actor_infer.strategy_args.strategy_name=builtin" in said
    assert _PYTHON in said
    assert main(["rl", file, f"{_PYTHON}=/nobody/python"]) == ExitCode.SETTINGS
    assert "/nobody/python is not an executable" in capsys.readouterr().err


_CONFIG = (
    '{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 32, '
    '"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, '
    '"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu", '
    '"tie_word_embeddings": false}'
)


def test_the_model_says_which_layouts_it_has(capsys, tmp_path):
    (tmp_path / "config.json").write_text(_CONFIG, encoding="utf-8")
    words = [f"pretrain={tmp_path}", "actor_train.strategy_args.strategy_config.tensor_model_parallel_size=8"]
    words.append("actor_infer.strategy_args.strategy_name=builtin")
    assert main(["rl", str(FILES / "colocated_vllm_packing.yaml"), *words]) == ExitCode.SETTINGS
    assert "tensor_model_parallel_size 8 does not split the model's" in capsys.readouterr().err
    assert (
        main(["rl", str(FILES / "colocated_vllm_packing.yaml"), words[0], "response_length=8000"]) == ExitCode.SETTINGS
    )
    assert "sequence_length 10048 is more than the 8192 positions" in capsys.readouterr().err


def test_explain_speaks_of_roles_and_files(capsys, monkeypatch):
    monkeypatch.setenv("LANG", "C")
    assert main(["explain", "actor_infer.generating_args.top_p"]) == ExitCode.DONE
    assert "ROLE.generating_args.top_p (megatune rl)" in capsys.readouterr().out
    assert main(["explain", str(FILES / "qwen3_8b.yaml"), "adv_estimator=grpo"]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert "adv_estimator: grpo (override; default gae)" in said
    assert "grpo: the reward minus the mean of its group" in said
