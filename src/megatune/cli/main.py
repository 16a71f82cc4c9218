"""`megatune VERB ...`: runs a verb, and turns errors into messages and exit codes."""

from __future__ import annotations

import atexit
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from megatune import __version__
from megatune.cli.pages import GROUPS, QUIET, RUNS, VERBS, Help, new_parser
from megatune.errors import ExitCode, Finding, MegatuneError, closest, without_secrets
from megatune.launch.output import OutputLost, exit_when_output_lost
from megatune.launch.torchrun import exit_on_stop_signals, is_first, report_once
from megatune.progress import QUIET_VARIABLE

_UNSUPPORTED = {
    "ppo": "PPO is not supported; `megatune dpo` trains on pairs of answers, and `megatune rl` trains on rewards",
}

_MOST_SHOWN = 100  # characters of a name
_ABOUT = (
    "Fine-tune large language models with Megatron-Core, from a Hugging Face checkpoint to a Hugging Face checkpoint."
)
_EPILOG = """\
exit codes: 0 done, 64 settings, 65 data, 66 input missing or refused, 69 a service or peer missing, 70 internal,
71 out of memory, 73 cannot write, 75 stopped and resumable, 76 a process died or hung, 77 numbers not finite"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; errors of the user are never raised.

    Args:
        argv: the arguments after the program's name; None uses `sys.argv`.
    """
    if is_own := argv is None:
        argv = sys.argv[1:]
        exit_when_output_lost()  # unless a verb calls `divert_lost_output`
        exit_on_stop_signals()
    try:
        code = _run(list(argv))
        sys.stdout.flush()  # here, where OutputLost is still handled
        return code
    except MegatuneError as error:
        return report_once(report(error), error.exit_code, first=is_first())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        if is_own:
            _exit_at_once(ExitCode.INTERRUPTED)
        return int(ExitCode.INTERRUPTED)
    except OutputLost as lost:
        if lost.reason:
            print(f"cannot write the output: {lost.reason}", file=sys.stderr)
        return int(ExitCode.CANNOT_WRITE)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            why, fix = "file systems allow at most 255 bytes per name and 4095 per path", "write a shorter one"
            print(Finding(f"{str(error.filename)[:_MOST_SHOWN]}... is too long a name", "", why, fix), file=sys.stderr)
            return int(ExitCode.INPUT)
        print(_internal(error), file=sys.stderr)
        return int(ExitCode.INTERNAL)


def _exit_at_once(code: ExitCode) -> NoReturn:
    """Run the exit handlers and end the process without freeing all modules, which takes seconds with torch."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def report(error: MegatuneError) -> str:
    """Return all findings, separated by blank lines, and their number if there are several."""
    parts = [str(finding) for finding in error.findings]
    return "\n\n".join([*parts, f"{len(parts)} problems"] if len(parts) > 1 else parts)


def _run(words: list[str]) -> int:
    verb = words[0] if words else ""
    if not words:
        print(_page(), end="", file=sys.stderr)
        return int(ExitCode.SETTINGS)
    if verb in ("-h", "--help", "--version"):
        print(f"megatune {__version__}" if verb == "--version" else _page().rstrip("\n"))
        return int(ExitCode.DONE)
    if verb not in VERBS:
        _refuse(verb)
    if verb in RUNS.split() and QUIET in words:
        os.environ[QUIET_VARIABLE] = "1"  # also for child processes
        words = [word for word in words if word != QUIET]
    try:
        return int(import_module(f"megatune.cli.{VERBS[verb][0]}").run(verb, words[1:]))
    except Help as page:
        print(page, end="")
        if verb in RUNS.split():
            print(f"\n{QUIET} prints only warnings, errors and results")
        return int(ExitCode.DONE)


def _page() -> str:
    parser = new_parser("megatune", "megatune [-h] [--version] VERB ...", _ABOUT, _EPILOG)
    for heading, names in GROUPS.items():
        group = parser.add_argument_group(heading)
        for verb in names.split():
            # Two spaces indent the verbs like argparse's subparsers.
            group.add_argument(verb, metavar=f"  {verb}", nargs="?", help=VERBS[verb][1])
    return parser.format_help()


def _refuse(word: str) -> NoReturn:
    """Raise an error that says what to write instead of an unknown verb."""
    if word.startswith("-"):
        near = closest(word, ("--help", "--version"))
        fix = f"did you mean {near}?" if near else "`megatune --help` lists the verbs; flags follow the verb"
        finding = Finding(f"{word!r} is not known here", "megatune", fix=fix)
    elif word in _UNSUPPORTED:
        fix = "`megatune --help` lists what is supported"
        finding = Finding("not supported", f"megatune {word}", _UNSUPPORTED[word], fix)
    else:
        from megatune.cli.command import unknown_verb
        from megatune.config.dialects.dialect import read_part

        foreign = read_part("llamafactory", "verbs")
        if word not in foreign:
            raise unknown_verb(word, [*VERBS, *_UNSUPPORTED], "megatune")
        finding = Finding(f"{word!r} is LLaMA-Factory's verb", "megatune", fix=foreign[word])
    raise MegatuneError(finding, ExitCode.SETTINGS)


def _internal(error: Exception) -> str:
    """Return the message for an internal error: one line, and the file with the traceback."""
    text = without_secrets(traceback.format_exc())
    if os.environ.get("MEGATUNE_DEBUG", "0") not in ("", "0"):
        return text.rstrip()
    import tempfile

    line = without_secrets(" ".join(f"{type(error).__name__}: {error}".split()))
    try:
        with tempfile.NamedTemporaryFile("wb", prefix="megatune-", suffix=".txt", delete=False) as file:
            file.write(text.encode())
    except OSError:
        return f"internal error: {line} (MEGATUNE_DEBUG=1 shows the traceback)"
    return f"internal error: {line}\n    traceback in {file.name}; MEGATUNE_DEBUG=1 shows it here"
