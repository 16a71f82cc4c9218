"""`megatune completion`: what a shell offers, asked of the shell itself; and --quiet."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pool_launch import CommandLine

from megatune.cli.main import main
from megatune.cli.pages import VERBS
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "megatune"
    program = "import sys; from megatune.cli.main import main; main(['completion', 'bash'])"
    program = f"{program}; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    path.write_text(done.stdout)
    return path


def offered(script: Path, *words: str) -> set[str]:
    """What bash offers for the last of these words; it makes three words of `key=value`."""
    line = " ".join(map(shlex.quote, words))
    shows = "_megatune; printf '%s\\n' \"${COMPREPLY[@]}\""
    asked = f"source {script}; COMP_WORDS=(megatune {line}); COMP_CWORD={len(words)}; {shows}"
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=60, cwd=script.parent)
    return {*done.stdout.split("\n")} - {""}


def test_bash(script: Path) -> None:
    assert offered(script, "") == {*VERBS, "--help", "--version"}
    assert offered(script, "data", "") == {"preview", "stats"}
    assert offered(script, "new", "--go") == {"--goal"}
    assert offered(script, "new", "--goal", "") == {"full", "lora", "dpo", "rl"}
    assert offered(script, "train", "learning_ra") == {"learning_rate="}
    assert offered(script, "sft", "--finetuning_ty") == {"--finetuning_type"}
    assert offered(script, "train", "x.yaml", "finetuning_type", "=", "l") == {"lora"}
    assert offered(script, "train", "bf16", "=") == {"true", "false"}
    assert offered(script, "train", "bf16=t") == {"bf16=true"}  # as zsh splits words
    assert offered(script, "train", "mega") == {"megatune"}  # a file
    assert "--quiet" in offered(script, "export", "--")
    assert "--quiet" not in offered(script, "explain", "--")


def test_other_shells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert "complete -c megatune -n '__fish_seen_subcommand_from new' -l goal -x -a 'full lora dpo rl'" in lines
    assert main(["completion", "zsh"]) == ExitCode.DONE
    assert "bashcompinit" in capsys.readouterr().out.splitlines()[0]
    assert main(["completion", "csh"]) == ExitCode.SETTINGS
    assert "fix: bash, zsh or fish" in capsys.readouterr().err


def test_quiet(tmp_path: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MEGATUNE_QUIET", "0")  # and back to what it was
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    make_checkpoint("qwen3", tmp_path / "model")
    (tmp_path / "my.csv").write_text("instruction,output\nHi,Hello!\n" * 2)
    flags = {"model_name_or_path": "model", "dataset": "my.csv", "output_dir": "out", "max_steps": 2, "use_cpu": True}
    done = command_line("sft", "--quiet", *(f"--{key}={each}" for key, each in flags.items()))
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"finished: 2 steps in .*\nplan .*\nthe model is in out\n", done.stdout), done.stdout
    # The first run of a device is what later plans take memory beyond tensors from.
    assert "framework: " in (tmp_path / "config/megatune/calibration/cpu.yaml").read_text()
    assert main(["explain", "learning_rate", "--quiet"]) == ExitCode.SETTINGS  # it runs nothing
