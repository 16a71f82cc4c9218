"""What the driver of a run with many engines and trainers takes of a processor, and how often it calls them.

Engines and trainers are processes over Ray as in a run, without models: an engine answers after as long as sampling
would take, a trainer at once. Everything else is what `megatune rl` runs: groups, rewards, filters, advantages, and
samples on their way to the trainers.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatune.launch.context import RankContext
from megatune.rl.samples import Problem, Request, Response, Rollouts

VOCABULARY, PROMPT = 4096, 128


class WaitingEngine:
    """Answers as an engine does, after some seconds, with responses of random tokens.

    Args:
        seconds: until the responses of a call are there.
        length: tokens of a response.
        text: of a response.
    """

    def __init__(self, context: RankContext, seconds: float, length: int, text: str) -> None:
        self._seconds, self._length, self._text = seconds, length, text
        self._random, self._calls = np.random.default_rng(context.rank), 0

    def ask(self, method: str, *args: Any) -> Future[Any]:
        """Call a method, and return its answer."""
        answer: Future[Any] = Future()
        if method == "generate":
            self._calls += 1
            threading.Timer(self._seconds, lambda: answer.set_result([*map(self._response, args[2])])).start()
        else:
            answer.set_result(self._calls if method == "calls" else None)
        return answer

    def _response(self, request: Request) -> Response:
        ids, log_probs = random_ids(self._random, self._length), np.full(self._length, -1.5, np.float32)
        return Response(request.id, ids, log_probs, "stop", ((0, 1),), texts=(f"{request.id} {self._text}",) * 2)


def random_ids(random: np.random.Generator, length: int) -> np.ndarray:
    """Return the tokens of a response."""
    return random.integers(5, VOCABULARY // 2, length)


class ReadyTrainer:
    """Takes samples as a trainer's rank does, and computes nothing."""

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def log_probs(self, rollouts: Rollouts) -> dict[int, np.ndarray]:
        """Answer for this rank's share of the samples."""
        mine = range(self._context.rank, len(rollouts), self._context.world_size)
        return {sample: rollouts.per_token["rollout_log_probs"][sample] for sample in mine}

    def train(self, rollouts: Rollouts, step: int) -> SimpleNamespace:
        """Look at every sample once."""
        return SimpleNamespace(metrics={"tokens": float(sum(rollouts.lengths))})


def settings_of(model: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the file of a run, in ROLL's words."""
    engines, devices = options.engines, options.engines + options.trainers
    return {
        "exp_name": "scale", "pretrain": str(model), "output_dir": str(folder / "out"), "max_steps": options.steps + 1,
        "num_gpus_per_node": devices, "rollout_batch_size": options.prompts, "adv_estimator": "grpo",
        "num_return_sequences_in_group": options.group, "prompt_length": 4 * PROMPT, "response_length": options.tokens,
        "is_num_return_sequences_expand": True, "enable_old_logprobs_recompute": True,
        "actor_train": {
            "model_args": {"dtype": "fp32"}, "device_mapping": [*range(engines, devices)],
            "training_args": {
                "learning_rate": 1e-6, "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": options.prompts * options.group // options.trainers,
            },
            "data_args": {"file_name": ["rows.jsonl"]},
            "strategy_args": {"strategy_name": "megatron_train"},
        },
        "actor_infer": {
            "model_args": {"dtype": "fp32"}, "device_mapping": [*range(engines)],
            "generating_args": {"temperature": 1.0, "top_p": 1.0, "top_k": 0},
            "strategy_args": {"strategy_name": "builtin"},
        },
        "rewards": {
            "shape": {"worker_cls": "format", "format_pattern": ".*e", "tag_included": ["shape"], "world_size": 2}
        },
    }  # fmt: skip


def processor_seconds() -> float:
    """Of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(folder: Path, options: argparse.Namespace) -> tuple[list[dict[str, float]], int]:
    """Take some steps; return what each took, and how many calls the engines had."""
    from megatune.config.dialects.roll import read_roll
    from megatune.data.encode import load_tokenizer
    from megatune.demo.checkpoint import make_checkpoint
    from megatune.rl.cluster.cluster import Cluster
    from megatune.rl.cluster.role import RoleSpec
    from megatune.rl.cluster.timeline import PhaseTimer
    from megatune.rl.pipeline.collector import Collector, ProblemOrder
    from megatune.rl.pipeline.learn import Learner
    from megatune.rl.pipeline.roles import DeviceScheduler, EngineGroup, ModelGroup
    from megatune.rl.pipeline.sampler import make_sampler_factory

    model = make_checkpoint("qwen3", folder / "model", vocab_size=VOCABULARY, num_layers=1)
    file = folder / "run.yaml"
    file.write_text(json.dumps(settings_of(model, folder, options)))  # JSON is YAML
    settings = read_roll(file).require_valid()
    prompt = np.arange(5, 5 + PROMPT)
    problems = [Problem(str(each), "shape", "shape", [], prompt, {}) for each in range(options.prompts)]
    infer, train = settings.actor_infer, settings.actor_train
    devices = {*infer.devices, *train.devices}
    response = {"seconds": options.seconds, "length": options.tokens}
    response["text"] = load_tokenizer(model).decode(random_ids(np.random.default_rng(0), options.tokens))
    specs = [
        RoleSpec("actor_infer", "rl_scale:WaitingEngine", response, infer.devices, is_server=True),
        RoleSpec("actor_train", "rl_scale:ReadyTrainer", devices=train.devices, rendezvous=True),
    ]  # fmt: skip
    found: list[dict[str, float]] = []
    with Cluster(folder / "out" / "launch", devices, devices_per_node=len(devices)) as cluster:
        groups = cluster.start(specs)
        running = -(-options.prompts * options.group // options.engines)
        engines = EngineGroup(infer, groups["actor_infer"], running)
        policy = ModelGroup(train, groups["actor_train"])
        learner = Learner(settings, DeviceScheduler(engines, [policy]), {"actor_train": policy})
        make = make_sampler_factory(settings, engines, cluster.reward_pool(settings.rewards), model)
        collector = Collector(
            make(infer.generating_args, "train"), ProblemOrder({"shape": problems}, 1).at, {"shape": options.prompts},
            {}, options.group,
        )  # fmt: skip
        for step in range(options.steps + 1):
            began, used = time.monotonic(), processor_seconds()
            taken = engines.run(collector.take())
            sampled, at = processor_seconds(), time.monotonic()
            learner.learn(taken.groups, 0, PhaseTimer(lambda phase: None))
            ended = processor_seconds()
            if step:  # rewards start in the first
                found.append({"rollout": sampled - used, "rollout wall": at - began, "learn": ended - sampled})
        calls = sum(groups["actor_infer"].call("calls"))
    return found, calls


def main() -> None:
    """Run, and print a table."""
    from reporting import add_output_flag, finish

    parser = argparse.ArgumentParser(description=__doc__)
    for name, default, text in (
        ("engines", 64, "engines (64)"), ("trainers", 8, "ranks that train (8)"), ("prompts", 512, "of a step (512)"),
        ("group", 8, "responses to a prompt (8)"), ("tokens", 1024, "of a response (1024)"),
        ("steps", 2, "measured (2)"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument("--seconds", type=float, default=25.0, help="that a response takes to sample (25)")
    add_output_flag(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found, calls = measure(Path(folder), options)
    samples = options.prompts * options.group
    rows: list[Sequence[str]] = []
    for number, step in enumerate(found, 1):
        both = step["rollout"] + step["learn"]
        rows.append((
            str(number), f"{step['rollout']:.2f}", f"{step['learn']:.2f}", f"{1000 * both / samples:.2f}",
            f"{step['rollout wall']:.1f}", f"{step['rollout'] / step['rollout wall']:.1%}",
        ))  # fmt: skip
    header = ("step", "CPU s, rollout", "CPU s, learning", "ms a sample", "seconds of rollout", "share of them")
    note = (
        f"{options.engines} engines and {options.trainers} trainers, processes over Ray without models; "
        f"{options.prompts} x {options.group} responses of {options.tokens} tokens, which an engine samples in "
        f"{options.seconds:g} s. CPU seconds are the driver's, of all its threads: rollout has calls, rewards "
        f"and groups; learning has advantages and samples on their way to trainers and back, twice. The engines had "
        f"{calls} calls, {calls / options.prompts / (options.steps + 1):g} a group. All processes share this machine's "
        "cores."
    )
    finish("rl-scale", "The driver of many engines", header, rows, note, options.output)


if __name__ == "__main__":
    main()
