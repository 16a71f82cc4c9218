"""Runs of `megatune rl` that are struck: which process, in which phase, by which signal; and what is left of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from digits import make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatune.launch.context import Beat, read_beat

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 900.0  # of a run, on a machine that others use
_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# What no clock changes.
_CURVE = ("step", "reward", "loss", "grad_norm", "response_length", "critic/loss", "actor/kl_loss")


@dataclass(frozen=True)
class Strike:
    """A signal to a process.

    Attributes:
        phase: of the driver, by the name that failures have; "join" and "load" are those of actor_train-0.
        victim: "actor_train-0", ..., "reward", "driver", "raylet", "gcs_server"; "terminal" for all that one reaches.
        steps: that the run has taken since its start.
        is_idle: the victim has nothing to do in that phase, which may have ended when its end is noticed.
        held_from: a phase before, in which the victim has nothing to do: it is stopped then, so that a phase of some
            milliseconds cannot end before the strike. "": it runs until it is struck.
        repeats: how often it is struck, each time as a new process.
    """

    phase: str
    victim: str
    number: int = signal.SIGKILL
    steps: int = 2
    is_idle: bool = False
    held_from: str = ""
    repeats: int = 1

    @property
    def is_early(self) -> bool:
        return self.phase in ("join", "load")


@dataclass
class Ended:
    """How a run ended: seconds from the signal to its end and to that of the last of its processes."""

    code: int
    printed: str
    errors: str
    struck: bool
    seconds: float
    left: list[str] = field(default_factory=list)


def prepare(folder: Path) -> None:
    """Write the policy, a judge that says "YES" or "NO" whatever it is asked, and ten problems."""
    make_model(folder / "model")
    judge = make_model(folder / "judge", seed=1)
    config = json.loads((judge / "config.json").read_text())
    (judge / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))  # with its instructions
    words = ["YES ", "NO ", *(f"{number}" for number in range(10)), "?"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", eos_token="?")
    fast.chat_template = _CHAT
    fast.save_pretrained(judge)
    rows = [{"id": str(digit), "tag": "digits", "prompt": f"{digit}=", "digit": str(digit)} for digit in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings(folder: Path, output: Path, max_steps: int, kind: str) -> dict[str, Any]:
    """Return a file for two ranks that train, on devices that all share ("ppo"), for roles on devices of their own and
    a judge ("apart"), for the least ("small"), for two engines ("two"), or for an engine one step ahead ("ahead")."""
    data = {"prompt": "prompt", "file_name": [str(folder / "rows.jsonl")]}
    own = {"model_args": {"dtype": "fp32"}}

    def role(devices: list[int], strategy: str, **more: Any) -> dict[str, Any]:
        return {**own, "device_mapping": devices, "strategy_args": {"strategy_name": strategy}, **more}

    training = {"learning_rate": 1e-3, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    found: dict[str, Any] = {
        "exp_name": "struck",
        "pretrain": str(folder / "model"),
        "output_dir": str(output),
        "max_steps": max_steps,
        "save_steps": 2,
        "eval_steps": 2,
        "logging_steps": 1,
        "resume_from_checkpoint": True,
        "max_engine_restarts": 0,
        "rollout_batch_size": 8,
        "num_return_sequences_in_group": 4,
        "prompt_length": 8,
        "response_length": 8,
        "is_num_return_sequences_expand": True,
        "adv_estimator": "grpo",
        "init_kl_coef": 0.0,
        "actor_train": role([0], "megatron_train", training_args=training, data_args=data),
        "actor_infer": role([1], "builtin", generating_args={"temperature": 1.0, "top_p": 1.0, "top_k": 0}),
        "rewards": {"digits": {"worker_cls": "tests.rl.digits_reward.repeats", "tag_included": ["digits"]}},
    }
    found["rewards"]["digits"]["arguments"] = {"timeout": 5}
    if kind == "two":
        found["actor_infer"]["device_mapping"] = [1, 2]
    if kind == "ahead":
        found["async_generation_ratio"] = 1
    if kind == "ppo":
        found |= {
            "adv_estimator": "gae",
            "use_kl_loss": True,
            "kl_loss_coef": 0.01,
            "enable_old_logprobs_recompute": True,
            "reward_pretrain": str(folder / "model"),
            "critic": role([0], "megatron_train", training_args=training),
            "reference": role([1], "megatron_infer"),
            "validation": {"data_args": data, "generating_args": {"num_return_sequences": 2, "temperature": 1.0}},
        }
        found["actor_train"]["device_mapping"] = [0, 1]
        found["actor_infer"]["device_mapping"] = [0]
    if kind == "apart":
        generating = {"max_new_tokens": 1, "temperature": 1.0, "top_k": 2, "top_p": 1.0}
        model = {"model_args": {"dtype": "fp32", "model_name_or_path": str(folder / "judge")}}
        found |= {
            "use_kl_loss": True,
            "kl_loss_coef": 0.01,
            "reference": role([2], "hf_infer"),
            "reward_model": {**role([3], "hf_infer", generating_args=generating), **model},
        }
        worker = "LLMJudgeRewardWorker"
        found["rewards"]["digits"] = {
            "worker_cls": worker,
            "tag_included": ["digits"],
            "judge_model_type": "cluster",
            "judge_prompt": "{question}{response}",
        }
    return found


def run(file: Path, output: Path, strike: Strike | None = None) -> Ended:
    """Run a file as it is typed, in a session of its own, until it ends; strike once its phase has come."""
    before = {path.name for path in Path(tempfile.gettempdir()).glob("mt-*")}
    command = [sys.executable, "-m", "megatune", "rl", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    pipe = subprocess.PIPE
    began, known = time.monotonic(), set[psutil.Process]()
    with (
        open(file.with_suffix(".out"), "w+") as out,
        open(file.with_suffix(".err"), "w+") as err,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=pipe,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=_heed_signals,
        ) as process,
    ):
        striker = None if strike is None else _Striker(strike, process, output)
        looked = 0.0
        while process.poll() is None:
            if time.monotonic() - began > LIMIT_SECONDS:
                process.kill()
            if time.monotonic() - looked > 0.5:
                known |= _below(process.pid)
                looked = time.monotonic()
            if striker is not None and not striker.is_done:
                striker.look()
                time.sleep(0.002)
            else:
                time.sleep(0.05)
        _, alive = psutil.wait_procs(list(known), timeout=8)
        ended = time.monotonic()
        out.seek(0)
        err.seek(0)
        struck = striker.struck[-1] if striker is not None and striker.is_done else None
        found = Ended(process.returncode, out.read(), err.read(), struck is not None, ended - (struck or began))
    found.left = [" ".join(_words(each))[:80] for each in alive if each.is_running() and each.status() != "zombie"]
    after = {path.name for path in Path(tempfile.gettempdir()).glob("mt-*")} - before
    found.left += sorted(name for name in after if name.startswith(f"mt-{process.pid}-"))
    return found


def _heed_signals() -> None:
    """`nohup`, and a shell's background, have what they start ignore these."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class _Striker:
    """Strikes once its phase has come.

    Attributes:
        struck: when.
    """

    def __init__(self, strike: Strike, process: subprocess.Popen[bytes], output: Path) -> None:
        self._strike, self._process, self._output = strike, process, output
        name = "actor_train-0" if strike.is_early else "driver-0"
        self._path = output / "launch" / "heartbeats" / name
        self._before, self._first = _beat(self._path), None
        self._pids: list[int] = []
        self._is_held = not strike.held_from
        self.struck: list[float] = []

    @property
    def is_done(self) -> bool:
        return len(self.struck) == self._strike.repeats

    def look(self) -> None:
        strike = self._strike
        if not self._is_held:
            self._is_held = self._has_come(strike.held_from) and bool(self._signal(signal.SIGSTOP))
        elif self._has_come(strike.phase) and (pids := self._signal(strike.number)):
            self._pids = pids
            self.struck.append(time.monotonic())

    def _signal(self, number: int) -> list[int]:
        """Send a signal to the victim, and return its processes: none where they were struck before."""
        pids = _pids(self._strike.victim, self._process, self._output)
        if pids == self._pids:
            return []
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def _has_come(self, phase: str) -> bool:
        beat = _beat(self._path)
        if beat is None or (self._before is not None and beat.time == self._before.time):
            return False
        if self._strike.is_early:
            return beat.phase == phase
        if self._first is None:
            self._first = beat.step
        return beat.phase == phase and beat.step >= self._first + self._strike.steps


def _beat(path: Path) -> Beat | None:
    with suppress(OSError):
        return read_beat(path)
    return None


def _pids(victim: str, process: subprocess.Popen[bytes], output: Path) -> list[int]:
    if victim == "driver":
        return [process.pid]
    if victim == "terminal":
        return [-process.pid, -process.pid]  # its group: the kernel tells it of a closed one, and so does the shell
    if victim in ("raylet", "gcs_server"):
        return [each.pid for each in psutil.Process(process.pid).children() if each.name() == victim]
    if victim == "reward":
        log = output / "launch" / "logs" / "reward-digits.log"
        found = re.findall(r"^=== reward digits, process (\d+)", log.read_text() if log.exists() else "", re.MULTILINE)
        return [int(pid) for pid in found if psutil.pid_exists(int(pid))]
    log = output / "launch" / "logs" / f"{victim}.log"
    return [int(re.findall(r"^=== .*, process (\d+),", log.read_text(), re.MULTILINE)[-1])]


def _below(pid: int) -> set[psutil.Process]:
    with suppress(psutil.Error):
        return set(psutil.Process(pid).children(recursive=True))
    return set()


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def curve(output: Path) -> list[tuple[Any, ...]]:
    """Return numbers of every step and validation; a resume validates the step that it begins at once more."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [tuple(record.get(name) for name in _CURVE) for record in records if "reward" in record]
    validations = ((record["step"], record["eval_reward"]) for record in records if "eval_reward" in record)
    return [*steps, *dict.fromkeys(validations)]


def weights(output: Path) -> dict[str, bytes]:
    """Return all models that a run has left at its end."""
    newest = sorted(output.glob("critic/checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))[-1:]
    return {folder.name: (folder / "model.safetensors").read_bytes() for folder in newest} | {
        "": (output / "model.safetensors").read_bytes()
    }


def write(file: Path, content: Mapping[str, Any]) -> Path:
    file.write_text(yaml.safe_dump(dict(content), sort_keys=False))
    return file
