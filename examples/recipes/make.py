"""Writes rows of the recipes: `python make.py FOLDER` makes conversations, calls of tools and pairs of answers."""

import json
import random
import sys
from itertools import product
from pathlib import Path

NAMES = "Ann Ben Cleo Dan Eva Finn Gina Hugo Ida Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Vera".split()  # noqa: SIM905
CITIES = ["Berlin", "Cairo", "Delhi", "Lima", "London", "Oslo", "Paris", "Tokyo"]
NUM_ROWS = 64


def message(role: str, content: str, **more: object) -> dict:
    return {"role": role, "content": content, **more}


def conversation(name: str, city: str) -> dict:
    """The second answer is only right for what the first message says."""
    turns = [(f"I am {name} from {city}.", f"Hello {name}!"), ("Where do I live?", f"You live in {city}.")]
    return {"messages": [each for ask, say in turns for each in (message("user", ask), message("assistant", say))]}


def tool(name: str, description: str) -> dict:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": city}}


TOOLS = [tool("get_weather", "The temperature in a city"), tool("get_time", "The time in a city")]
QUESTIONS = {
    "get_weather": ("How warm is it in {}?", "{} degrees", "It is {} degrees in {}."),
    "get_time": ("What time is it in {}?", "{} o'clock", "It is {} o'clock in {}."),
}


def calling(function: str, city: str, number: int) -> list[dict]:
    """A row that ends with the call, and one with the answer that its result gives."""
    question, result, answer = QUESTIONS[function]
    call = {"type": "function", "function": {"name": function, "arguments": {"city": city}}}
    asked = [message("user", question.format(city)), message("assistant", "", tool_calls=[call])]
    answered = [message("tool", result.format(number)), message("assistant", answer.format(number, city))]
    return [{"messages": messages, "tools": TOOLS} for messages in (asked, asked + answered)]


def pair(name: str, city: str) -> dict:
    return {"prompt": f"I am {name} from {city}.", "chosen": f"Welcome, {name}!", "rejected": f"Hello {name}!"}


folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
random.seed(0)
people = random.sample(list(product(NAMES, CITIES)), NUM_ROWS)
asked = random.sample(list(product(QUESTIONS, CITIES, range(2, 20))), NUM_ROWS // 8)
kinds = {
    "chat": [conversation(*each) for each in people],
    "tools": [row for each in asked for row in calling(*each)],
    "pairs": [pair(*each) for each in people],
}
for name, rows in kinds.items():
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    print(f"{len(rows)} rows in {folder / name}.jsonl")
