"""Makes answers that are wanted or not, as stage kto takes them, of preference pairs in any form:

    python make_unpaired.py DATASET FOLDER --dataset_dir data --one_of_each

writes FOLDER/unpaired.jsonl, a conversation and a label a row, and its entry in FOLDER/dataset_info.json."""

import argparse
import json
import random
import sys
from pathlib import Path

from megatune.data.conversation import Conversation, Message, PreferencePair
from megatune.data.samples import RowReader, drawn_samples
from megatune.data.sources import resolve_datasets
from megatune.errors import MegatuneError

TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
ENTRY = {"formatting": "openai", "columns": {"messages": "messages", "kto_tag": "label"}, "tags": TAGS}


def message(of: Message) -> dict:
    calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in of.tool_calls]
    return {"role": of.role, "content": of.content, **({"tool_calls": calls} if calls else {})}


def row(of: Conversation, label: bool) -> dict:
    system = [{"role": "system", "content": of.system}] if of.system else []
    tools = {"tools": of.tools} if of.tools else {}
    return {"messages": [*system, *map(message, of.messages)], **tools, "label": label}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", metavar="DATASET", help="pairs: a name in dataset_info.json, a file or a hub's id")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where to; it is made")
    parser.add_argument("--dataset_dir", default="data", help="the folder of dataset_info.json (data)")
    parser.add_argument("--one_of_each", action="store_true", help="one answer of each pair, drawn by lot")
    arguments = parser.parse_args()
    (source,) = resolve_datasets([arguments.dataset], arguments.dataset_dir, "dpo")
    pairs = []
    for sample, example in RowReader(source, "dpo", {}).examples(drawn_samples(source, seed=0)):
        if isinstance(example, PreferencePair):
            pairs.append((example.chosen, example.rejected))
        else:
            print(f"left out: {sample.row.where}: {example}", file=sys.stderr)
    drawn = random.Random(0).choices((True, False), k=len(pairs))
    # The wanted answers first: what follows an answer is never the other one to the same question.
    rows = [
        row(pair[0 if label else 1], label)
        for label in (True, False)
        for pair, one in zip(pairs, drawn, strict=True)
        if not arguments.one_of_each or one is label
    ]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in rows)
    (arguments.folder / "unpaired.jsonl").write_text(lines, encoding="utf-8")
    info = {"unpaired": {"file_name": "unpaired.jsonl", **ENTRY}}
    (arguments.folder / "dataset_info.json").write_text(json.dumps(info, indent=2) + "\n")
    print(f"{len(rows)} answers of {len(pairs)} pairs, {sum(each['label'] for each in rows)} of them wanted")


if __name__ == "__main__":
    try:
        main()
    except MegatuneError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
