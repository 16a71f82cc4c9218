"""Writes a small random model that reads single characters, problems of addition, and pairs of a right and a wrong
answer: `python make.py FOLDER`."""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+=#"
NUM_TEST = 1000
MISTAKES = (-10, -9, -2, -1, 1, 2, 9, 10)
# A question as it is, an answer with its end.
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}#{% endif %}{% endfor %}"
)


def write_model(folder: Path, characters: str) -> None:
    """No token pads: its embedding would be zero, and a random model samples it."""
    tokenizer = Tokenizer(models.WordLevel({each: number for number, each in enumerate(characters)}, unk_token="#"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="#", eos_token="#")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(characters),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=characters.index("#"),
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_problems(folder: Path) -> None:
    """All pairs of two-digit numbers but those of the test: with answers, with a right and a wrong one, and as
    problems."""
    pairs = [(first, second) for first in range(10, 100) for second in range(10, 100)]
    random.Random(0).shuffle(pairs)
    tested, trained = pairs[:NUM_TEST], pairs[NUM_TEST:]
    warmup = [{"instruction": f"{first}+{second}=", "output": str(first + second)} for first, second in trained]
    (folder / "warmup.json").write_text(json.dumps(warmup))
    ranked = [
        {
            "instruction": f"{first}+{second}=",
            "chosen": str(first + second),
            "rejected": str(max(0, first + second + random.Random(first * 100 + second).choice(MISTAKES))),
        }
        for first, second in trained
    ]
    (folder / "ranked.json").write_text(json.dumps(ranked))
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    sets = {"addition": {"file_name": "warmup.json"}}
    sets["ranked"] = {"file_name": "ranked.json", "ranking": True, "columns": columns}
    (folder / "dataset_info.json").write_text(json.dumps(sets))
    for name, chosen in (("train", trained), ("test", tested)):
        rows = [
            {
                "id": f"{first}+{second}",
                "tag": "addition",
                "messages": [{"role": "user", "content": f"{first}+{second}="}],
                "ground_truth": str(first + second),
                "checked": "exact",  # the tag in ppo.yaml's validation
            }
            for first, second in chosen
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    write_model(out / "model", CHARACTERS)
    write_problems(out)
