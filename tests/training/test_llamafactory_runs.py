"""Files of LLaMA-Factory's folder `examples` train as they are: tiny models, tiny data, two steps, on CPU processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llamafactory_kit import Example, examples
from PIL import Image
from pool import RankPool
from runs import metrics, train

from megatune.config.load import load
from megatune.demo.checkpoint import make_checkpoint
from megatune.plan.catalogue import cpu_machine
from megatune.plan.run.preflight import preflight
from megatune.training.checks import check_files

RUNS = {example.name: example for example in examples() if example.verb == "train" and not example.refused}
FIRST = "train_full/qwen3_full_sft.yaml"  # which names a file of DeepSpeed
SIZES: dict[str, dict[str, Any]] = {
    "extras/llama_pro/llama3_freeze_sft.yaml": {"num_layers": 8},
}
OPENAI = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
PAIR = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets under the names of the files, in the forms that they have there."""
    folder = tmp_path_factory.mktemp("data")
    Image.new("RGB", (64, 48), "red").save(folder / "red.jpg")
    plain, texts, pairs, judged, seen, preferred = [], [], [], [], [], []
    for number in range(48):
        ask, yes, no = f"Say {number}.", f"It is {number}.", "I do not know."
        said = {"from": "gpt", "value": yes}, {"from": "gpt", "value": no}
        messages = [{"role": "user", "content": ask}, {"role": "assistant", "content": yes}]
        plain.append({"instruction": ask, "input": "", "output": yes})
        texts.append({"text": f"{ask} {yes} " * 4})
        pairs.append({"conversations": [{"from": "human", "value": ask}], "chosen": said[0], "rejected": said[1]})
        judged.append({"messages": messages, "label": number % 2 == 0})
        shown = [{**messages[0], "content": f"<image>{ask}"}, messages[1]]
        seen.append({"messages": shown, "images": ["red.jpg"]})
        asked = [{"from": "human", "value": f"<image>{ask}"}]
        preferred.append({**pairs[-1], "conversations": asked, "images": ["red.jpg"]})
    with_images = {"messages": "messages", "images": "images"}
    kinds: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "identity": (plain, {}),
        "c4_demo": (texts, {"columns": {"prompt": "text"}}),
        "dpo_en_demo": (pairs, {"formatting": "sharegpt", "ranking": True, "columns": PAIR}),
        "kto_en_demo": (
            judged,
            {"formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"}, "tags": OPENAI},
        ),
        "mllm_demo": (seen, {"formatting": "sharegpt", "columns": with_images, "tags": OPENAI}),
        "rlhf_v": (
            preferred,
            {"formatting": "sharegpt", "ranking": True, "columns": {**PAIR, "images": "images"}},
        ),
    }
    info = {name: {"file_name": f"{name}.json", **entry} for name, (_, entry) in kinds.items()}
    for name, (rows, _) in kinds.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))
    info |= dict.fromkeys(("alpaca_en_demo", "alpaca_zh_demo", "alpaca_zh"), info["identity"])
    info |= dict.fromkeys(("llava_1k_en", "llava_1k_zh"), info["mllm_demo"])
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


@pytest.mark.extended(*(name for name in RUNS if name != FIRST))
@pytest.mark.parametrize("name", [FIRST, *(name for name in RUNS if name != FIRST)])
def test_an_example_trains(name: str, pool: RankPool, data: Path, tmp_path: Path) -> None:
    """Only the model, the folders, the number of steps and of the processes that read rows are others."""
    example: Example = RUNS[name]
    world, output = example.processes, tmp_path / "out"
    model = make_checkpoint(example.family, tmp_path / "model", **SIZES.get(name, {}))
    words = {
        "model_name_or_path": model, "dataset_dir": data, "output_dir": output, "max_steps": 2, "logging_steps": 1,
        "preprocessing_num_workers": 1, "dataloader_num_workers": 0, "cutoff_len": 256, "ddp_timeout": 240,
        "warmup_steps": "null", "warmup_ratio": "null", "learning_rate": 1e-3,
    }  # fmt: skip
    if "tokenized_path" in example.keys:
        words["tokenized_path"] = tmp_path / "rows"
    loaded = load(example.write(tmp_path), [f"{key}={value}" for key, value in words.items()])
    before = check_files(loaded.settings, loaded.invalid)
    assert before.errors == []
    checked = preflight(loaded, world, (), cpu_machine(2**36, world))
    assert checked.planned is not None
    assert any(line.startswith("accepted   trust_remote_code") for line in checked.lines) == (
        "trust_remote_code" in example.keys
    )
    case = checked.planned.case
    assert pool.run(world, train, checked.settings, tmp_path / "run", None, case) == [0] * world
    steps = metrics(output)
    assert list(steps) == [1, 2]
    assert all(step["loss"] > 0 and step["grad_norm"] > 0 for step in steps.values())
