"""The examples of preference training, as a user types them, on CPU processes with tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pool import RankPool
from runs import metrics, train

from megatune.config.load import load
from megatune.demo.checkpoint import make_checkpoint
from megatune.plan.catalogue import cpu_machine
from megatune.plan.run.preflight import preflight

EXAMPLES = Path(__file__).parents[2] / "examples" / "preference"
# The processes of the layout, the loss at margin 0, which only means something with a reference, and the files trained.
RUNS = {
    "qwen3_lora_dpo": (2, 0.693147, "adapter_model.safetensors"),
    "qwen3_full_dpo": (4, 0.693147, "model.safetensors"),
    "qwen3_full_simpo": (2, None, "model.safetensors.index.json"),
    "qwen3_lora_kto": (2, 0.5, "adapter_model.safetensors"),
    "qwen3_full_rm": (2, None, "model.safetensors"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs and single answers under the names of the files, in the forms of LLaMA-Factory's demos."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {
            "conversations": [{"from": "human", "value": f"Is {number} even?"}],
            "chosen": {"from": "gpt", "value": "Yes, it is. " * (1 + number % 3)},
            "rejected": {"from": "gpt", "value": "No, it is odd. " * (1 + number % 2)},
        }
        for number in range(40)
    ]
    (folder / "pairs.json").write_text(json.dumps(rows))
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    entry = {"file_name": "pairs.json", "formatting": "sharegpt", "ranking": True, "columns": columns}
    answers = [
        {"messages": [{"role": "user", "content": row["conversations"][0]["value"]},
                      {"role": "assistant", "content": row["rejected" if number % 2 else "chosen"]["value"]}],
         "label": number % 2 == 0}
        for number, row in enumerate(rows)
    ]  # fmt: skip
    (folder / "answers.json").write_text(json.dumps(answers))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "kto_tag": "label"}
    single = {"file_name": "answers.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps({"dpo_en_demo": entry, "kto_en_demo": single}))
    return folder


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(RUNS)


@pytest.mark.extended("qwen3_lora_dpo", "qwen3_lora_kto", "qwen3_full_simpo", "qwen3_full_rm")
@pytest.mark.parametrize("name", RUNS)
def test_an_example_trains(name: str, pool: RankPool, data: Path, tmp_path: Path) -> None:
    """Only the model, the folders, the number of steps, of their micro-batches and of the processes that read rows are
    others."""
    world_size, first_loss, file = RUNS[name]
    model, output = make_checkpoint("qwen3", tmp_path / "model", num_layers=2), tmp_path / "out"
    loaded = load(
        EXAMPLES / f"{name}.yaml",
        [f"model_name_or_path={model}", f"dataset_dir={data}", f"output_dir={output}", "max_steps=3",
         "gradient_accumulation_steps=8", "logging_steps=1", "preprocessing_num_workers=1",
         "dataloader_num_workers=0", "learning_rate=1e-3",
         "cutoff_len=64", "ddp_timeout=240", "report_to=none"],
    )  # fmt: skip
    checked = preflight(loaded, world_size, (), cpu_machine(2**36, world_size))
    assert checked.planned is not None
    reference = [line for line in checked.lines if "the reference computes all rows" in line]
    assert len(reference) == (first_loss is not None)
    case = checked.planned.case
    assert pool.run(world_size, train, checked.settings, tmp_path / "run", None, case) == [0] * world_size
    steps = metrics(output)
    assert list(steps) == [1, 2, 3]
    if first_loss is not None:
        assert steps[1].get("loss/sigmoid", steps[1]["loss"]) == pytest.approx(first_loss, abs=2e-2)
    margins = [step["rewards/margins" if "rewards/margins" in step else "margin"] for step in steps.values()]
    assert margins[-1] > margins[0]
    assert (output / file).exists()
