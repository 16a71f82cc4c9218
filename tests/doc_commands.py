"""The command lines of the documents, and a way to run each one where a user would: in a folder with what it names."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import itertools
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from pool_launch import CommandLine, Ended
from script_kit import run_script

from megatune.errors import ExitCode

ROOT = Path(__file__).parents[1]
# Chinese pages have the same commands: test_site.py compares them.
_ENGLISH = (page for page in sorted((ROOT / "docs").glob("*.md")) if not page.name.endswith(".zh.md"))
PAGES = [ROOT / "README.md", *_ENGLISH]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_ASSIGNMENT = re.compile(r"[A-Z]\w*=\S*")
_PROGRAMS = ("megatune", "make", "pip", "pip-audit", "python", "python3", "torchrun", "curl", "ray", "export",
             "llamafactory-cli", "megatron", "openssl", "source")  # fmt: skip


class Command(NamedTuple):
    """One command line of a page."""

    page: str
    line: int  # of the page, from 1
    text: str  # as written, continued lines joined

    @property
    def bare(self) -> str:
        """The command line without its comment."""
        return re.sub(r"\s+# .*", "", self.text)


class Words(NamedTuple):
    """A command line as a shell takes it apart."""

    environment: dict[str, str]
    program: str
    words: list[str]
    stdin: str | None  # a file's name


def files_of(page: Path) -> dict[str, str]:
    """Return the files that a page has in full: YAML blocks that begin with `# NAME.yaml`, and tables below a name."""
    text = page.read_text(encoding="utf-8")
    blocks = (block for label, block in _FENCE.findall(text) if label == "yaml")
    tables = re.findall(r"`([\w-]+\.csv)`[:：]\n\n```csv\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return dict(tables) | {found[1]: block for block in blocks if (found := re.match(r"# ([\w-]+\.yaml)\n", block))}


def commands_of(page: Path) -> list[Command]:
    """Return every command line of a page's fenced blocks.

    A block labelled bash has only command lines; one with lines that begin with `$ ` has those and what they print;
    a block without a label has command lines if one of its lines begins with a program.
    """
    found = []
    text = page.read_text(encoding="utf-8")
    for block in _FENCE.finditer(text):
        lines, first = block[2].splitlines(), text.count("\n", 0, block.start()) + 2
        prompted = any(line.startswith("$ ") for line in lines)
        if not prompted and not (block[1] == "bash" or (not block[1] and any(map(_begins_with_program, lines)))):
            continue
        begun = ""
        for number, line in enumerate(lines, first):
            if prompted and not begun and not line.startswith("$ "):
                continue
            begun += line.removeprefix("$ ").strip() if not begun else f" {line.strip()}"
            if begun.endswith("\\"):
                begun = begun[:-1].rstrip()
            elif begun and not begun.startswith("#"):
                found.append(Command(page.name, number, begun))
                begun = ""
            else:
                begun = ""
    return found


def _begins_with_program(line: str) -> bool:
    words = line.removeprefix("$ ").split()
    program = next((word for word in words if not _ASSIGNMENT.fullmatch(word)), "")
    return program.rpartition("/")[2] in _PROGRAMS


def split(text: str) -> Words:
    """Take a command line apart; comments are left out."""
    words = shlex.split(re.sub(r"\s+# .*", "", text))  # shlex would end NAME#20 at its sign, which a shell does not
    environment = {}
    while words and _ASSIGNMENT.fullmatch(words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    stdin = None
    if "<" in words:
        stdin = words[(at := words.index("<")) + 1]
        words = words[:at]
    assert words, f"no program in {text!r}"
    return Words(environment, words[0].rpartition("/")[2], words[1:], stdin)


class _Parsed(Exception):  # noqa: N818 - ends a script, and is no error
    """A script has read its words."""


class Shell:
    """Runs the command lines of a page in the working folder.

    Every command of megatune runs in this process with all of its start-up checks. What comes after them is left out
    where it needs minutes or other machines: the ranks of a training run, the actors of Ray, the later stages of a
    rehearsal, long answers, and listening for requests, which come from `curl` instead.

    Args:
        trains: training runs, too, with the ranks of the pool. Then the comment of an `infer` is what it prints.
    """

    def __init__(self, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, *, trains: bool = False) -> None:
        self._megatune = command_line
        if trains:
            command_line.limit = 600  # recipes take minutes on two cores that others use, too
        self._monkeypatch = monkeypatch
        self._launched = 0
        self._app: Any = None
        self._run = {
            "megatune": self._run_megatune, "make": _make, "pip": _pip, "python": self._python, "python3": self._python,
            "torchrun": self._torchrun, "curl": self._curl, "ray": _ray,
        }  # fmt: skip
        for module in ("launch.supervisor", "doctor.run")[trains:]:
            monkeypatch.setattr(f"megatune.{module}.run_ranks", self._count_launch)
        monkeypatch.setattr("megatune.rl.pipeline.run.start", self._count_launch)
        monkeypatch.setattr("megatune.training.sweep.Sweep._train", lambda sweep, *trial: self._trial(sweep, *trial))
        run = importlib.import_module("megatune.rehearse.run").Rehearsal.run
        monkeypatch.setattr("megatune.rehearse.run.Rehearsal.run", lambda rehearsal: run(rehearsal, later={}))
        monkeypatch.setattr("megatune.generation.endpoint.server.Server", self._keep_app)
        listen = importlib.import_module("megatune.generation.endpoint.server").listening_socket
        monkeypatch.setattr(  # the port of a document may be taken here
            "megatune.generation.endpoint.server.listening_socket", lambda host, port, **more: listen(host, 0, **more)
        )
        self._trains = trains

    def __call__(self, text: str) -> None:
        """Run one command line.

        Raises:
            AssertionError: it ends as a user would not want it to, with what it has printed.
        """
        split_text = split(text)
        assert split_text.program in self._run, f"nothing runs {split_text.program}: {text}"
        with self._monkeypatch.context() as patch:
            for name, value in split_text.environment.items():
                patch.setenv(name, value)
            with _stdin(split_text.stdin):
                ended = self._run[split_text.program](split_text.words)
        assert ended.returncode == 0, f"{text}\n{ended.stdout[-2000:]}\n{ended.stderr}"
        printed = re.search(r"\bmegatune infer .* # (.+)", text)
        if self._trains and printed:
            assert printed[1] in ended.stdout + ended.stderr, f"{text}\n{ended.stdout}\n{ended.stderr}"

    def _run_megatune(self, words: list[str]) -> Ended:
        before = self._launched
        if words[0] in ("infer", "serve", "evaluate") and "--max_new_tokens" not in words:
            words = [*words, "--max_new_tokens", "64" if self._trains else "4"]  # random models do not stop
        if words[0] == "train" and not self._trains and not any("resume" in word for word in words):
            words = [*words, "overwrite_output_dir=true"]  # the stand-in's run there has other settings
        if words[0] == "sweep" and "--trials" in words:
            words[words.index("--trials") + 1] = "2"
        if words[0] == "train" and self._trains:
            words = [*words, "dataloader_num_workers=0"]  # ranks of the pool start no processes
        with contextlib.suppress(SystemExit):  # --version
            ended = self._megatune(*words)
            if words[0] == "doctor" and ended.returncode == ExitCode.UNAVAILABLE:
                ended = ended._replace(returncode=0)  # this machine may lack what a run needs
            starts = words[0] in ("train", "sft", "pt", "dpo", "kto", "rm", "cls", "rl") and not self._trains
            assert not starts or ended.returncode or self._launched > before, f"{words}: nothing was started"
            return ended
        return Ended(0, "", "")

    def _count_launch(self, *args: Any, **kwargs: Any) -> int:
        self._launched += 1
        return 0

    def _trial(self, sweep: Any, name: str, values: Any, slot: int) -> int:
        """Run a trial of a sweep in this process, as any other training."""
        return self._megatune("train", sweep.source, *sweep.words(values)).returncode

    def _keep_app(self, app: Any, *args: Any) -> SimpleNamespace:
        """Take a server's place, which does not listen."""
        self._app = app
        return SimpleNamespace(serve_on=lambda taken: None)

    def _python(self, words: list[str]) -> Ended:
        """Run a script of the repository; a benchmark ends where its words are read."""
        script, *rest = words
        assert (ROOT / script).is_file(), f"{script} is not in the repository"
        if not script.startswith("benchmarks/"):
            return _parsing(lambda: run_script(Path(script), *rest))
        with self._monkeypatch.context() as patch:
            parse = argparse.ArgumentParser.parse_args

            def parse_only(parser: argparse.ArgumentParser, *args: Any) -> None:
                parse(parser, *args)
                raise _Parsed

            patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
            patch.setattr(sys, "argv", [script, *rest])
            patch.syspath_prepend(ROOT / "benchmarks")
            return _parsing(lambda: runpy.run_path(str(ROOT / script), run_name="__main__"))

    def _torchrun(self, words: list[str]) -> Ended:
        """Read torchrun's own words, and run in one process what it would start in each."""
        from torch.distributed.run import get_args_parser

        asked: dict[str, Any] = {}
        ended = _parsing(lambda: asked.update(vars(get_args_parser().parse_args(words))))
        if ended.returncode:
            return ended
        assert asked["module"] or asked["no_python"], "torchrun starts no module"
        assert asked["training_script"] == "megatune"
        return self._run_megatune(asked["training_script_args"])

    def _curl(self, words: list[str]) -> Ended:
        """Send a request to what `megatune serve` would answer with."""
        from starlette.testclient import TestClient

        parser = argparse.ArgumentParser()
        parser.add_argument("url")
        parser.add_argument("-H", "--header", action="append", default=[])
        parser.add_argument("-d", "--data")
        asked = parser.parse_args(words)
        assert self._app is not None, "nothing is served"
        headers = dict(header.split(": ", 1) for header in asked.header)
        with TestClient(self._app, base_url="http://localhost:8000") as client:
            answer = client.request("POST" if asked.data else "GET", asked.url, content=asked.data, headers=headers)
        return Ended(answer.status_code != 200, answer.text, "")


def _make(words: list[str]) -> Ended:
    ended = subprocess.run(["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, timeout=30)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def _pip(words: list[str]) -> Ended:
    """Compare pip's words with what its help lists, and look for the files and the extras that they name."""
    text = _help_of_pip(words[0])
    known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text))
    unknown = [word for word in words if word.startswith("-") and word.partition("=")[0] not in known]
    assert not unknown, f"pip {words[0]} has no {unknown}"
    files = [file for flag, file in itertools.pairwise(words) if flag in ("-c", "-r")]
    missing = [file for file in files if not (ROOT / file).is_file()]
    assert not missing, f"not in the repository: {missing}"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = re.findall(r"(?:megatune|\.)\[([\w-]+)\]", " ".join(words))
    assert extras.keys() >= set(named), f"there is no extra among {named}"
    return Ended(0, text, "")


@functools.cache
def _help_of_pip(verb: str) -> str:
    command = [sys.executable, "-m", "pip", verb, "--help"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def _ray(words: list[str]) -> Ended:
    from ray.scripts.scripts import cli

    return _parsing(lambda: cli.commands[words[0]].make_context(words[0], words[1:]))


def _parsing(read: Callable[[], Any]) -> Ended:
    """Call what reads words, and ends the process where it cannot."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            read()
    except _Parsed:
        pass
    except SystemExit as ended:
        return Ended(int(ended.code or 0), out.getvalue(), err.getvalue())
    except Exception as error:  # click's
        return Ended(2, out.getvalue(), f"{type(error).__name__}: {error}")
    return Ended(0, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _stdin(name: str | None) -> Iterator[None]:
    """Give what a command reads: a file, or one question."""
    before = sys.stdin
    sys.stdin = io.StringIO("Who are you?\n" if name is None else Path(name).read_text(encoding="utf-8"))
    try:
        yield
    finally:
        sys.stdin = before
