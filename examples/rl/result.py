"""Prints how often sums that were not trained on are right, before and after: `python result.py FOLDER`.

A run validates as it samples, at temperature 1; greedy decoding takes the most probable token each time.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

logging.disable_progress_bar()

folder = Path(sys.argv[1])
problems = [json.loads(line) for line in (folder.parent / "test.jsonl").read_text().splitlines()]


def greedy_accuracy(model_folder: Path) -> float:
    """Every question has as many tokens, so that nothing is padded."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    ids = torch.tensor(tokenizer([problem["messages"][0]["content"] for problem in problems])["input_ids"])
    end = tokenizer.eos_token_id
    mask = torch.ones_like(ids)
    made = model.generate(
        ids, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=end, pad_token_id=end
    )
    answers = tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
    return sum(answer == each["ground_truth"] for answer, each in zip(answers, problems, strict=True)) / len(problems)


records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
found = {record["step"]: record["eval_accuracy"] for record in records if "eval_accuracy" in record}
before, after = found[min(found)], found[max(found)]
greedy = [greedy_accuracy(each) for each in (folder.parent / "warmup", folder)]
print(f"accuracy on {len(problems)} unseen sums, sampled at temperature 1 and greedy:")
print(f"  before {before:.1%}, {greedy[0]:.1%}  (step {min(found)})")
print(f"  after  {after:.1%}, {greedy[1]:.1%}  (step {max(found)})")
print(f"plot: {folder / 'training_loss.png'} (its training reward is of groups that the filter keeps)")
if after <= before:
    sys.exit("the rewards have taught nothing")
