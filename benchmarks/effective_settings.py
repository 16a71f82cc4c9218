"""What every example file and script means: its effective settings, with where each came from, as JSON.

python benchmarks/effective_settings.py DUMP.json          writes them
python benchmarks/effective_settings.py --compare A B      lists what differs; the exit code is 1 if anything does

A change of how settings are read is compared so: one dump before it, one after it.
"""

from __future__ import annotations

import json
import runpy
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatune.architecture import Architecture
from megatune.config.dialects.roll import read_roll
from megatune.config.dialects.swift import read_swift, swift_lines
from megatune.config.entry import is_rl_file
from megatune.config.load import Loaded, load
from megatune.config.settings import Settings
from megatune.errors import Finding, MegatuneError
from megatune.families import as_trained, read_architecture
from megatune.plan.catalogue.models import model_config

ROOT = Path(__file__).parents[1]
DENSE = {"num_hidden_layers": 28, "dtype": "bfloat16", "max_position_embeddings": 32768}
MODELS = {
    "dense": DENSE,
    "moe": {**DENSE, "num_experts": 128, "router_aux_loss_coef": 0.001},
    "vision": {"model_type": "qwen3_vl", "vision_config": {}, "text_config": DENSE},
}
PUBLISHED = ("Qwen3-0.6B", "Qwen3-30B-A3B", "Qwen3-VL-8B-Instruct")


def dump() -> dict[str, Any]:
    """Read every file and script; values are plain data, by name of the file."""
    found: dict[str, Any] = {}
    files = [path for path in (ROOT / "examples").rglob("*.yaml") if path.parent.name != "templates"]
    for path in sorted([*files, *(ROOT / "tests" / "config" / "roll_files").glob("*.yaml")]):
        name = str(path.relative_to(ROOT))
        if is_rl_file(path):
            found |= {f"{name} ({model})": _rl(path, model) for model in ("unknown", *PUBLISHED)}
        else:
            found[name] = _loaded(load(path))
    with tempfile.TemporaryDirectory() as folder:
        for example in runpy.run_path(str(ROOT / "tests" / "llamafactory_kit.py"))["examples"]():
            path = example.write(Path(folder))
            read = json.dumps(_loaded(load(path).for_world(example.processes)))
            found[f"LLaMA-Factory {example.name}"] = json.loads(read.replace(folder, ""))
    for path in sorted((ROOT / "examples" / "swift").rglob("*.sh")):
        for model, config in MODELS.items():
            found[f"{path.relative_to(ROOT)} ({model})"] = _script(path, config)
    return found


def _loaded(loaded: Loaded) -> dict[str, Any]:
    return {
        "settings": loaded.settings.model_dump(mode="json"),
        "origins": {path: where for path, where in loaded.origins.items() if where != "default"},
        "findings": _texts(loaded.check()),
        "lines": loaded.accepted_notes(),
    }


def _rl(path: Path, model: str) -> dict[str, Any]:
    """Read a file whose models are all a published one; "unknown" leaves out the rules that need its numbers."""

    def model_of(settings: Settings, stage: str) -> Architecture | None:
        config, where = model_config(model, asks_hub=False)
        try:
            return as_trained(read_architecture(config, where), stage, where)
        except MegatuneError:  # there is no critic of it
            return None

    read = read_roll(path, model_of=None if model == "unknown" else model_of)
    return {"settings": repr(read.settings), "findings": _texts(read.findings), "lines": list(read.lines)}


def _script(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Read the command of a script; words with = before it are variables."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    words = next(words for line in text.splitlines() if "megatron" in (words := shlex.split(line, comments=True)))
    start = words.index("megatron")
    env = dict(word.split("=", 1) for word in words[:start])
    run = read_swift(words[start + 1], words[start + 2 :], env=env, config=config)
    loaded = run.loaded.for_world(None)
    return {**_loaded(loaded), "lines": swift_lines(run, loaded)}


def _texts(findings: Iterable[Finding]) -> list[str]:
    return [str(finding) for finding in findings]


def differences(one: Any, other: Any, at: str = "") -> Iterator[str]:
    """List the places where two dumps differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from differences(one.get(key, "absent"), other.get(key, "absent"), f"{at} > {key}" if at else key)
    elif isinstance(one, list) and isinstance(other, list):
        yield from (f"{at}: only in the first: {each}" for each in one if each not in other)
        yield from (f"{at}: only in the second: {each}" for each in other if each not in one)
    elif one != other:
        yield f"{at}:\n    {one}\n    {other}"


def main(words: list[str]) -> int:
    """Write a dump, or compare two."""
    if words[0] != "--compare":
        text = json.dumps(dump(), indent=1, ensure_ascii=False)
        Path(words[0]).write_text(text.replace(f"{ROOT}/", ""), encoding="utf-8")  # of any clone
        return 0
    one, other = (json.loads(Path(word).read_text(encoding="utf-8")) for word in words[1:])
    found = [*differences(one, other)]
    print("\n".join(found) or f"{len(one)} files and scripts mean the same")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
