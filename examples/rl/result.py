"""Prints how often sums that were not trained on are right, before and after: `python result.py FOLDER`."""

import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
found = {record["step"]: record["eval_accuracy"] for record in records if "eval_accuracy" in record}
before, after = found[min(found)], found[max(found)]
print(f"accuracy on {len((folder.parent / 'test.jsonl').read_text().splitlines())} unseen sums:")
print(f"  before {before:.1%}  (step {min(found)})")
print(f"  after  {after:.1%}  (step {max(found)})")
print(f"plot: {folder / 'training_loss.png'}")
if after <= before:
    sys.exit("the rewards have taught nothing")
