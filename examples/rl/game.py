"""A game of several turns: guess a digit, and hear whether it is lower or higher.

`python examples/rl/game.py FOLDER` writes a small random model that reads single characters, games of somebody who
guesses at random, and the digits to guess.
"""

import json
import random
import sys
from pathlib import Path

MAX_TURNS = 4  # enough to find it by halving the range


class Guess:
    """Gymnasium's terms: `step` returns observation, reward, terminated, truncated and info."""

    def reset(self, row):
        self._secret = int(row["secret"])

    def step(self, action):
        if not action.isdigit():
            return "", 0.0, True, False, {}
        guess = int(action)
        if guess == self._secret:
            return "", 1.0, True, False, {}
        return "<" if self._secret < guess else ">", 0.0, False, False, {}


def played(secret: int, draw: random.Random) -> list[dict[str, str]]:
    """A game of random guesses, as a conversation."""
    game = Guess()
    game.reset({"secret": secret})
    said = [{"from": "human", "value": "?"}]
    for _ in range(MAX_TURNS):
        guess = str(draw.randrange(10))
        said.append({"from": "gpt", "value": guess})
        observation, _, ended, _, _ = game.step(guess)
        if ended or len(said) == 2 * MAX_TURNS:
            break
        said.append({"from": "human", "value": observation})
    return said


def main(folder: Path) -> None:
    from make import write_model

    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", "0123456789?<>#")
    draw = random.Random(0)
    games = [{"conversations": played(draw.randrange(10), draw)} for _ in range(4000)]
    (folder / "games.json").write_text(json.dumps(games))
    entry = {"file_name": "games.json", "formatting": "sharegpt"}
    (folder / "dataset_info.json").write_text(json.dumps({"games": entry}))
    rows = [
        {"id": str(digit), "tag": "game", "messages": [{"role": "user", "content": "?"}], "secret": digit}
        for digit in range(10)
    ]
    (folder / "digits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
