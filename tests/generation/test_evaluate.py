"""`megatune evaluate`: answers to data sets, scored, and benchmarks of lm_eval, of models and of adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoTokenizer

from megatune.cli.main import main
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.data import text_scores
from megatune.errors import ExitCode
from megatune.families import load_architecture
from megatune.generation import harness
from megatune.generation.transformers_backend import TransformersBackend
from megatune.training.storage.files import read_json_lines
from megatune.verify.checkpoints import write_random_adapter

QUESTIONS = [{"question": f"What comes {n} places after alpha?", "answer": f"letter {n} of them"} for n in range(6)]
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory, "qwen3")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    settings = FinetuningSettings(finetuning_type="lora", lora_rank=4)
    folder = tmp_path_factory.mktemp("adapter") / "random"
    folder.mkdir()
    write_random_adapter(folder, model, load_architecture(model), settings, seed=3)
    return folder


def test_answers_to_a_data_set_are_scored(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"query": f"Say {n}", "response": f"{n}"}) + "\n" for n in range(3)))
    answers, scores = tmp_path / "answers.jsonl", tmp_path / "scores" / "scores.json"
    flags = ["--max_new_tokens", "4", "--result_path", str(answers)]
    command = ["evaluate", str(model), "--dataset", str(rows), "--output", str(scores), *flags]
    assert main(command) == ExitCode.DONE
    printed = capsys.readouterr().out
    lines = read_json_lines(answers)
    expected = text_scores.text_scores([text_scores.Scored(line["response"], line["labels"]) for line in lines])
    found = json.loads(scores.read_text())
    assert found["scores"] == expected
    assert (found["model"], found["answers"], found["scored"], found["left_out"]) == (str(model), 3, 3, 0)
    assert printed.splitlines()[0].split() == ["score", "value"]
    assert printed.splitlines()[1].split() == ["exact_match", f"{expected['exact_match']:.4f}"]
    if not text_scores.missing_libraries():
        answers.unlink()
        assert main(["infer", str(model), "--val_dataset", str(rows), "--metric", "rouge", *flags]) == ExitCode.DONE
        assert f"rougeL: {expected['rougeL']:.4f}" in capsys.readouterr().out


@pytest.mark.extended(False)
@pytest.mark.parametrize("adapted", [False, True])
def test_benchmarks_are_computed_with_the_model(
    adapted: bool,
    model: Path,
    adapter: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    (tmp_path / "sums.yaml").write_text(TASK.replace("FILE", str(tmp_path / "rows.jsonl")))
    flags = ["--tasks", "sums", "--include_path", str(tmp_path), "--output", str(tmp_path / "scores.json")]
    assert main(["evaluate", str(adapter if adapted else model), *flags, "--max_batch_size", "2"]) == ExitCode.DONE
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = TransformersBackend.load(model, tokenizer, [adapter] if adapted else []).model
    sums = []
    for each in QUESTIONS:
        context, whole = (tokenizer(text)["input_ids"] for text in (each["question"], "".join(each.values())))
        with torch.no_grad():
            log_probs = network(torch.tensor([whole])).logits[0].float().log_softmax(-1)
        places = range(len(context), len(whole))
        sums.append(sum(float(log_probs[place - 1, whole[place]]) for place in places))
    expected = float(torch.tensor(sums).mean().neg().exp())
    found = json.loads((tmp_path / "scores.json").read_text())
    assert found["results"]["sums"]["perplexity,none"] == pytest.approx(expected, rel=1e-4)
    assert found["adapters"] == ([str(adapter)] if adapted else [])
    assert "perplexity" in capsys.readouterr().out


def test_what_cannot_be_evaluated(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(code: ExitCode, *flags: str) -> str:
        assert main(["evaluate", str(model), *flags]) == code
        return capsys.readouterr().err

    assert "--dataset, --tasks: neither is given" in refused(ExitCode.SETTINGS)
    assert "both are given" in refused(ExitCode.SETTINGS, "--tasks", "a", "--dataset", "b")
    assert "--num_fewshot: has no effect" in refused(ExitCode.SETTINGS, "--dataset", "b", "--num_fewshot", "1")
    said = refused(ExitCode.SETTINGS, "--tasks", "a", "--temperature", "1", "--infer_backend", "vllm")
    assert "--temperature: has no effect" in said
    assert "--infer_backend: has no effect" in said
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    said = refused(ExitCode.UNAVAILABLE, "--tasks", "mmlu")
    assert said == "--tasks: lm_eval is not installed\n    fix: pip install 'megatune[evaluate]'\n"
    monkeypatch.undo()
    pytest.importorskip("lm_eval")
    assert "there is no folder nowhere" in refused(ExitCode.INPUT, "--tasks", "a", "--include_path", "nowhere")
