"""The published runs of vision-language models on CPU processes, by files that are as users have them.

Tiny models stand for those that were trained, and eight processes for the 32 GPUs of Qwen3-VL-8B: two replicas of the
model instead of eight, one of tp 8 instead of four.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from pool import RankPool
from runs import metrics, tensors, train

from megatune.config.load import load
from megatune.demo.checkpoint import make_checkpoint
from megatune.plan.catalogue import cpu_machine
from megatune.plan.run.preflight import preflight

EXAMPLES = Path(__file__).parents[2] / "examples" / "vision"
WORLD = 8
# A family, and sizes that its layout can cut: 8 heads for tp 8, and of 12 layers three in each of four parts.
MODELS = {
    "qwen2_vl_full": ("qwen2_vl", {}),
    "qwen3_vl_8b_32gpu": ("qwen3_vl", {"num_attention_heads": 8, "num_query_groups": 8}),
    "qwen3_vl_8b_32gpu_tp8": ("qwen3_vl", {"num_attention_heads": 8, "num_query_groups": 8}),
    "qwen3_vl_8b_32gpu_pp2": ("qwen3_vl", {"num_layers": 12}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets under the names of the files, in the form of LLaMA-Factory's mllm_demo: pictures in both turns."""
    folder = tmp_path_factory.mktemp("data")
    colours = ("red", "green", "blue", "white")
    for number, colour in enumerate(colours):
        Image.new("RGB", (48 + 32 * number, 64), colour).save(folder / f"{number}.jpg")
    rows = []
    for number in range(64):
        one, other = number % 4, number // 4 % 4
        turns = [
            ("user", "<image>Which colour is this?"),
            ("assistant", f"It is {colours[one]}."),
            ("user", "And this?<image>" if number % 3 else "Thank you."),
            ("assistant", f"It is {colours[other]}." if number % 3 else "You are welcome."),
        ]
        messages = [{"role": role, "content": content} for role, content in turns]
        names = [f"{one}.jpg", f"{other}.jpg"][: 2 if number % 3 else 1]
        rows.append({"messages": messages, "images": names})
    (folder / "rows.json").write_text(json.dumps(rows))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    entry = {"file_name": "rows.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps({"mllm_demo": entry, "llava_1k_en": entry}))
    return folder


@pytest.mark.extended("qwen3_vl_8b_32gpu_tp8", "qwen3_vl_8b_32gpu_pp2", "qwen2_vl_full")
@pytest.mark.parametrize("name", MODELS)
def test_a_published_file_runs_as_it_is(name: str, pool: RankPool, data: Path, tmp_path: Path) -> None:
    """Only the model, the folders, and the number of steps, of their micro-batches and of the processes that read rows
    are others."""
    family, sizes = MODELS[name]
    model, output = make_checkpoint(family, tmp_path / "model", **sizes), tmp_path / "out"
    loaded = load(
        EXAMPLES / f"{name}.yaml",
        [f"model_name_or_path={model}", f"dataset_dir={data}", f"output_dir={output}", "max_steps=2",
         "gradient_accumulation_steps=2", "logging_steps=1", "preprocessing_num_workers=1",
         "dataloader_num_workers=0", "learning_rate=1e-3"],
    )  # fmt: skip
    checked = preflight(loaded, WORLD, (), cpu_machine(2**36, WORLD))
    assert checked.planned is not None
    case = checked.planned.case
    assert pool.run(WORLD, train, checked.settings, tmp_path / "run", None, case) == [0] * WORLD
    steps = metrics(output)
    assert list(steps) == [1, 2]
    assert all(step["loss"] > 0 and step["grad_norm"] > 0 for step in steps.values())
    before, after = tensors(model), tensors(output)
    assert {key: tensor.shape for key, tensor in before.items()} == {key: each.shape for key, each in after.items()}
    changed = {key for key, tensor in before.items() if not tensor.to(torch.bfloat16).equal(after[key])}
    # Two steps are less than the rounding of norms, which are near 1.
    matrices = {key for key, tensor in before.items() if tensor.dim() > 1}
    if family == "qwen2_vl":  # LLaMA-Factory's defaults; the other files say that everything is trained
        assert not {key for key in changed if "visual." in key}
        matrices = {key for key in matrices if "visual." not in key}
    assert matrices <= changed
    record = json.loads((output / "plan.json").read_text())["runs"][-1]["record"]
    assert record["case"]["image_tokens"] >= record["case"]["largest_picture"] > 0
    assert record["measured"]["picture_tokens"] > 0
