"""Draws a data set of shapes: `python shapes.py FOLDER` writes pictures, their rows and dataset_info.json."""

import argparse
import json
from itertools import permutations, product
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS, SHAPES, SIZE = ("red", "green", "blue"), ("circle", "square", "triangle"), 64
COLUMNS = {"messages": "messages", "images": "images"}
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


def draw(folder: Path, colour: str, shape: str) -> str:
    image = Image.new("RGB", (SIZE, SIZE), "white")
    pen, box = ImageDraw.Draw(image), (SIZE // 8, SIZE // 8, SIZE * 7 // 8, SIZE * 7 // 8)
    match shape:
        case "circle":
            pen.ellipse(box, fill=colour)
        case "square":
            pen.rectangle(box, fill=colour)
        case "triangle":
            pen.polygon([(SIZE // 2, box[1]), (box[0], box[3]), (box[2], box[3])], fill=colour)
    name = f"{colour}-{shape}.png"
    image.save(folder / name)
    return name


def row(question: str, answer: str, *images: str) -> dict:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": list(images)}


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path, help="where to; it is made")
folder = parser.parse_args().folder
folder.mkdir(parents=True, exist_ok=True)
drawn = {f"a {colour} {shape}": draw(folder, colour, shape) for colour, shape in product(COLOURS, SHAPES)}
rows = [row("<image>What is this?", f"This is {what}.", name) for what, name in drawn.items()]
rows += [
    row("<image><image>What are these?", f"The first is {first[0]}, the second is {second[0]}.", first[1], second[1])
    for first, second in permutations(drawn.items(), 2)
]
(folder / "shapes.json").write_text(json.dumps(rows, indent=1))
entry = {"file_name": "shapes.json", "formatting": "sharegpt", "columns": COLUMNS, "tags": TAGS}
(folder / "dataset_info.json").write_text(json.dumps({"shapes": entry}, indent=1))
print(f"{len(drawn)} pictures and {len(rows)} rows in {folder}")
