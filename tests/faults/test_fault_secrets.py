"""Tokens and keys are nowhere in what a run says and writes, whoever puts them into an error or prints them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megatune import errors
from megatune.cli import main
from megatune.config.settings import Settings
from megatune.data.cache import get_or_build
from megatune.data.streaming.producer import StreamFolder
from megatune.errors import Finding, MegatuneError, without_secrets
from megatune.launch.failure import describe_failure, write_failure

TOKEN, PASSWORD = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz", "correct-horse-battery"
VARIABLES = {
    "HF_TOKEN": TOKEN,
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "MODELSCOPE_API_TOKEN": "ms-11112222-3333",
    "OPENAI_API_KEY": "sk-proj-4444555566667777",
    "SWANLAB_API_KEY": "swan888899990000",
    "MLFLOW_TRACKING_PASSWORD": "tracking-password",
    "AWS_SECRET_ACCESS_KEY": "aws/secret+access=key",
    "MEGATUNE_API_KEY": "of-the-endpoint",
}
PROXY = f"http://user:{PASSWORD}@proxy.example:3128/"
# What a library might say of a request that failed.
SAID = f"GET https://hub.example via {PROXY} with {dict(sorted(VARIABLES.items()))}"
SECRETS = (*VARIABLES.values(), PASSWORD)


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def leaked(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


def raised(error: Exception) -> Exception:
    try:
        raise RuntimeError(SAID) from OSError(SAID)
    except RuntimeError as cause:
        error.__cause__ = cause
    return error


def test_a_crash_leaves_none_in_the_report_of_a_rank(tmp_path: Path, told: Callable[..., None]) -> None:
    """What the launcher prints, report.json and the rank's log are made of: summary, findings and traceback."""
    errors = (raised(RuntimeError(SAID)), raised(MegatuneError([Finding(SAID, SAID, SAID, SAID)])))
    for error in errors:
        failure = describe_failure(error)
        write_failure(tmp_path / "error.json", failure)
        text = (tmp_path / "error.json").read_text()
        assert leaked(text + str(failure.to_json())) == []
        assert "https://hub.example via http://***@proxy.example:3128/" in json.loads(text)["traceback"]
    got = describe_failure(errors[0]).summary.partition(", 'HF")[0]
    told(case="T52", fault="a rank crashes with tokens, keys and a proxy's password in its error", got=got)


def test_an_internal_error_of_a_verb_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the line, nor in the file with the traceback, which only its user can read."""
    for debug in ("0", "1"):
        monkeypatch.setenv("MEGATUNE_DEBUG", debug)
        try:
            raise raised(RuntimeError(SAID))
        except RuntimeError as error:
            text = main._internal(error)
        if debug == "0":
            file = Path(text.partition("traceback in ")[2].partition(";")[0])
            text += file.read_text()
            assert file.stat().st_mode & 0o777 == 0o600
            file.unlink()
        assert "RuntimeError" in text
        assert leaked(text) == []


def test_a_token_that_a_library_prints_or_warns_of_is_not_shown(tmp_path: Path, told: Callable[..., None]) -> None:
    program = (
        "import sys, os, warnings, logging\nfrom pathlib import Path\n"
        "from megatune.launch.output import divert_lost_output\n"
        f"divert_lost_output(Path({str(tmp_path / 'log')!r}))\n"
        "print('a é', sys.argv[1], 'z')\nwarnings.warn(sys.argv[1])\nlogging.getLogger('x').error(sys.argv[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, SAID], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, **VARIABLES},
    )  # fmt: skip
    first = done.stdout.splitlines()[0]
    assert first.startswith("a é GET https://hub.example via http://***@proxy.example:3128/ with {'AWS_SECRET")
    assert first.endswith("'WANDB_API_KEY': '***'} z")
    assert leaked(first + done.stderr) == []
    assert done.stderr.count("***@proxy") == 2
    told(case="T52", fault="a library prints a token, or warns with it", got=first)


def test_the_token_of_a_log_in_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("hf_theTokenOfALogIn\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    errors._hub_token.cache_clear()
    try:
        assert without_secrets("401 for hf_theTokenOfALogIn") == "401 for ***"
    finally:
        errors._hub_token.cache_clear()


def test_words_and_switches_are_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "enabled-by-me")
    monkeypatch.setenv("SOME_KEY", "true")
    text = "true enabled-by-me https://hub.example/a@b user@host"
    assert without_secrets(text) == text


def test_temporary_files_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the umask; and nothing in the sources takes a name in a shared folder by itself."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "shared"))
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "shared").mkdir(mode=0o777)
    (tmp_path / "file").touch()  # no folder, so that temporary files are taken
    before = os.umask(0)
    try:
        stream = StreamFolder.make(tmp_path / "file" / "cache", "stream")
        rows = get_or_build(Settings(), "k", lambda folder: None, lambda folder: folder)
    finally:
        os.umask(before)
    assert stream.path.stat().st_mode & 0o777 == 0o700
    assert rows.is_relative_to(tmp_path / "shared")
    (private,) = (tmp_path / "shared").glob("megatune-[0-9]*")
    assert private.stat().st_mode & 0o777 == 0o700
    source = Path(main.__file__).parents[1]
    text = "".join(path.read_text(encoding="utf-8") for path in source.rglob("*.py"))
    assert "mktemp(" not in text
    # The user's own folder in it, and where a short name for mkdtemp is needed.
    assert re.findall(r'(\w+) .*"/tmp', text) == ["temporary", "parent"]
