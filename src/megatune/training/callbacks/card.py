"""README.md of a trained model: what it was made of, how, and with what result, made from the run."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from megatune import __version__
from megatune.config.setting import Mark
from megatune.config.settings import Settings, all_settings, setting_value
from megatune.config.values import compose, shown
from megatune.errors import MegatuneError
from megatune.hub.repository import is_repository_id
from megatune.hub.upload import CARD, OWN_CARD
from megatune.plan.pages.words import seconds, size
from megatune.plan.run.record import PLAN_NAME, memory_of, read_records
from megatune.training.callbacks.base import Callback
from megatune.training.callbacks.metrics import METRICS_NAME
from megatune.training.callbacks.plot import PLOT_NAME
from megatune.training.storage.json_lines import read_json_lines

_STAGES = {
    "pt": "continued pretraining",
    "sft": "supervised fine-tuning",
    "dpo": "preference training on pairs of answers",
    "kto": "preference training on single answers",
    "rm": "training of a reward model",
}
_LIBRARIES = ("torch", "megatron-core", "transformers", "peft", "safetensors")
# Of the machine, or said elsewhere in the card.
_LEFT_OUT = ("run.output_dir", "run.run_name", "model.model_name_or_path", "model.cache_dir", "data.dataset")
_HUB = re.compile(r"(?:hf|ms)::", re.IGNORECASE)


class Card(Callback):
    """Writes the card of the final model into the output folder, and of checkpoints where they are pushed.

    Args:
        source: the folder of the model that the run started from; its card may say which license it has.
    """

    def __init__(self, settings: Settings, output_dir: Path, source: Path | None = None) -> None:
        self._settings, self._output_dir, self._source = settings, output_dir, source

    def on_final_model(self, path: Path) -> None:
        self.write(self._output_dir / CARD)

    def write(self, path: Path) -> None:
        """Write the card, unless a user has written one there."""
        if path.exists() and OWN_CARD not in path.read_text(encoding="utf-8", errors="replace"):
            return
        path.write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        """Return the card: Markdown below its YAML."""
        front = yaml.safe_dump(self._front_matter(), sort_keys=False, allow_unicode=True)
        return f"---\n{front}---\n{OWN_CARD}\n\n" + "\n".join(self._body())

    def _front_matter(self) -> dict[str, Any]:
        settings, base = self._settings, self._settings.model.model_name_or_path or ""
        is_lora = settings.finetuning.finetuning_type == "lora"
        found: dict[str, Any] = {"library_name": "peft" if is_lora else "transformers"}
        if _is_hub_id(base):
            found |= {"base_model": base, "base_model_relation": "adapter" if is_lora else "finetune"}
        if license_name := _license(self._source):
            found["license"] = license_name
        if datasets := [name for name in map(_hub_data, settings.data.dataset) if name]:
            found["datasets"] = datasets
        kind = "text-classification" if settings.run.stage == "rm" else "text-generation"
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
        """Return what was planned and what it came to."""
        if not (self._output_dir / PLAN_NAME).is_file():
            return {}
        try:
            record = read_records(self._output_dir)[-1]
        except MegatuneError:  # of another version
            return {}
        case, trained = record.case, record.as_trained()
        found = {"devices": f"{case.world_size} × {case.machine.device.name}"}
        if (memory := memory_of(record)) is not None:
            found["memory of a device"] = "{} planned, {} measured".format(*map(size, memory))
        if trained is not None and record.measured is not None and record.measured.step_seconds is not None:
            planned, measured = trained[1].time.total, record.measured.step_seconds
            found["time of a step"] = f"{seconds(planned)} planned, {seconds(measured)} measured"
        return found

    def _changed(self) -> dict[str, str]:
        return {
            info.name: f"`{shown(_public(value))}`".replace("|", "\\|").replace("\n", " ")
            for path, info in all_settings().items()
            if path not in _LEFT_OUT and Mark.SECRET not in info.marks
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
    """Return a value with the last part of each path of this machine in it."""
    if isinstance(value, Mapping):
        return {key: _public(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_public(each) for each in value]
    if isinstance(value, str) and "/" in value and (value[0] in "/~." or os.path.exists(value)):
        return os.path.basename(value.rstrip("/"))
    return value


def _is_hub_id(name: str) -> bool:
    return is_repository_id(name, owner=True) and not os.path.exists(name)


def _hub_data(name: str) -> str | None:
    """Return the id of a data set on a hub, None for any other."""
    name, is_named = _HUB.sub("", name).partition("#")[0].partition(":")[0], _HUB.match(name)
    return name if is_repository_id(name, owner=True) and (is_named or not os.path.exists(name)) else None


def _license(source: Path | None) -> str | None:
    """Return the license that a model's card names."""
    try:
        text = (source / CARD).read_text(encoding="utf-8") if source is not None else ""
        block = text.split("---")[1] if text.startswith("---") else ""
        compose(block)  # refuses what would grow without end
        front = yaml.safe_load(block) or {}
        found = front.get("license")
    except (OSError, ValueError, yaml.YAMLError, AttributeError, IndexError):
        return None
    return found if isinstance(found, str) else None


def _has_vision(source: Path | None) -> bool:
    from megatune.families import load_architecture

    return source is not None and load_architecture(source).vision is not None
