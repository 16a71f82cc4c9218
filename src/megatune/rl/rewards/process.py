"""What a process of the reward pool runs: `python -m megatune.rl.rewards.process`.

On stdin come pickles: the reward's kind, function and arguments, then (Answer, limit in seconds) one at a time. On
stdout goes one line of JSON for each: {} when the reward is ready, then score, correct and details, or error. What the
reward itself prints goes to stderr.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import pickle
import signal
from typing import Any, BinaryIO

from megatune.data.processes import when_parent_ends
from megatune.errors import MegatuneError
from megatune.rl.rewards.answer import Answer, Reward, RewardError
from megatune.rl.rewards.kinds import load_reward

GRACE_SECONDS = 5.0  # after its limit, when a process ends itself; its parent ends it at the limit


def main() -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    when_parent_ends(os.getppid(), lambda: os.killpg(0, signal.SIGKILL))
    try:
        reward = load_reward(*pickle.load(requests))
    except MegatuneError as error:
        _reply(replies, {"error": str(error)})
        return
    _reply(replies, {})
    while True:
        try:
            answer, limit = pickle.load(requests)
        except EOFError:
            return
        # A reward that hangs outside of Python ends this way, too, where nobody is left to end it.
        faulthandler.dump_traceback_later(limit + GRACE_SECONDS, exit=True)
        _reply(replies, judged(reward, answer))
        faulthandler.cancel_dump_traceback_later()


def judged(reward: Reward, answer: Answer) -> dict[str, Any]:
    """Return what a reward says of an answer, or why it says nothing: keys score, correct and details, or error."""
    try:
        verdict = reward(answer)
        if not math.isfinite(verdict.score) or not math.isfinite(verdict.correct):
            return {"error": f"the reward is {verdict.score}, correct {verdict.correct}: not a finite number"}
    except (RewardError, MegatuneError) as error:
        return {"error": str(error)}
    except BaseException as error:  # also SystemExit, and math-verify's TimeoutException
        return {"error": f"{type(error).__name__}: {error}", "timeout": "timeout" in type(error).__name__.lower()}
    return {"score": float(verdict.score), "correct": float(verdict.correct), "details": verdict.details}


def _reply(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply, default=str).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
