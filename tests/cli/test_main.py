"""The command line around the verbs: help, refusals, reports and exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatune import __version__
from megatune.cli import infer, train
from megatune.cli import main as main_module
from megatune.cli.main import main, report
from megatune.errors import ExitCode, Finding, MegatuneError


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """Puts a function in the place of what `megatune infer` runs."""

    def replace(function: Callable[[], int]) -> None:
        monkeypatch.setattr(infer, "run", lambda verb, words: function())

    return replace


def test_help_is_light() -> None:
    program = (
        "import sys; from megatune.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'megatron', 'datasets', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    stages, others = ("sft", "pt", "dpo", "kto"), ("plan", "explain", "data", "verify", "infer", "export", "demo-model")
    for name in ("train", *stages, *others):
        assert f"\n    {name}" in done.stdout
    for name in main_module._UNSUPPORTED:
        assert f"\n    {name} " not in done.stdout


def test_help_groups_every_verb_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert re.findall(r"^(\w+):$", page, re.MULTILINE) == ["look", "plan", "train", "use", "convert"]
    shown = re.findall(r"^    (\w[\w-]*) ", page, re.MULTILINE)
    assert sorted(shown) == sorted(main_module.VERBS)


@pytest.mark.parametrize("verb", [*main_module.VERBS, "data preview", "data stats", "swift infer", "swift export"])
def test_every_verb_has_a_page_in_plain_words(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: megatune {verb} ")
    assert "Undefined" not in page
    unclear = r"\b(not built|says nothing|mends?|told|held against|beside|by turns|stands? for|likeliest|is no)\b"
    assert not re.findall(unclear, page)
    assert "--json_" not in page
    assert main([*verb.split(), "-h"]) == 0


def test_console_script_and_module() -> None:
    script = Path(sys.executable).parent / "megatune"
    for command in ([str(script)], [sys.executable, "-m", "megatune"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, f"megatune {__version__}\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "usage: megatune"),
        (["trian"], "did you mean `megatune train`?"),
        (
            ["qqq"],
            "families, data, verify, infer, evaluate, serve, export, rl",
        ),
        (["run.yaml"], "megatune train run.yaml"),
        (["infer"], "megatune infer: model_name_or_path is missing"),
        (["infer", "x", "--promt", "y"], "did you mean --prompt?"),
        (["infer", "x", "--temp", "0"], "'--temp' is not known here"),  # no abbreviations
        (["infer", "x", "--top_k", "many"], "--top_k: top_k is 'many'\n    why: expected a whole number"),
        (["--loud", "infer", "x"], "'--loud' is not known here"),
        (["--bogus"], "'--bogus' is not known here"),
        (["--versoin"], "did you mean --version?"),
        (["sft", "--learning_rte", "1e-5"], "did you mean learning_rate?"),
        (["dpo", "--pref_los", "ipo"], "did you mean pref_loss?"),
        (["kto", "--kto_los", "kto"], "did you mean kto_loss?"),
        (
            ["ppo"],
            "megatune ppo: not supported\n    why: PPO is not supported; `megatune dpo` trains on pairs of answers, and"
            " `megatune rl`",
        ),
        (["explain"], "nothing to explain"),
    ],
)
def test_refusals(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == ExitCode.SETTINGS
    output = capsys.readouterr()
    assert says in output.err
    assert output.out == ""


def test_settings_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(train, "run", lambda verb, words: seen.append(words) or 0)
    words = ["--learning_rate", "1", "run.yaml", "seed=3", "--report_to", "none", "bf16=true"]
    assert main(["train", *words]) == 0
    assert main(["sft", *words]) == 0
    assert seen == [words, words]


@pytest.mark.parametrize("count", [1, 3])
def test_findings_are_reported_whole(count: int, verb: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding(f"what {i}", f"run.yaml:{i}", f"why {i}", f"fix {i}") for i in range(count)]

    def run() -> int:
        raise MegatuneError(findings, ExitCode.DATA)

    verb(run)
    assert main(["infer", "model"]) == ExitCode.DATA
    text = capsys.readouterr().err
    for i in range(count):
        assert f"run.yaml:{i}: what {i}\n    why: why {i}\n    fix: fix {i}\n" in text
    assert text.count("\n\n") == (count if count > 1 else 0)
    assert text.endswith("\n\n3 problems\n") == (count > 1)


def test_interrupt(verb: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise KeyboardInterrupt

    verb(run)
    assert main(["infer", "model"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    "words", [["explain"], ["infer", "m", "--adapters"], ["demo-model", "--family", "qwen3", "--output"]]
)
def test_a_name_that_no_file_can_have(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "x" * 300]) == ExitCode.INPUT
    assert "x... is too long a name" in capsys.readouterr().err


def test_an_override_may_be_longer_than_a_name_of_a_file() -> None:
    assert infer.COMMAND.read(["m", f"system={'x' * 300}"]).options.system == "x" * 300


def test_internal_error(
    verb: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run() -> int:
        raise RuntimeError("two\nlines")

    verb(run)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("MEGATUNE_DEBUG", raising=False)
    assert main(["infer", "model"]) == ExitCode.INTERNAL
    text = capsys.readouterr().err
    (written,) = tmp_path.iterdir()
    assert text.startswith("internal error: RuntimeError: two lines\n")
    assert str(written) in text
    assert "Traceback" not in text
    assert "Traceback" in written.read_text(encoding="utf-8")

    monkeypatch.setenv("MEGATUNE_DEBUG", "1")
    assert main(["infer", "model"]) == ExitCode.INTERNAL
    assert "Traceback" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [written]


PRINTS_MUCH = """
import sys
from rich.console import Console
from megatune.cli import infer, main as m
def run(verb, words):
    for _ in range(10_000): Console().print('a line') if sys.argv.pop() == 'rich' else print('a line')
    return 0
infer.run = run
sys.argv[1:1] = ['infer', 'model']
sys.exit(m.main())
"""


@pytest.mark.parametrize("printer", ["print", "rich"])
def test_closed_pipe_is_quiet(printer: str) -> None:
    program = PRINTS_MUCH.replace("sys.argv.pop()", repr(printer))
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == ExitCode.CANNOT_WRITE
    process.stderr.close()


def test_full_device_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        program = PRINTS_MUCH.replace("sys.argv.pop()", "'print'")
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.stderr == "cannot write the output: No space left on device\n"
    assert done.returncode == ExitCode.CANNOT_WRITE


def test_report_of_one_string() -> None:
    assert report(MegatuneError("no place to write")) == "no place to write"


@pytest.mark.parametrize(("verb", "answer"), [("chat", "infer"), ("api", "serve"), ("eval", "megatune evaluate MODEL")])
def test_verbs_of_llama_factory_get_an_answer(verb: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "model.yaml"]) == ExitCode.SETTINGS
    assert answer in capsys.readouterr().err
