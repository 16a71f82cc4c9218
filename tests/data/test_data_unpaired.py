"""examples/preference/make_unpaired.py: pairs become answers with a label."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from megatune.data.sources import resolve_datasets

SCRIPT = Path(__file__).parents[2] / "examples" / "preference" / "make_unpaired.py"
CHATS = [
    {"conversations": [{"from": "human", "value": f"q{i}"}], "chosen": {"from": "gpt", "value": f"yes{i}"},
     "rejected": {"from": "gpt", "value": f"no{i}"}, "system": "Be brief."}
    for i in range(8)
]  # fmt: skip


def made(folder: Path, *flags: str) -> list[dict]:
    (folder / "chats.json").write_text(json.dumps([*CHATS, {"conversations": [], "chosen": "a", "rejected": "b"}]))
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected", "system": "system"}
    entry = {"file_name": "chats.json", "formatting": "sharegpt", "ranking": True, "columns": columns}
    (folder / "dataset_info.json").write_text(json.dumps({"chats": entry}))
    call = [sys.executable, str(SCRIPT), "chats", str(folder / "out"), "--dataset_dir", str(folder), *flags]
    done = subprocess.run(call, check=True, timeout=60, capture_output=True, text=True)
    assert done.stderr.startswith("left out: ")  # the row without a question
    (source,) = resolve_datasets(["unpaired"], folder / "out", "kto")
    assert None not in {source.format.to_example(each.fields, "kto").desirable for each in source.rows()}
    info = json.loads((folder / "out" / "dataset_info.json").read_text())["unpaired"]
    assert info["columns"] == {"messages": "messages", "kto_tag": "label"}
    return [json.loads(line) for line in (folder / "out" / info["file_name"]).read_text().splitlines()]


def test_both_answers_of_every_pair(tmp_path: Path) -> None:
    rows = made(tmp_path)
    assert [(row["messages"][-1]["content"], row["label"]) for row in rows] == [
        *((f"yes{i}", True) for i in range(8)),
        *((f"no{i}", False) for i in range(8)),
    ]
    words = [("system", "Be brief."), ("user", "q0"), ("assistant", "yes0")]
    assert rows[0]["messages"] == [{"role": role, "content": content} for role, content in words]


def test_one_answer_of_every_pair(tmp_path: Path) -> None:
    rows = made(tmp_path, "--one_of_each")
    assert sorted(row["messages"][1]["content"] for row in rows) == [f"q{i}" for i in range(8)]
    assert {row["label"] for row in rows} == {True, False}
    assert all(row["messages"][-1]["content"].startswith("yes" if row["label"] else "no") for row in rows)
