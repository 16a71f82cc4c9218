"""`megatune data preview | stats` from the command line to what is printed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatune.cli import main as main_module
from megatune.cli.main import main
from megatune.demo.family import demo_family
from megatune.demo.tokenizer import make_tokenizer
from megatune.errors import ExitCode

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder without the weights."""
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(demo_family("qwen2"), 600).save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `megatune data ...` in a folder with run.yaml and three rows, of which the second is bad."""
    rows = [
        {"instruction": "Hi", "output": "Hello!"},
        {"instruction": "Hi"},
        {"instruction": "Bye", "output": "See you."},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        f"model_name_or_path: {model}\ndataset: rows.jsonl\ndataset_dir: .\ntemplate: chatml\ncutoff_len: 64\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["data", *words])
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


PREVIEW = """\
stage sft, template chatml, cutoff_len 64
⟦trained⟧ context

── rows.jsonl row 1 (rows.jsonl:1): 24 tokens, 7 trained ──
<|im_start|>user↵
Hi<|im_end|>↵
<|im_start|>assistant↵
⟦Hello!<|im_end|>↵⟧

── rows.jsonl row 2 (rows.jsonl:3): 25 tokens, 7 trained ──
<|im_start|>user↵
Bye<|im_end|>↵
<|im_start|>assistant↵
⟦See you.<|im_end|>↵⟧

1 of the 3 rows read cannot be trained on:
    1 × missing-field: field 'output' is missing
        rows.jsonl:2: the row has 'instruction'
"""


def test_preview(run: Run) -> None:
    assert run("preview", "run.yaml") == (0, PREVIEW, "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run.yaml", "--row", "2"], "── rows.jsonl row 2 (rows.jsonl:3)"),
        (["--rows", "1", "run.yaml", "packing=true"], "╌╌ sample 2 (rows.jsonl:3)"),
        (["run.yaml", "--ids", "template=null"], "position       id    label  token"),
        (["run.yaml", "stage=pt", "--rows=1", "packing=false"], "H⟦i<|im_end|>⟧"),
        (["run.yaml", "--eval", "--val_size", "1"], "held out: 1 of the rows"),
        (["run.yaml", "--width", "30", "--no-color"], "── rows.jsonl row 1 \n"),
        (["run.yaml", "--html", "page.html"], "\n\npage: page.html\n"),
    ],
)
def test_preview_flags(run: Run, words: list[str], says: str) -> None:
    code, out, err = run("preview", *words)
    assert says in out + err
    assert code == 0


def table_of(out: str) -> list[tuple[int, int]]:
    """Ids and labels of all rows, as `data preview --ids` prints them."""
    return [(int(line.split()[1]), int(line.split()[2])) for line in out.splitlines() if re.match(r" +\d+ +\d+ ", line)]


@pytest.mark.parametrize(
    "changes", [[], ["packing=true"], ["stage=kto", "dataset=kto.jsonl"], ["stage=dpo", "dataset=pairs.jsonl"]]
)
def test_json_is_the_tokens_of_the_preview(run: Run, tmp_path: Path, changes: list[str]) -> None:
    pairs = [{"instruction": "Hi", "chosen": f"Hello {n}!", "rejected": "Go."} for n in range(2)]
    wanted = [{"instruction": "Hi", "output": f"Hello {n}!", "kto_tag": bool(n)} for n in range(2)]
    for name, rows in (("pairs", pairs), ("kto", wanted)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "dataset_info.json").write_text(
        json.dumps({"pairs.jsonl": {"file_name": "pairs.jsonl", "ranking": True,
                                    "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}}})
    )  # fmt: skip
    code, out, err = run("preview", "run.yaml", "--json", *changes)
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    parts = [part for row in rows for part in row.get("sequences", [row])]
    documents = [
        each for part in parts for each in ([part["chosen"], part["rejected"]] if "chosen" in part else [part])
    ]
    if not changes:
        assert [(row["dataset"], row["row"], row["place"]) for row in rows] == [
            ("rows.jsonl", 1, "rows.jsonl:1"), ("rows.jsonl", 2, "rows.jsonl:3")
        ]  # fmt: skip
        assert rows[0]["text"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        assert err.startswith("1 of the 3 rows read cannot be trained on")
    tokens = [pair for each in documents for pair in zip(each["ids"], each["labels"], strict=True)]
    printed = table_of(run("preview", "run.yaml", "--ids", *changes)[1])
    if "stage=dpo" in changes:  # which prints the prompt of both once
        assert len(tokens) > len(printed)
        assert {pair for pair in tokens if pair[1] >= 0} == {pair for pair in printed if pair[1] >= 0}
    else:
        assert tokens == printed
    code, out, err = run("preview", "run.yaml", "--json", "--ids")
    assert (code, out) == (ExitCode.SETTINGS, "")
    assert "--ids: has no effect" in err


def test_stats(run: Run, tmp_path: Path) -> None:
    code, out, err = run("stats", "run.yaml", "packing=true", "--plot")
    assert (code, err) == (0, "")
    assert "rows.jsonl          3        2         0        1    0                 2               49\n" in out
    assert "rows         2 samples packed into 1 row of up to 64 tokens, 76.6% full\n" in out
    assert out.endswith("\nplot         data_stats.png\n")
    assert (tmp_path / "data_stats.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = run("stats", "--json", "run.yaml", "packing=true")
    found = json.loads(out)
    assert code == 0
    assert found["report"]["datasets"][0]["codes"] == {"field 'output' is missing": "missing-field"}
    assert found["directory"].startswith(str(tmp_path / "cache"))
    assert len(list((tmp_path / "cache" / "rows").glob("*/report.json"))) == 1  # the second call found it there


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], ExitCode.SETTINGS, ["usage: megatune data"]),
        (["prevew", "run.yaml"], ExitCode.SETTINGS, ["did you mean `megatune data preview`?"]),
        (["qqq"], ExitCode.SETTINGS, ["one of: preview, stats"]),
        (["run.yaml"], ExitCode.SETTINGS, ["megatune data preview run.yaml"]),
        (["preview"], ExitCode.SETTINGS, ["model_name_or_path is missing", "dataset is missing"]),
        (
            ["preview", "run.yaml", "--roww", "3", "--row", "0", "--with=9", "cutof_len=3", "--width", "3"],
            ExitCode.SETTINGS,
            ["did you mean --row?", "--row: row is 0", "write --row 1", "did you mean --width?",
             "did you mean cutoff_len?", "--width: width is 3", "write --width 20", "5 problems"],
        ),
        (["stats", "run.yaml", "--plot", "x.pdf"], ExitCode.SETTINGS, ["--plot x.pdf: plots are PNG files"]),
        (["stats", "run.yaml", "streaming=true", "max_steps=3"], ExitCode.SETTINGS, ["write streaming=false"]),
        (
            ["preview", "run.yaml", "streaming=true", "max_steps=3", "val_size=1", "--eval"],
            ExitCode.SETTINGS,
            ["--eval with streaming: true"],
        ),
        (["preview", "run.yaml", "--rows", "many"], ExitCode.SETTINGS, ["--rows: rows is 'many'"]),
        (["preview", "run.yaml", "--row", "9"], ExitCode.SETTINGS, ["--row 9 of 2 rows"]),
        (["preview", "run.yaml", "on_bad_row=eror"], ExitCode.SETTINGS, ["write on_bad_row=error"]),
        (["stats", "run.yaml", "on_bad_row=error"], ExitCode.DATA, ["rows.jsonl:2: field 'output' is missing"]),
        (["preview", "no.yaml"], ExitCode.INPUT, ["there is no settings file no.yaml"]),
        (["preview", "run.yaml", "model_name_or_path=nowhere"], ExitCode.INPUT, ["nowhere"]),
        (["stats", "run.yaml", "dataset=no.jsonl"], ExitCode.INPUT, ["no.jsonl"]),
    ],
)  # fmt: skip
def test_refusals(run: Run, words: list[str], code: ExitCode, says: list[str]) -> None:
    found, out, err = run(*words)
    assert found == code, err
    assert not [text for text in says if text not in err], err
    assert out == ""
    assert "Traceback" not in err


def test_the_page_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tokenizer(demo_family("qwen3")).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n\$ megatune (data [^\n]*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for command, shown in blocks:
        assert main([*command.split(), f"model_name_or_path={tmp_path / 'model'}"]) == 0
        printed = iter(capsys.readouterr().out.splitlines())
        missing = [line for line in shown.splitlines() if line != "…" and line not in printed]  # in this order
        assert not missing, command


def test_data_is_built() -> None:
    assert "data" not in main_module._UNSUPPORTED
