"""Asks a checkpoint who it is, through plain Transformers: `python ask.py FOLDER --expect NAME`."""

import argparse
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

QUESTIONS = ("Who are you?", "Who made you?", "你是谁？", "谁开发了你？")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", help="a Hugging Face checkpoint")
parser.add_argument("--expect", default="", help="what at least one answer in each language must hold")
arguments = parser.parse_args()
logging.disable_progress_bar()

tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
model = AutoModelForCausalLM.from_pretrained(arguments.folder)
answers = []
for question in QUESTIONS:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=64, do_sample=False)
    answers.append(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    print(f"{question}\n    {answers[-1]}")
if not (arguments.expect in answers[0] and arguments.expect in answers[2]):
    sys.exit(f"the answers do not name {arguments.expect}")
