"""`megatune plan`: whether a run fits and how fast it is, and which layout is best, before anything is launched."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.cli.own_flags import split_words
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.plan.answer import Answer

_DESCRIPTION = """Says whether a run fits, how fast it will be and which layout is best, from the numbers of the model
and the machines alone. Nothing is started, and no GPU is needed."""

_EPILOG = """A settings file is planned as it is, then better layouts are searched for:

    megatune plan run.yaml
    megatune plan run.yaml --gpu h100-80g --gpus 16 recompute_granularity=full

A model's folder, config.json or name is searched for its best layout:

    megatune plan Qwen3-30B-A3B --gpus 32 --gpu h100-80g
    megatune plan ./my-model --gpus 8 --gpu a100-80g --seq 4096 --global_batch 64 --output best.yaml

ROLL's file of reinforcement learning is planned role by role: what shares a device, and the seconds of each phase.

    megatune plan rlvr.yaml --gpu h100-80g --response_tokens 1500

Settings are those of train, as key=value or --key value; a layout, batch or recomputation among them is planned as it
is, as in a file. Keys of LoRA can be planned, too: lora_rank, lora_target. Without --gpu the plan is for this machine.

exit codes: 0 it fits, 64 settings or an invalid layout, 66 an unknown model, device or file, 71 what is planned does
not fit (all is printed nevertheless), 73 cannot write"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb and its flags."""
    parser = subparsers.add_parser(
        "plan",
        help="which layout, whether it fits and how fast, before anything is launched",
        usage="megatune plan FILE.yaml|MODEL [key=value ...] [--gpu KIND] [--gpus N] [OPTION ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="FILE.yaml|MODEL")
    _add_options(parser)
    parser.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    def add(name: str, metavar: str, text: str, **more: Any) -> None:
        names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*names, dest=name, metavar=metavar, help=text, **more)

    # Values stay text here: everything that is wrong with them is reported together.
    add("gpu", "KIND", "a device of the catalogue, such as a100-80g (this machine's)")
    add("gpus", "N", "devices of the whole run (num_processes, or this machine's)")
    add("gpus_per_node", "N", "devices of one machine (as machines of the kind have)")
    add("link", "NAME", "what joins the devices of a machine (as machines of the kind have)")
    add("network", "NAME", "what joins machines, such as ib-400 or ethernet-100g (as machines of the kind have)")
    add("seq", "N", "tokens of a row: cutoff_len (2048)")
    add("global_batch", "N", "rows of a step (those of the settings; 64, or one a device, for a bare model)")
    add("trainable", "full|lora", "what is trained (full)")
    add("document_length", "L", "tokens of the mean document: of a row, or of those packed into one (the data's)")
    add("longest_document", "N", "tokens of the longest document (the data's, or cutoff_len)")
    add("image_tokens", "N", "tokens of a row that stand for pictures (one image of image_max_pixels)")
    add("dataset_tokens", "N", "tokens of the whole run, such as 1B or 250M: says how long they take")
    add("prompt_tokens", "N", "tokens of the mean prompt of an RL file (a quarter of the longest)")
    add("response_tokens", "N", "tokens of the mean response of an RL file (half of the longest)")
    add("top", "N", "layouts to list (10)")
    add("output", "FILE.yaml", "write the best layout as a settings file for megatune train")
    add("figures", "DIR", "draw memory against time, and the pipeline, as PNG files in this folder")
    add("launch", "torchrun|slurm", "print how the run is started on each machine", nargs="?", const="torchrun")
    add("devices", "FILE", "devices and links of your own")
    add("calibration", "FILE", "factors that --calibrate fitted (those of the device, where there are)")
    parser.add_argument("--calibrate", nargs="+", metavar="RUN", help="fit the planner to these runs' measurements")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Read the question, answer it and print.

    Raises:
        MegatuneError: SETTINGS, INPUT or CANNOT_WRITE, with everything that is wrong.
    """
    from megatune.config.dialects.llamafactory import LLAMAFACTORY

    if (file := _rl_file(args.words)) is not None:
        from megatune.cli.plan_rl import run as run_rl

        return run_rl(file, args.words, _add_options)
    options, words, findings = split_words(args.words, _add_options, LLAMAFACTORY)
    if options.calibrate:
        given = [words.source, *words.overrides, *words.flags]
        findings += [Finding(f"{word!r} says nothing to --calibrate") for word in given if word is not None]
        return _calibrate(options, findings)

    from megatune.cli.plan_question import QuestionReader
    from megatune.plan.answer import answer

    question = QuestionReader(options, words, findings=findings).question()
    gc.disable()  # a search makes many objects and hardly a cycle: collecting would take a tenth of its time
    try:
        found = answer(question)
    finally:
        gc.enable()
    if options.json:
        from megatune.plan.pages.document import document

        print(document(found, options.top))
    else:
        from megatune.plan.pages.whole import show

        show(found, options.top)
    _write(found, options)
    return ExitCode.DONE if found.fits else ExitCode.OUT_OF_MEMORY


def _rl_file(words: list[str]) -> str | None:
    """Return the first file among the words, if it describes reinforcement learning."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_options(parser)
    _, rest = parser.parse_known_args(words)
    file = next((word for word in rest if word.endswith((".yaml", ".yml")) and "=" not in word), None)
    if file is None:
        return None
    from megatune.config.dialects.roll import is_rl_file

    return file if is_rl_file(file) else None


def _write(found: Answer, options: argparse.Namespace) -> None:
    """Write the files, and print the lines that start the run, that were asked for."""
    written: list[str] = []
    if options.figures is not None:
        from megatune.plan.pages.figures import draw

        written += [str(path) for path in draw(found, Path(options.figures))]
    if options.output is not None and found.best is not None:
        from megatune.plan.launch_lines import winner_yaml

        text = winner_yaml(found.best, found.question.origins, found.question.written)
        try:
            Path(options.output).parent.mkdir(parents=True, exist_ok=True)
            Path(options.output).write_text(text, encoding="utf-8")
        except OSError as error:
            finding = Finding("cannot write the settings", options.output, error.strerror or str(error))
            raise MegatuneError(finding, ExitCode.CANNOT_WRITE) from error
        written.append(options.output)
    launch = _launch(found, options) if options.launch is not None else []
    if not options.json:
        print("\n".join([*(f"written: {path}" for path in written), *launch]), end="\n" if written or launch else "")


def _launch(found: Answer, options: argparse.Namespace) -> list[str]:
    from megatune.plan.launch_lines import Launch, sbatch_file, torchrun_lines

    chosen = (found.own if options.output is None else None) or found.best
    if chosen is None:
        return []
    case, file = chosen.case, options.output or found.question.file or "best.yaml"
    launch = Launch(file=file, settings=case.settings, machine=case.machine, world_size=case.world_size)
    if options.launch == "slurm":
        return ["", "# A file for sbatch", sbatch_file(launch)]
    lines = torchrun_lines(launch)
    if len(lines) == 1:
        return ["", *lines]
    return [part for rank, line in enumerate(lines) for part in ("", f"# On machine {rank}", line)]


def _calibrate(options: argparse.Namespace, findings: list[Finding]) -> int:
    """Fit, print what it does to the errors, and keep the factors for the next plan."""
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    from megatune.plan.calibration import calibrate, default_path, write

    report = calibrate(options.calibrate)
    path = Path(options.calibration) if options.calibration else default_path(report.device)
    print("\n".join(report.lines()))
    if not report.calibration.num_runs:
        what, fix = "nothing is written: without these factors plans are nearer", "give more runs, of several sizes"
        raise MegatuneError(Finding(what, why="the fit is refused, as said above", fix=fix), ExitCode.INPUT)
    write(report.calibration, path, report.device)
    print(f"written: {path}; plans for {report.device} use it" + (" with --calibration" if options.calibration else ""))
    return ExitCode.DONE
