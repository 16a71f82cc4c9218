"""What `megatune data stats` says, held against the batches themselves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from loader_kit import step_batches
from tokenizer_kit import qwen_tokenizer

from megatune.config.settings import (
    BatchSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RunSettings,
    Settings,
)
from megatune.data.batches import Collator
from megatune.data.build import RowsBuilder, RowShape
from megatune.data.order import PreparedSteps
from megatune.data.prepare import Prepared
from megatune.data.report import DataReport, DatasetReport, LengthReport
from megatune.data.rows import Document, TokenRows
from megatune.data.statistics import Statistics, describe, draw, lines, refuse_streaming, step_tokens
from megatune.errors import ExitCode, MegatuneError

LENGTHS = [5, 30, 12, 9, 31, 7, 22, 14, 3, 18, 27, 6, 11]
CUTOFF = 32


def document(length: int) -> Document:
    ids = np.arange(1, length + 1, dtype=np.int32)
    return Document(ids, np.where(ids > length // 2, ids, -100).astype(np.int32))


def build(folder: Path, stage: str = "sft", packing: bool = False, numbers: list[int] | None = None) -> Prepared:
    """Samples of these lengths as one prepared data set, of which the second half is another one's."""
    shape = RowShape(stage, CUTOFF, packing, seed=0)
    reports = [DatasetReport("first", read=8, trained=6), DatasetReport("second", read=7, trained=7)]
    reports[0].dropped["field 'output' is missing"] = 2
    reports[0].codes["field 'output' is missing"] = "missing-field"
    reports[0].examples.append("first.json:3: field 'output' is missing")
    with RowsBuilder(folder, shape) as builder:
        for number, length in enumerate(LENGTHS):
            documents = [document(length), document(length // 2 + 1)] if stage == "dpo" else [document(length)]
            builder.add(documents)
            reports[number >= 6].tokens += sum(len(one.input_ids) for one in documents)
        order = list(range(len(LENGTHS))) if numbers is None else numbers
        tokens = builder.write_part("train", order)
    for number in order:
        reports[number >= 6].samples += 1
    report = DataReport(reports, tokens, lengths=LengthReport.of(np.array([*LENGTHS, 40]), CUTOFF), notes=["a note"])
    return Prepared(TokenRows(folder / "train"), None, report, Path("cache/rows/key"), "key")


def settings_of(
    stage: str = "sft", processes: int | None = None, by_length: bool = False, **groups: object
) -> Settings:
    return Settings(
        run=RunSettings(stage=stage, num_processes=processes),
        data=DataSettings(dataset=["first", "second"], cutoff_len=CUTOFF, group_by_length=by_length),
        **groups,
    )


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize(
    ("packing", "by_length", "parallel"),
    [
        (False, False, {}),
        (False, True, {}),
        (False, False, {"pipeline_model_parallel_size": 2}),
        (False, False, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}),
        (True, False, {}),
        (True, False, {"context_parallel_size": 2}),
    ],
)
def test_tokens_are_those_of_the_batches(
    tmp_path: Path, stage: str, packing: bool, by_length: bool, parallel: dict[str, object]
) -> None:
    rows = build(tmp_path, stage, packing).train
    settings = settings_of(
        stage,
        by_length=by_length,
        parallel=ParallelSettings(**parallel),
        batch=BatchSettings(per_device_train_batch_size=2, gradient_accumulation_steps=1),
    )
    size = 2
    real, computed = step_tokens(settings, rows, data_parallel_size=2)
    steps = PreparedSteps.from_settings(rows, settings, global_batch_size=4)
    multiples = settings.parallel.sequence_multiple, settings.parallel.document_multiple
    collator = Collator(size, packing, *multiples, 0, documents_per_row=2 if stage == "dpo" else 1)
    assert len(real) == steps.steps_per_epoch > 1
    for step in range(len(real)):
        batches = [
            batch
            for rank in range(2)
            for batch in step_batches(
                steps, step, collator, data_parallel_rank=rank, data_parallel_size=2, num_micro_batches=1,
                same_length=settings.parallel.pipeline_model_parallel_size > 1,
            )
        ]  # fmt: skip
        assert computed[step] == sum(batch.input_ids.numel() for batch in batches)
        assert real[step] == sum(sum(batch.lengths) for batch in batches)


def test_pairs_are_padded_to_the_longer_answer(tmp_path: Path) -> None:
    rows = build(tmp_path, stage="dpo").train
    settings = settings_of("dpo", batch=BatchSettings(per_device_train_batch_size=1))
    real, computed = step_tokens(settings, rows, data_parallel_size=1)
    assert sorted(computed) == sorted(2 * length for length in LENGTHS)
    assert sorted(real) == sorted(length + length // 2 + 1 for length in LENGTHS)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What says how large a model's vocabulary is."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 640, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 128,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "attention_bias": False,
    }  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path / "model"


def describe_demo(folder: Path, model: Path, packing: bool = False, stage: str = "sft", **groups: object) -> Statistics:
    settings = settings_of(stage, model=ModelSettings(model_name_or_path=str(model)), **groups)
    folder.mkdir(exist_ok=True)
    prepared = build(folder, stage, packing, numbers=[*range(len(LENGTHS)), 0, 1])
    return describe(settings, qwen_tokenizer(), prepared)


PAGE = """\
stage sft, template of the tokenizer, cutoff_len 32

data set  rows read  trained  held out  dropped  cut  samples an epoch  tokens an epoch
first             8        6         0        2    0                 8              129
second            7        7         0        0    0                 7              101
first: dropped 2: field 'output' is missing [missing-field]
    first.json:3: field 'output' is missing

tokens of a sample before cutting: 14 samples
   1 to  4  ██████████████                            1
   5 to  8  ████████████████████████████████████████  3
   9 to 12  ████████████████████████████████████████  3
  13 to 16  ██████████████                            1
  17 to 20  ██████████████                            1
  21 to 24  ██████████████                            1
  25 to 28  ██████████████                            1
  29 to 32  ███████████████████████████               2
  cutoff_len ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌
  33 to 36                                            0
  37 to 40  ██████████████                            1
  mean 17, p50 12, p90 31, p99 40, longest 40; 1 (7.1%) over cutoff_len

rows         15
tokens       230, 119 of them trained (51.7%)
padding      45.8% of the 424 tokens that the batches of an epoch have
step         16 rows = 8 a micro-batch × 1 accumulated × 2 data-parallel, about 230 tokens
processes    2 (num_processes)
epoch        1 step
run          5 steps, 5 epochs, about 1,150 tokens
largest id   31; the tokenizer knows 464 tokens, the model 640
prepared in  cache/rows/key
note: a note"""


def test_the_page(tmp_path: Path, model: Path) -> None:
    statistics = describe_demo(tmp_path, model, optimizer=OptimizerSettings(max_steps=5), processes=2)
    assert "\n".join(lines(statistics)) == PAGE


def test_the_page_of_packed_rows(tmp_path: Path, model: Path) -> None:
    (model / "config.json").write_text((model / "config.json").read_text().replace("640", "31"))
    page = list(lines(describe_demo(tmp_path, model, packing=True)))
    assert "rows         15 samples packed into 8 rows of up to 32 tokens, 89.8% full" in page
    assert "largest id   31; the tokenizer knows 464 tokens, the model 31: BEYOND THE MODEL'S VOCABULARY" in page
    assert "processes    1 (the fewest that hold the model; set num_processes)" in page


def test_pairs_and_packed_pairs(tmp_path: Path, model: Path) -> None:
    """A packed row holds twice cutoff_len; how full it is is a share of that."""
    alone = list(lines(describe_demo(tmp_path / "alone", model, stage="dpo")))
    assert "rows         15 pairs of a chosen and a rejected answer" in alone
    statistics = describe_demo(tmp_path / "packed", model, packing=True, stage="dpo")
    train = statistics.report.train
    tokens = sum(length + length // 2 + 1 for length in [*LENGTHS, *LENGTHS[:2]])
    assert (train.samples, train.documents, train.tokens) == (15, 30, tokens)
    full = tokens / (train.rows * 2 * CUTOFF)
    wanted = f"rows         15 pairs packed into {train.rows} rows of up to {2 * CUTOFF} tokens, {full:.1%} full"
    assert wanted in list(lines(statistics))
    found = json.loads(statistics.to_json())
    assert (found["arrangement"], found["packing_efficiency"]) == ("packed_pairs", full)
    assert sum(found["fill"]) == train.rows
    assert max(number for number, count in enumerate(found["fill"]) if count) >= 15, "some rows are nearly full"
    draw(statistics, tmp_path / "stats.png")


def test_json(tmp_path: Path, model: Path) -> None:
    found = json.loads(describe_demo(tmp_path, model, packing=True).to_json())
    assert found["arrangement"] == "packed"
    assert found["report"]["train"]["samples"] == 15
    assert found["packing_efficiency"] == found["report"]["train"]["tokens"] / (
        found["report"]["train"]["rows"] * CUTOFF
    )
    assert found["steps"]["world_from"] == "smallest"
    assert sum(found["fill"]) == found["report"]["train"]["rows"]
    assert found["dataset_tokens"] == [sum(LENGTHS[:6]) + 35, sum(LENGTHS[6:])]


def test_picture(tmp_path: Path, model: Path) -> None:
    statistics = describe_demo(tmp_path / "rows", model)
    draw(statistics, tmp_path / "new" / "stats.png")
    content = (tmp_path / "new" / "stats.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 20_000
    (tmp_path / "file").touch()
    with pytest.raises(MegatuneError) as caught:
        draw(statistics, tmp_path / "file" / "stats.png")
    assert caught.value.exit_code == ExitCode.CANNOT_WRITE


def test_streamed_data_is_not_counted() -> None:
    with pytest.raises(MegatuneError, match="streaming=false") as caught:
        refuse_streaming(Settings(data=DataSettings(streaming=True)))
    assert caught.value.exit_code == ExitCode.SETTINGS
