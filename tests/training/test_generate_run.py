"""Answers that are written during training: the tokens that Transformers writes greedily with the checkpoint of that
step, in every kind of layout; their scores, files and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures_kit import asks, draw, make_model
from PIL import Image
from pool import RankPool
from runs import evaluations, run, settings_of, train
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.training.answers import Answerer
from megatune.training.storage.files import read_json_lines

QUESTIONS = [
    {"instruction": "Who are you?", "output": "Tuna."},
    {"instruction": "Is the sky blue at noon, or is it rather green?", "output": ""},
    {"instruction": "A or B?", "output": "A"},
]
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "1": ("qwen3", 1, {}),
    "packed": ("qwen3", 1, {"packing": True}),
    "tp2 sp": ("qwen3", 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": ("qwen3", 2, {"pipeline_model_parallel_size": 2}),
    "pp2 vpp2": (
        "qwen3 of four layers",
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "cp2": ("qwen3", 2, {"context_parallel_size": 2}),
    "dp2, overlaps": ("qwen3", 2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "ep2": ("qwen3_moe", 2, {"expert_model_parallel_size": 2}),
    "lora": ("qwen3", 1, {"finetuning_type": "lora", "lora_rank": 4}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    layers = {"qwen3": 2, "qwen3_moe": 2, "qwen3 of four layers": 4}
    return {name: make_checkpoint(name.split()[0], folder / name, num_layers=number) for name, number in layers.items()}


def answering(model: Path, output_dir: Path, **changes: Any) -> Settings:
    """Two steps, with answers to five held-out rows after each."""
    values = {
        "max_steps": 2, "save_steps": 1, "val_size": 5, "eval_generate_steps": 1, "eval_generate_tokens": 9,
        "per_device_eval_batch_size": 2, "learning_rate": 5e-3,
    }  # fmt: skip
    return settings_of(model, output_dir, **{**values, **changes})


def train_and_note(settings: Settings, folder: Path) -> list[tuple[list[list[int]], list[list[int]]]]:
    """One rank's run: prompts and answers of each time, as this rank has them."""
    written, write = [], Answerer.write

    def note(answerer: Answerer, *args: Any) -> list[list[int]]:
        answers = write(answerer, *args)
        written.append(([each.token_ids.tolist() for each in answerer.prompts], answers))
        return answers

    Answerer.write = note  # type: ignore[method-assign]
    try:
        train(settings, folder)
    finally:
        Answerer.write = write  # type: ignore[method-assign]
    return written


def greedy(checkpoint: Path, prompts: list[list[int]], most: int) -> list[list[int]]:
    """What Transformers' generate answers, prompt by prompt; adapters are applied by peft."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most)
        found.append(whole[0, len(prompt) :].tolist())
    return found


# One process is in "packed" and "lora", too; the other two in the answers about pictures.
@pytest.mark.extended("1", "tp2 sp", "pp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_are_those_of_the_checkpoint(
    layout: str, pool: RankPool, models: dict[str, Path], tmp_path: Path
) -> None:
    family, world_size, changes = LAYOUTS[layout]
    settings = answering(models[family], tmp_path / "out", **changes)
    by_rank = pool.run(world_size, train_and_note, settings, tmp_path)
    assert all(each == by_rank[0] for each in by_rank)
    assert len(by_rank[0]) == 2
    for step, (prompts, answers) in enumerate(by_rank[0], 1):
        assert len({len(prompt) for prompt in prompts}) > 1
        assert answers == greedy(tmp_path / "out" / f"checkpoint-{step}", prompts, 9)
    lines = read_json_lines(tmp_path / "out" / "generations.jsonl")
    assert [(line["step"], line["id"]) for line in lines] == [(step, row) for step in (1, 2) for row in range(5)]
    assert [line["tokens"] for line in lines[5:]] == [len(answer) for answer in by_rank[0][1][1]]


@pytest.mark.parametrize("layout", ["tp2 sp", "pp2"])
def test_answers_about_pictures(layout: str, pool: RankPool, tmp_path: Path) -> None:
    """Questions with an image, with two and with none, in micro-batches: Transformers' processor and generate answer
    them the same way."""
    model = make_model(tmp_path, "qwen2_5_vl").folder
    images = [str(draw(tmp_path / f"{n}.png", 64 + 32 * n, 32, seed=n)) for n in range(2)]
    asked = [("<image>What is it?", images[:1]), ("Who are you?", []), ("<image><image>Which one?", images)]
    rows = [asks(question, "It is it.", images=media) for question, media in asked]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    _, world_size, changes = LAYOUTS[layout]
    changes |= {
        "dataset": tmp_path / "rows.json", "eval_generate_prompts": tmp_path / "rows.json", "val_size": 0,
        "max_steps": 1, "template": "qwen2_vl", "image_max_pixels": 64 * 64,
    }  # fmt: skip
    ((prompts, answers),), *_ = pool.run(
        world_size, train_and_note, answering(model, tmp_path / "out", **changes), tmp_path
    )
    checkpoint = tmp_path / "out" / "checkpoint-1"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
    stock = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    (pad,) = tokenizer("<|image_pad|>")["input_ids"]
    for (question, media), prompt, answer in zip(asked, prompts, answers, strict=True):
        seen = processor([Image.open(path) for path in media], return_tensors="pt") if media else {}
        tokens = [int(grid.prod()) // 4 for grid in seen.get("image_grid_thw", ())]
        text = question.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)[
            "input_ids"
        ]
        counts = iter(tokens)
        ids = [each for token in ids for each in [token] * (next(counts) if token == pad else 1)]
        assert ids == prompt
        inputs = {"input_ids": (whole := torch.tensor([ids])), "attention_mask": torch.ones_like(whole)}
        inputs["mm_token_type_ids"] = (whole == pad).int()
        found = stock.generate(**inputs, **seen, do_sample=False, max_new_tokens=9)
        assert answer == found[0, len(prompt) :].tolist()


def test_scores_are_logged_and_a_resume_goes_on(pool: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    """Questions of a file, of which two have an answer; the loss is evaluated at other steps."""
    (tmp_path / "questions.json").write_text(json.dumps(QUESTIONS))
    changes = {
        "eval_generate_prompts": tmp_path / "questions.json", "max_steps": 6, "save_steps": 3, "eval_steps": 6,
        "eval_strategy": "steps", "eval_generate_steps": 3, "learning_rate": 5e-3, "val_size": 8,
    }  # fmt: skip
    settings = answering(models["qwen3"], tmp_path / "out", **changes)
    run(pool, 1, settings, tmp_path, crash_at=4)
    run(pool, 1, settings, tmp_path)
    lines = read_json_lines(tmp_path / "out" / "generations.jsonl")
    assert [(line["step"], line["id"], line["label"]) for line in lines] == [
        (step, row, label) for step in (3, 6) for row, label in enumerate(("Tuna.", None, "A"))
    ]
    assert all("Who are you?" in line["prompt"] and line["prompt"].endswith("\n") for line in lines[::3])
    logged = evaluations(tmp_path / "out")
    assert logged[3]["eval_loss"] is None
    assert logged[6]["eval_loss"] > 0
    for record in logged.values():
        assert 0 <= record["eval_exact_match"] <= 1
        assert 0 < record["eval_answer_tokens"] <= 9
        assert "eval_choice_accuracy" not in record
    results = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert {"eval_loss", "eval_exact_match"} <= results.keys()


def test_a_learned_answer_is_exact(pool: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    """What was trained until it is known is answered so, and ends by itself."""
    (tmp_path / "rows.json").write_text(json.dumps(QUESTIONS[:1]))
    changes = {
        "dataset": tmp_path / "rows.json", "eval_generate_prompts": tmp_path / "rows.json", "val_size": 0,
        "max_steps": 40, "eval_generate_steps": 40, "save_steps": 40, "learning_rate": 1e-2,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    run(pool, 1, answering(models["qwen3"], tmp_path / "out", **changes), tmp_path)
    (line,) = read_json_lines(tmp_path / "out" / "generations.jsonl")
    assert (line["response"], line["score"], line["finish"]) == ("Tuna.", 1.0, "stop")
    assert evaluations(tmp_path / "out")[40]["eval_exact_match"] == 1


def test_texts_are_continued(pool: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"The sea {n}. " * 9}) + "\n" for n in range(20)))
    (tmp_path / "prompts.txt").write_text("The sea\nOnce upon\n")
    changes = {
        "stage": "pt", "template": None, "dataset": tmp_path / "texts.jsonl", "val_size": 0,
        "eval_generate_prompts": tmp_path / "prompts.txt", "eval_generate_steps": 2,
    }  # fmt: skip
    run(pool, 1, answering(models["qwen3"], tmp_path / "out", **changes), tmp_path)
    lines = read_json_lines(tmp_path / "out" / "generations.jsonl")
    assert [(line["prompt"], line["label"]) for line in lines] == [("The sea", None), ("Once upon", None)]


def test_chosen_answers_are_wanted_of_pairs(pool: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"instruction": f"Say {n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(12)]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    changes = {"stage": "dpo", "dataset": tmp_path / "pairs.json", "val_size": 3, "eval_generate_steps": 2}
    run(pool, 1, answering(models["qwen3"], tmp_path / "out", **changes), tmp_path)
    lines = read_json_lines(tmp_path / "out" / "generations.jsonl")
    assert len(lines) == 3
    assert all(line["label"].startswith("yes") for line in lines)
