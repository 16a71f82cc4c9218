"""Stops runs, and starts or resumes them as processes of their own, which outlive the page."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.ui.runs import RUN_YAML

TOKEN_VARIABLE = "MEGATUNE_UI_TOKEN"
_MOST_STARTED = 50
_SAID_BYTES = 8192


def request_stop(folder: Path) -> None:
    """Ask a run to save a checkpoint and stop after its step, by the file that its ranks look for.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    try:
        (folder / "STOP").touch()
    except OSError as error:
        finding = Finding("the run cannot be asked to stop", str(folder / "STOP"), error.strerror or str(error))
        raise MegatuneError(finding, ExitCode.CANNOT_WRITE) from error


class Starter:
    """Starts runs from the folder that the server works in, so that relative paths mean what they do there."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._started: list[tuple[subprocess.Popen[bytes], str, Path]] = []  # with its command and what it prints to

    def check(self, file: str, overrides: Sequence[str]) -> list[dict[str, str]]:
        """Return what is wrong with the settings of a run, as far as is known without starting it.

        Raises:
            MegatuneError: INPUT, where the file is outside of this folder, missing or unreadable.
        """
        path = self.path(file)
        from megatune.config.entry import is_rl_file

        if is_rl_file(path):
            from megatune.config.dialects.roll import read_roll

            return [asdict(finding) for finding in read_roll(path, overrides).findings]
        from megatune.config.load import load

        return [asdict(finding) for finding in load(path, overrides).check()]

    def start(self, file: str, overrides: Sequence[str]) -> int:
        """Start a run and return its number in `list`.

        Raises:
            MegatuneError: INPUT, as of `check`; CANNOT_WRITE, where its output has no place.
        """
        from megatune.config.entry import is_rl_file

        path = self.path(file)
        verb = "rl" if is_rl_file(path) else "train"
        return self._run([verb, path, *overrides])

    def resume(self, folder: Path) -> int:
        """Start a run once more with its own settings; it goes on from its newest whole checkpoint.

        Raises:
            MegatuneError: CANNOT_WRITE, where its output has no place.
        """
        from megatune.config.entry import is_rl_file

        file = str(folder / RUN_YAML)
        if is_rl_file(file):
            words = ["rl", file, "resume_from_checkpoint=true"]
        else:
            words = ["train", file, "resume_from_checkpoint=null", "overwrite_output_dir=false"]
        return self._run([*words, f"output_dir={folder}"])

    def path(self, file: str) -> str:
        """Return a settings file below this folder, as it was written.

        Raises:
            MegatuneError: INPUT.
        """
        here, path = Path.cwd().resolve(), Path(file)
        if not file or path.suffix not in (".yaml", ".yml", ".json") or not path.resolve().is_relative_to(here):
            why = f"the page starts .yaml files below {here}, where the server was started"
            raise MegatuneError(Finding(f"{file or 'no file'} cannot be started", "file", why), ExitCode.INPUT)
        return file

    def _run(self, words: list[str]) -> int:
        log = self._log_dir / f"started-{os.getpid()}-{len(self._started) + 1}.log"
        command = [sys.executable, "-m", "megatune", *words]
        environment = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            finding = Finding("the run cannot be started", str(log), error.strerror or str(error))
            raise MegatuneError(finding, ExitCode.CANNOT_WRITE) from error
        self._started.append((process, " ".join(["megatune", *words]), log))
        return len(self._started) - 1

    def list(self) -> list[dict[str, Any]]:
        """Return what was started, the last first: command, exit code (None while it runs), last words."""
        return [
            {"command": command, "exit_code": process.poll(),
             "said": log.read_bytes()[-_SAID_BYTES:].decode(errors="replace") if log.exists() else ""}
            for process, command, log in reversed(self._started[-_MOST_STARTED:])
        ]  # fmt: skip
