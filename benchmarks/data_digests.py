"""Digests of the rows that this program makes of data: ids, labels, their order, packing and pictures, as JSON.

python benchmarks/data_digests.py DATA DUMP.json       makes rows of a folder with dataset_info.json, and of the tests
python benchmarks/data_digests.py --compare A B        lists what differs; the exit code is 1 if anything does

A change of how rows are made is compared so: one dump before it, one after it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "data"), str(TESTS / "swift_golden")]

from cases import CASES  # noqa: E402
from models import make_models  # noqa: E402
from ours import encode  # noqa: E402
from tokenizer_kit import (  # noqa: E402
    deepseek_tokenizer,
    gemma_tokenizer,
    llama3_tokenizer,
    mistral_tokenizer,
    qwen_tokenizer,
)

from megatune.config.load import load  # noqa: E402
from megatune.data.encode import load_tokenizer  # noqa: E402
from megatune.data.order import PreparedSteps  # noqa: E402
from megatune.data.pipeline import Pipeline  # noqa: E402
from megatune.data.prepare import prepare  # noqa: E402
from megatune.data.rows import TokenRows  # noqa: E402
from megatune.data.streaming.blocks import MixedStream  # noqa: E402
from megatune.data.vision import load_vision_input  # noqa: E402
from megatune.errors import MegatuneError  # noqa: E402

TOKENIZERS: dict[str, Callable[[], Any]] = {
    "qwen2": qwen_tokenizer,
    "qwen3": lambda: qwen_tokenizer("qwen3"),
    "marked": lambda: qwen_tokenizer("marked"),
    "llama3": llama3_tokenizer,
    "llama31": lambda: llama3_tokenizer("llama31"),
    "deepseek3": deepseek_tokenizer,
    "deepseekr1": lambda: deepseek_tokenizer("deepseekr1"),
    "mistral": mistral_tokenizer,
    "gemma": gemma_tokenizer,
}
TEMPLATES = {"qwen2": "qwen", "qwen3": "qwen3", "llama3": "llama3", "deepseek3": "deepseek3", "mistral": "mistral"}
CONVERSATIONS = "alpaca_en_demo,identity,glaive_toolcall_en_demo"
SHARED = {"model_name": "Tuna", "model_author": "Nobody", "on_bad_row": "quarantine", "max_bad_rows": "null"}


def runs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, tokenizer and settings of every run over the data sets."""
    for name in TOKENIZERS:
        for template in ("null", TEMPLATES.get(name)):
            if template is None:
                continue
            for packing in (False, True):
                changes = {"dataset": CONVERSATIONS, "template": template, "packing": packing, "cutoff_len": 512}
                yield f"sft/{name}/{template}/{packing}", name, changes
            pairs = {"dataset": "dpo_en_demo", "template": template, "stage": "dpo", "cutoff_len": 400}
            yield f"dpo/{name}/{template}", name, pairs
    yield "sft/default", "qwen2", {"dataset": CONVERSATIONS, "template": "default", "cutoff_len": 300}
    for name, change in {
        "val": {"val_size": 0.1, "eval_strategy": "epoch"},
        "prompt": {"train_on_prompt": True},
        "history": {"mask_history": True},
        "mixed": {"mix_strategy": "interleave_over", "interleave_probs": "0.5,0.2,0.3"},
        "grouped": {"group_by_length": True},
        "drawn": {"dataset": "alpaca_en_demo#700,identity#200"},
        "processes": {"preprocessing_num_workers": 2},
    }.items():
        yield f"sft/{name}", "qwen2", {"dataset": CONVERSATIONS, "template": "qwen", "cutoff_len": 256, **change}
    for packing in (False, True):
        texts = {"dataset": "c4_demo,wiki_demo", "stage": "pt", "packing": packing, "cutoff_len": 256}
        yield f"pt/{packing}", "qwen2", texts
    yield "rm/packed", "qwen2", {"dataset": "dpo_en_demo", "template": "qwen", "stage": "rm", "packing": True}


def dump(data: Path) -> dict[str, str]:
    """Return a digest of all that each run makes, by its name."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["MEGATUNE_CACHE"] = str(folder / "cache")
        for run, kind, changes in runs():
            tokenizer = TOKENIZERS[kind]()
            tokenizer.save_pretrained(folder / kind)
            found[run] = digest_of(folder, data, kind, changes, tokenizer)
            if run.split("/")[0] in ("pt", "rm") or run.startswith(("sft/mixed", "sft/qwen2")):
                found[f"streamed {run}"] = streamed(folder, data, kind, changes, tokenizer)
        make_models(models := folder / "models")
        found["pictures"] = media(folder, data, models)
        for number, case in enumerate(CASES):
            (work := folder / "cases" / str(number)).mkdir(parents=True)
            found[f"case {case['name']}"] = digest(encode(case, models, work), folder)
    return found


def digest_of(folder: Path, data: Path, kind: str, changes: dict[str, Any], tokenizer: Any, vision: Any = None) -> str:
    """Prepare rows, and digest them with the order in which two epochs train them and with the report."""
    settings = settings_of(folder, data, kind, changes)
    try:
        prepared = prepare(settings, tokenizer, vision=vision)
    except MegatuneError as error:
        return str(error)
    steps = PreparedSteps.from_settings(prepared.train, settings, 4)
    order = [steps.row_ids(step).tolist() for step in range(2 * steps.steps_per_epoch)]
    evaluation = None if prepared.evaluation is None else prepared.evaluation.digest
    report = prepared.report.raw()
    return digest([prepared.train.digest, evaluation, order, report, content(prepared.train)])


def content(rows: TokenRows) -> str:
    """Digest what a loader reads, next to the digest that the rows have of themselves."""
    state = hashlib.sha256()
    for row in rows:
        for document in row:
            state.update(document.input_ids.tobytes() + b"|" + document.labels.tobytes())
            state.update(repr([(p.start, p.num_tokens, p.grid, p.is_video) for p in document.media]).encode())
        state.update(b"\n")
    return state.hexdigest()


def streamed(folder: Path, data: Path, kind: str, changes: dict[str, Any], tokenizer: Any) -> str:
    """Digest the first blocks of the same data as a stream."""
    settings = settings_of(folder, data, kind, {**changes, "streaming": True, "buffer_size": 300, "max_steps": 10})
    stream = MixedStream(Pipeline.of(settings, tokenizer))
    parts: list[Any] = []
    for number in range(5):
        (block := folder / f"blocks-{kind}-{digest(changes)[:12]}-{number}").mkdir()
        meta = stream.write_block(block)
        parts += [content(TokenRows(block / "train")), meta.end.to_json()]
        order = block / "order.npy"
        parts.append(hashlib.sha256(order.read_bytes()).hexdigest())
    stream.close()
    return digest(parts, folder)


def media(folder: Path, data: Path, models: Path) -> str:
    """Digest rows with images."""
    model = models / "Qwen2-VL-7B-Instruct"
    (folder / "vision").symlink_to(model)
    tokenizer = load_tokenizer(model)
    changes = {"dataset": "mllm_demo", "template": "qwen2_vl", "image_max_pixels": 20000}
    vision = load_vision_input(model, tokenizer, settings_of(folder, data, "vision", changes).data)
    assert vision is not None
    return digest_of(folder, data, "vision", changes, tokenizer, vision)


def settings_of(folder: Path, data: Path, kind: str, changes: dict[str, Any]) -> Any:
    values = {
        "model_name_or_path": folder / kind, "dataset_dir": data, "output_dir": folder / "out", "cutoff_len": 512,
        "max_samples": 400, **SHARED, **changes,
    }  # fmt: skip
    return load(overrides=[f"{key}={value}" for key, value in values.items()]).require_valid()


def digest(value: Any, folder: Path | None = None) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256((text if folder is None else text.replace(str(folder), "")).encode()).hexdigest()


def main() -> int:
    if sys.argv[1] != "--compare":
        found = dump(Path(sys.argv[1]))
        Path(sys.argv[2]).write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(f"{len(found)} digests")
        return 0
    one, other = (json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[2:4])
    differing = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    print("\n".join(differing) or f"all {len(one)} digests are equal")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
