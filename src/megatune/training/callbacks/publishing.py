"""Writes the model card, and pushes models to a hub at every save and at the end, in one separate process at a time."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from megatune import __version__
from megatune.config.setting import Mark
from megatune.config.settings import Settings, all_settings, setting_value
from megatune.config.values import construct, shown
from megatune.errors import MegatuneError
from megatune.hub.models import is_hub_id
from megatune.hub.repository import Hub, is_repository_id, use_modelscope
from megatune.hub.upload import CARD, OWN_CARD, endpoint, push_command, read_answer, start
from megatune.plan.pages.words import seconds, size
from megatune.plan.run.record import PLAN_NAME, compare_memory, read_records
from megatune.training.callbacks.base import Callback, StepReport, TrainSummary
from megatune.training.callbacks.metrics import METRICS_NAME
from megatune.training.callbacks.plot import PLOT_NAME
from megatune.training.run_schedule import RunSchedule
from megatune.training.storage.files import read_json_lines
from megatune.training.storage.manifest import TRAINING_FOLDER, read_manifest

_STAGES = {
    "pt": "continued pretraining",
    "sft": "supervised fine-tuning",
    "dpo": "preference training on pairs of answers",
    "kto": "preference training on single answers",
    "rm": "training of a reward model",
    "cls": "training of a classifier",
}
_LIBRARIES = ("torch", "megatron-core", "transformers", "peft", "safetensors")
# Settings of the machine, or in other parts of the card.
_EXCLUDED = ("run.output_dir", "run.run_name", "model.model_name_or_path", "model.cache_dir", "data.dataset")
_HUB = re.compile(r"(?:hf|ms)::", re.IGNORECASE)


class Card(Callback):
    """Writes the model card of the final model into the output folder, and those of pushed checkpoints.

    Args:
        source: the folder of the initial model, whose card may name a license.
    """

    def __init__(self, settings: Settings, output_dir: Path, source: Path | None = None) -> None:
        self._settings, self._output_dir, self._source = settings, output_dir, source

    def on_final_model(self, path: Path) -> None:
        self.write(self._output_dir / CARD)

    def write(self, path: Path) -> None:
        """Write the card, but do not replace one that a user wrote."""
        if path.exists() and OWN_CARD not in path.read_text(encoding="utf-8", errors="replace"):
            return
        path.write_text(self.text(), encoding="utf-8", errors="backslashreplace")

    def text(self) -> str:
        """Return the card: YAML front matter and Markdown."""
        front = yaml.safe_dump(self._front_matter(), sort_keys=False, allow_unicode=True)
        return f"---\n{front}---\n{OWN_CARD}\n\n" + "\n".join(self._body())

    def _front_matter(self) -> dict[str, Any]:
        settings, base = self._settings, self._settings.model.model_name_or_path or ""
        is_lora = settings.finetuning.finetuning_type == "lora"
        found: dict[str, Any] = {"library_name": "peft" if is_lora else "transformers"}
        if is_hub_id(base):
            found |= {"base_model": base, "base_model_relation": "adapter" if is_lora else "finetune"}
        if license_name := _license(self._source):
            found["license"] = license_name
        if datasets := [name for name in map(_hub_data, settings.data.dataset) if name]:
            found["datasets"] = datasets
        kind = "text-classification" if settings.run.stage in ("rm", "cls") else "text-generation"
        found["pipeline_tag"] = "image-text-to-text" if _has_vision(self._source) else kind
        found["tags"] = ["megatune", settings.run.stage, *(["lora"] if is_lora else [])]
        return found

    def _body(self) -> Iterator[str]:
        settings, base = self._settings, self._settings.model.model_name_or_path or "a model"
        name = settings.run.run_name or self._output_dir.absolute().name
        what = "An adapter for" if settings.finetuning.finetuning_type == "lora" else "Made from"
        yield from (f"# {name}", "", f"{what} `{_public(base)}` by {_STAGES[settings.run.stage]} with megatune.", "")
        yield from ("## Data", "", *(f"- `{_public(name)}`" for name in settings.data.dataset), "")
        yield from ("## Result", "", *_table("", self._results()))
        if (self._output_dir / PLOT_NAME).is_file():
            yield from (f"![loss]({PLOT_NAME})", "")
        yield from ("## Settings", "", "Those that are not the defaults:", "", *_table("setting", self._changed()))
        yield from ("## Versions", "", *_table("", _versions()))

    def _results(self) -> dict[str, str]:
        records = read_json_lines(self._output_dir / METRICS_NAME)
        steps = [record for record in records if record.get("loss") is not None]
        evaluations = [record["eval_loss"] for record in records if record.get("eval_loss") is not None]
        found = {}
        if steps:
            found["steps"] = f"{steps[-1]['step']:,}"
            found["training loss"] = f"{steps[0]['loss']:.4f} at first, {steps[-1]['loss']:.4f} at last"
            found["trained tokens"] = f"{sum(record['num_tokens'] for record in steps):,}"
        if evaluations:
            found["evaluation loss"] = f"{evaluations[-1]:.4f} at last, {min(evaluations):.4f} at best"
        return {**found, **self._planned()}

    def _planned(self) -> dict[str, str]:
        """Return planned and measured values."""
        if not (self._output_dir / PLAN_NAME).is_file():
            return {}
        try:
            record = read_records(self._output_dir)[-1]
        except MegatuneError:  # of another version
            return {}
        case, trained = record.case, record.as_trained()
        found = {"devices": f"{case.world_size} × {case.machine.device.name}"}
        if (memory := compare_memory(record)) is not None:
            found["memory of a device"] = "{} planned, {} measured".format(*map(size, memory))
        if trained is not None and record.measured is not None and record.measured.step_seconds is not None:
            planned, measured = trained[1].time.total, record.measured.step_seconds
            found["time of a step"] = f"{seconds(planned)} planned, {seconds(measured)} measured"
        return found

    def _changed(self) -> dict[str, str]:
        return {
            info.name: f"`{shown(_public(value))}`".replace("|", "\\|").replace("\n", " ")
            for path, info in all_settings().items()
            if path not in _EXCLUDED and Mark.SECRET not in info.marks
            if (value := setting_value(self._settings, path)) != info.default
        }


def _table(head: str, rows: Mapping[str, str]) -> Iterator[str]:
    if rows:
        yield from (f"| {head} | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()))
        yield ""


def _versions() -> dict[str, str]:
    found = {"megatune": __version__, "Python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _public(value: Any) -> Any:
    """Return a value with each local path shortened to its last part."""
    if isinstance(value, Mapping):
        return {key: _public(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_public(each) for each in value]
    if isinstance(value, str) and "/" in value and (value[0] in "/~." or os.path.exists(value)):
        return os.path.basename(value.rstrip("/"))
    return value


def _hub_data(name: str) -> str | None:
    """Return the id of a data set on a hub, None for any other."""
    name, is_named = _HUB.sub("", name).partition("#")[0].partition(":")[0], _HUB.match(name)
    return name if is_repository_id(name, owner=True) and (is_named or not os.path.exists(name)) else None


def _license(source: Path | None) -> str | None:
    """Return the license in a model's card."""
    try:
        text = (source / CARD).read_text(encoding="utf-8") if source is not None else ""
        block = text.split("---")[1] if text.startswith("---") else ""
        found = (construct(block) or {}).get("license")
    except (OSError, ValueError, yaml.YAMLError, AttributeError, IndexError):
        return None
    return found if isinstance(found, str) else None


def _has_vision(source: Path | None) -> bool:
    from megatune.families import load_architecture

    return source is not None and load_architecture(source).vision is not None


_logger = logging.getLogger(__name__)
_FOLDER = ".push"
PUSH_TIMEOUT = 600.0  # seconds, and more for each byte
_MIN_BYTES_PER_SECOND = 5e6
_STOPPED_SECONDS = 30.0
# Training state and the model in Megatron-Core's format are not pushed.
_NOT_SENT = (TRAINING_FOLDER, "iter_", "latest_checkpointed_iteration")
_POLL_SECONDS = 0.2


class HubPush(Callback):
    """Pushes checkpoints. During a push, only the newest checkpoint is queued. Failures do not end the run.

    Args:
        write_card: writes README.md into a folder before it is pushed.
        stop_requested: whether the run was asked to stop.
    """

    def __init__(
        self,
        settings: Settings,
        output_dir: Path,
        log_dir: Path,
        write_card: Callable[[Path], None],
        stop_requested: Callable[[], bool],
    ) -> None:
        self._settings, self._output_dir, self._log = settings.checkpoint, output_dir, log_dir / "push.log"
        self._write_card, self._stop_requested = write_card, stop_requested
        self._hub: Hub = "ms" if use_modelscope() else "hf"
        self._repo_id = settings.checkpoint.hub_model_id or output_dir.absolute().name
        self._waiting: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._sent, self._deadline = output_dir, 0.0  # of the current push
        self._has_warned = False

    def on_train_begin(self, schedule: RunSchedule) -> None:
        self._clean()  # remove files of a killed run

    def on_save(self, path: Path) -> None:
        if self._settings.hub_strategy == "every_save":
            self._waiting = path
            self._advance()

    def on_step_end(self, report: StepReport) -> None:
        self._advance()

    def on_train_end(self, summary: TrainSummary) -> None:
        if summary.outcome == "finished":
            return  # `on_final_model` follows
        if summary.outcome == "stopped":
            self._wait(time.monotonic() + _STOPPED_SECONDS, lambda: False)
        self._give_up("the run has ended")
        self._clean()

    def on_final_model(self, path: Path) -> None:
        """Push the final model, and wait for it until the deadline or a stop request."""
        if self._process is not None:  # a push of an earlier checkpoint, or of this one with an earlier card
            self._end()
        self._has_warned, self._waiting = False, path
        self._advance()
        self._wait(self._deadline, self._stop_requested)
        self._give_up("the run was asked to end" if self._stop_requested() else "it hangs")
        self._clean()

    def _clean(self) -> None:
        shutil.rmtree(self._output_dir / _FOLDER, ignore_errors=True)

    def _advance(self) -> None:
        """Check whether the current push has ended, and start the next one."""
        if self._process is not None and self._process.poll() is not None:
            answer, self._process = read_answer(self._process), None
            if "repo_id" in answer:
                print(f"pushed {self._sent.name} to {answer['repo_id']} on {endpoint(self._hub)}", flush=True)
            else:
                self._warn(answer["why"])
        if self._process is not None and time.monotonic() > self._deadline:
            self._give_up("it hangs")
        if self._process is None and self._waiting is not None:
            path, self._waiting = self._waiting, None
            try:
                self._start(path)
            except Exception as error:
                self._warn(f"{type(error).__name__}: {error}")

    def _start(self, path: Path) -> None:
        self._sent = path
        folder = self._output_dir / _FOLDER
        num_bytes = _link_model(path, folder)
        if (self._output_dir / PLOT_NAME).is_file():
            shutil.copyfile(self._output_dir / PLOT_NAME, folder / PLOT_NAME)
        self._write_card(folder / CARD)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        order = {
            "task": "send",
            "hub": self._hub,
            "repo_id": self._repo_id,
            "private": self._settings.hub_private_repo,
            "folder": str(folder.absolute()),
            "message": f"Model of {path.name}",
        }
        self._deadline = time.monotonic() + PUSH_TIMEOUT + num_bytes / _MIN_BYTES_PER_SECOND
        self._process = start(order, self._log)

    def _wait(self, deadline: float, cancelled: Callable[[], bool]) -> None:
        """Wait for the current push."""
        while self._process is not None and time.monotonic() < deadline and not cancelled():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL_SECONDS)
                self._advance()

    def _give_up(self, why: str) -> None:
        if self._process is not None:
            self._end()
            self._warn(why)

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        read_answer(self._process)
        self._process = None

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            command = push_command(self._hub, self._repo_id, self._sent)
            _logger.warning("pushing %s to %s failed: %s; later: %s", self._sent.name, self._repo_id, why, command)


def _link_model(checkpoint: Path, folder: Path) -> int:
    """Link the model's files of a checkpoint, which may be deleted meanwhile, into a folder; return their bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    files = [file for file in read_manifest(checkpoint).files if not file.name.startswith(_NOT_SENT)]
    for file in files:
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(checkpoint / file.name, target)
        except OSError:  # a file system without links
            shutil.copyfile(checkpoint / file.name, target)
    return sum(file.size for file in files)
