"""Rows of files to prompts: domains, templates, lengths, what is refused, and the order in which problems come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerBase

from megatune.config.rl.rollout import DatasetFilter, PromptData
from megatune.config.rl.settings import RewardRole
from megatune.demo.family import demo_family
from megatune.demo.tokenizer import make_tokenizer
from megatune.errors import ExitCode, MegatuneError
from megatune.rl.pipeline.collector import ProblemOrder
from megatune.rl.problem_files import count_rows
from megatune.rl.problems import Problems, read_problems

REWARDS = {
    "math_rule": RewardRole("math_rule", "math_rule", ("deepmath_103k", "aime")),
    "code": RewardRole("code", "code_sandbox", ("KodCode",)),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer(demo_family("llama"), 600)


def math_row(number: int, tag: str = "aime", question: str = "How much?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    return {"id": str(number), "tag": tag, "messages": json.dumps(messages), "ground_truth": number, **fields}


def code_row(number: int) -> dict[str, Any]:
    cases = [{"assert_code": "assert f()"}]
    return math_row(number, "KodCode", ground_truth="", test_cases=json.dumps(cases), case_type="pytest")


def data_of(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> PromptData:
    """Write rows, half as JSON Lines, half as Parquet, and return the settings that read them."""
    half = len(rows) // 2
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:half]), encoding="utf-8")
    columns = sorted({column for row in rows for column in row})
    listed = [dict.fromkeys(columns) | row | {"messages": json.loads(row["messages"])} for row in rows[half:]]
    table = pyarrow.Table.from_pylist([{**row, "ground_truth": str(row["ground_truth"])} for row in listed])
    pyarrow.parquet.write_table(table, folder / "b.parquet")
    return PromptData(file_name=[str(folder / "a.jsonl"), str(folder / "b.parquet")], messages="messages", **settings)


def read(data: PromptData, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Problems:
    return read_problems(data, REWARDS, tokenizer, prompt_length=600, **options)


def test_rows_become_problems_of_domains(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [math_row(0), math_row(1, "strange"), code_row(2), math_row(3, question="long " * 900),
            math_row(4, domain="code", test_cases="[1]"), math_row(5, domain="other")]  # fmt: skip
    data = data_of(tmp_path, rows, domain_interleave_probs={"code": 0.25, "math_rule": 0.75})
    problems = read(data, tokenizer)
    assert {domain: [each.id for each in problems.by_domain[domain]] for domain in problems.by_domain} == {
        "code": ["2", "4"],
        "math_rule": ["0", "1"],
    }
    assert [each.id for each in problems.all()] == ["2", "4", "0", "1"]
    assert any(note.startswith("1 rows were left out: their prompts are longer") for note in problems.notes)
    notes = "\n".join(problems.notes)
    for said in ("code 2, math_rule 2", "1 rows were left out: their prompts", "belong to other", "strange (1)"):
        assert said in notes
    first = problems.by_domain["math_rule"][0]
    assert first.messages[1] == {"role": "user", "content": "How much?"}
    assert first.row["ground_truth"] == 0
    assert first.prompt_ids.tolist().count(tokenizer.bos_token_id) == 1  # ROLL: 2
    assert tokenizer.decode(first.prompt_ids) == first.prompt


def test_templates_are_rolls_and_ours(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    row = {**math_row(0, "a"), "messages": json.dumps([{"role": "user", "content": "Hi"}])}
    data = data_of(tmp_path, [row, {**row, "tag": "b"}])

    def prompts(template: str, **tags: str) -> list[str]:
        problems = read(
            data.model_copy(update={"template": "native"}), tokenizer, template=template, tag_to_template=tags
        )
        return [each.prompt for each in problems.all()]

    native = prompts("native")[0]
    assert prompts("qwen2_5", b="longcot_V3") == [native, f"{native}<think>\n"]
    ours = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    assert prompts("llama3")[0] == f"{ours}<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert prompts("chatml")[0] == prompts("empty")[0] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompts("base")[0].endswith("</answer>. User: Hi Assistant:")
    assert "\\boxed{}." in prompts("base")[0]  # ROLL writes \boxed{{}}
    for name in ("lama3", "longCOT_qwen2.5"):
        with pytest.raises(MegatuneError, match=name) as raised:
            prompts("native", a=name)
        assert raised.value.exit_code == ExitCode.SETTINGS


def test_a_prompt_column_is_the_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "a.csv").write_text("prompt,ground_truth\n1+1=,2\n", encoding="utf-8")
    (problem,) = read(PromptData(file_name=[str(tmp_path / "a.csv")]), tokenizer).all()
    assert problem.prompt == "1+1="
    assert tokenizer.decode(problem.prompt_ids) == f"{tokenizer.bos_token}1+1="
    assert problem.id.endswith("a.csv:2")


def test_rows_that_cannot_be_used_are_named_together(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    bad = [math_row(0), math_row(1, ground_truth=""), {**code_row(2), "test_cases": ""}, math_row(3, messages="[1]")]
    lines = [*map(json.dumps, bad), "{", json.dumps({"tag": "aime", "ground_truth": "1"})]
    lines.append(json.dumps(math_row(6, question="half a \ud83d")))
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = PromptData(file_name=[str(tmp_path / "a.jsonl")], messages="messages")
    with pytest.raises(MegatuneError) as raised:
        read(data, tokenizer)
    assert raised.value.exit_code == ExitCode.DATA
    assert [each.where.rpartition(":")[2] for each in raised.value.findings] == ["2", "3", "4", "5", "6", "7"]
    for said in ("ground_truth", "test_cases", "a role or a text as content", "invalid JSON", "no prompt in messages"):
        assert said in str(raised.value)
    assert "the row has 'tag', 'ground_truth'" in str(raised.value)
    assert "half of a surrogate pair" in str(raised.value)
    with pytest.raises(MegatuneError, match=r"no file '/none/b\.csv'") as raised:
        read(PromptData(file_name=["/none/a.csv", "/none/b.csv"]), tokenizer)
    assert (len(raised.value.findings), raised.value.exit_code) == (2, ExitCode.INPUT)
    shares = data_of(tmp_path, [math_row(0), math_row(1)], domain_interleave_probs={"code": 1.0})
    with pytest.raises(MegatuneError, match="domain code has no problems") as raised:
        read(shares, tokenizer)
    assert "2 rows belong to math_rule" in str(raised.value)


AUDIO = {"role": "user", "content": [{"type": "input_audio", "input_audio": "a.wav"}]}


@pytest.mark.parametrize("rules", [None, "ms_swift_4"])
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [AUDIO]}, "audio"),
        ({"messages": [{"role": "user", "content": "<image>?"}], "images": ["a.png"]}, "the model reads text only"),
        ({"messages": 1.5, "query": "?"}, "messages"),
        ({"query": "?", "history": 1.5}, "history"),
    ],
)
def test_rows_that_are_no_text_are_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, rules: Any, row: dict[str, Any], said: str
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({**row, "ground_truth": "1"}) + "\n", encoding="utf-8")
    template = None if rules is None else "qwen3"
    data = PromptData(file_name=[str(tmp_path / "a.jsonl")], template=template, conversation_rules=rules)
    with pytest.raises(MegatuneError, match=said) as raised:
        read(data, tokenizer)
    assert raised.value.exit_code == ExitCode.DATA
    assert raised.value.findings[0].where.endswith("a.jsonl:1")


def test_a_difficulty_is_a_number_where_it_weighs(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [math_row(number, difficulty=value) for number, value in enumerate(("0.5", "hard", "nan", "0.1"))]
    data = data_of(tmp_path, rows)
    assert len(read(data, tokenizer).all()) == 4
    with pytest.raises(MegatuneError) as raised:
        read(data, tokenizer, needs_difficulty=True)
    assert raised.value.exit_code == ExitCode.DATA
    assert [each.where.rpartition("/")[2] for each in raised.value.findings] == ["a.jsonl:2", "b.parquet:row 1"]
    assert "difficulty_loss_weight needs a number" in str(raised.value)


def test_rows_are_filtered_by_source(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [math_row(number, source="ab"[number % 2]) for number in range(6)]
    data, kept = data_of(tmp_path, rows), DatasetFilter(source=["b"], num_samples=2)
    assert [each.id for each in read(data, tokenizer, dataset_filter=kept).all()] == ["1", "3"]


def test_a_file_may_be_named_with_the_number_of_its_first_rows(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = data_of(tmp_path, [math_row(number) for number in range(6)])  # three in each file
    lines, table = data.file_name
    files = [f"{lines}#2", f"{table}#0", f"{table}#9"]
    assert count_rows(files) == 5
    found = read(data.model_copy(update={"file_name": files}), tokenizer)
    assert [each.id for each in found.all()] == ["0", "1", "3", "4", "5"]
    Path(f"{lines}#2").mkdir()  # what has that name is meant whole
    with pytest.raises(MegatuneError):
        count_rows([f"{lines}#2"])


def test_shares_are_rounded_as_written() -> None:
    def sizes(batch: int, **shares: float) -> dict[str, int]:
        return PromptData(domain_interleave_probs=shares).prompts_of_domains(batch)

    assert sizes(64, a=0.6, b=0.3, c=0.1) == {"a": 38, "b": 19, "c": 7}
    assert sizes(100, a=0.29, b=0.71) == {"a": 29, "b": 71}  # int(0.29 * 100) is 28


def test_the_order_is_a_function_of_seed_and_place(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    problems = read(data_of(tmp_path, [math_row(n) for n in range(6)] + [code_row(n) for n in range(6)]), tokenizer)

    def ids(order: ProblemOrder, domain: str, count: int) -> list[str]:
        return [order.at(domain, place).id for place in range(count)]

    order = ProblemOrder(problems.by_domain, 42)
    taken = ids(order, "math_rule", 15)
    assert [sorted(taken[start : start + 6]) for start in (0, 6)] == [list("012345")] * 2
    assert taken[:6] != taken[6:12]
    assert ids(order, "code", 6) != taken[:6]  # of the same size, in an order of its own
    resumed = ProblemOrder(problems.by_domain, 42)
    assert [resumed.at("math_rule", place).id for place in (13, 2, 14)] == [taken[13], taken[2], taken[14]]
    assert ids(ProblemOrder(problems.by_domain, 43), "math_rule", 15) != taken
