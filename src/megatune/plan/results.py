"""What `megatune plan` leaves besides its page: the best layout as a file, figures, how a run is started, factors."""

from __future__ import annotations

from pathlib import Path

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.answer import Answer
from megatune.plan.job_files import JOB_FILES, job_file
from megatune.plan.launch_lines import torchrun_lines, winner_yaml
from megatune.plan.options import PlanOptions


def write_results(found: Answer, options: PlanOptions) -> list[str]:
    """Write the files that were asked for; return which, and the lines that start the run.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    written: list[str] = []
    if options.figures is not None:
        from megatune.plan.pages.figures import figures

        for name, content in figures(found).items():
            written.append(_write_file(Path(options.figures) / name, content))
    if options.output is not None and found.best is not None:
        text = winner_yaml(found.best, found.question.origins, found.question.written)
        written.append(_write_file(Path(options.output), text.encode()))
    return [*(f"written: {path}" for path in written), *(_launch(found, options) if options.launch is not None else [])]


def _write_file(path: Path, content: bytes) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        finding = Finding("cannot write", str(path), error.strerror or str(error))
        raise MegatuneError(finding, ExitCode.CANNOT_WRITE) from error
    return str(path)


def _launch(found: Answer, options: PlanOptions) -> list[str]:
    chosen = (found.own if options.output is None else None) or found.best
    if chosen is None:
        return []
    file = options.output or found.question.file or "best.yaml"
    if options.launch in JOB_FILES:
        how, text = JOB_FILES[options.launch], job_file(options.launch, chosen.case, file)
        if options.launch_file is not None:
            return [f"written: {_write_file(Path(options.launch_file), text.encode())}, for {how}"]
        return ["", f"# A file for {how}", text]
    lines = torchrun_lines(chosen.case, file)
    if len(lines) == 1:
        return ["", *lines]
    return [part for rank, line in enumerate(lines) for part in ("", f"# On machine {rank}", line)]


def show_calibration(options: PlanOptions) -> None:
    """Fit factors to measured runs, print what that does to the errors, and keep them for the next plan.

    Raises:
        MegatuneError: INPUT, where plans without factors are nearer.
    """
    from megatune.plan.calibration.fit import calibrate
    from megatune.plan.calibration.store import default_path, write

    report = calibrate(options.calibrate)
    path = Path(options.calibration) if options.calibration else default_path(report.device)
    print("\n".join(report.lines()))
    if not report.calibration.num_runs:
        what, fix = "nothing is written: without these factors plans are nearer", "give more runs, of several sizes"
        raise MegatuneError(Finding(what, why="the fit is refused, as said above", fix=fix), ExitCode.INPUT)
    write(report.calibration, path, report.device)
    print(f"written: {path}; plans for {report.device} use it" + (" with --calibration" if options.calibration else ""))
