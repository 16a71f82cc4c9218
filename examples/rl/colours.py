"""Writes a small random model that reads images, and squares of a colour: `python colours.py FOLDER`.

Its answers to learn from have a colour at random, so that a model that has learnt them guesses; rewards then say which
answers were right.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from megatune.demo.checkpoint import make_checkpoint

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220), "grey": (128, 128, 128)}
QUESTION = "<image>Which colour?"


def main(folder: Path) -> None:
    make_checkpoint("qwen2_5_vl", folder / "model", num_layers=2, hidden_size=64, vocab_size=600)
    (folder / "images").mkdir(exist_ok=True)
    draw, noise = random.Random(0), np.random.default_rng(0)
    squares = []
    for number in range(64):
        colour = list(COLOURS)[number % len(COLOURS)]
        pixels = np.clip(noise.normal(COLOURS[colour], 25, (56, 56, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
        squares.append((f"images/{number}.png", colour))
    guesses = [
        {
            "messages": [
                {"role": "user", "content": QUESTION},
                {"role": "assistant", "content": draw.choice(list(COLOURS))},
            ],
            "images": [image],
        }
        for image, _ in squares
        for _ in range(8)
    ]
    (folder / "guesses.json").write_text(json.dumps(guesses))
    for name, chosen in (("train", squares[:48]), ("test", squares[48:])):
        rows = [
            {
                "tag": "colours",
                "messages": [{"role": "user", "content": QUESTION}],
                "images": [image],
                "ground_truth": colour,
            }
            for image, colour in chosen
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
