"""`megatune rl FILE --evaluate MODEL`: let any model answer the validation problems of a file, and score it."""

from __future__ import annotations

import json
from pathlib import Path

from megatune.config.rl.rollout import Generating
from megatune.config.rl.settings import RLSettings
from megatune.data.encode import load_tokenizer
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.hub.models import is_hub_id, open_model
from megatune.rl.cluster.cluster import Cluster
from megatune.rl.pipeline.files import dump_samples
from megatune.rl.pipeline.groups import Group
from megatune.rl.pipeline.report import report_failures, validation_metrics
from megatune.rl.pipeline.run import read_validation
from megatune.rl.pipeline.sampler import make_sampler_factory, sample_all
from megatune.rl.pipeline.scores import RewardModels
from megatune.rl.pipeline.startup import evaluation_settings, start_roles
from megatune.rl.rewards.judge_client import judge_clients
from megatune.training.storage.files import write_atomically, writing

_ADAPTER = "adapter_config.json"


def evaluate(settings: RLSettings, model: str) -> int:
    """Sample, score and print the results: with greedy decoding, then as validation.generating_args says.

    The numbers are written to OUTPUT/evaluation/NAME/metrics.json, and every response to the same folder.

    Args:
        model: a folder, such as a checkpoint of the run, or an id of a hub.

    Raises:
        MegatuneError: (INPUT) the model cannot be used; (SETTINGS) there is no validation; (DATA) problems that cannot
            be used.
    """
    if settings.validation is None:
        fix = "write validation: with data_args and generating_args"
        why = "it names the problems"
        raise MegatuneError(Finding("validation is missing", why=why, fix=fix), ExitCode.SETTINGS)
    source, asked = _folder(model), settings.validation.generating_args
    settings = evaluation_settings(settings, source)
    problems = read_validation(settings, source)
    assert problems is not None
    folder = Path(settings.run.output_dir) / "evaluation" / Path(model).resolve().name
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    print(f"evaluating {model} on {len(problems.all()):,} problems", flush=True)
    devices = {device for role in (*settings.samplers, *settings.scorers.values()) for device in role.devices}
    found: dict[str, dict[str, float]] = {}
    per_node, limit = settings.run.num_gpus_per_node, settings.run.rpc_timeout
    with Cluster(folder / "launch", devices, devices_per_node=per_node, call_limit=limit) as cluster:
        pool, roles = cluster.reward_pool(settings.rewards), start_roles(cluster, settings, evaluates=True)
        pool.clients |= judge_clients(settings, roles.judges)
        scheduler = roles.scheduler
        for scorer in roles.models.values():
            scorer.group.call("join")
            scheduler.load(scorer)
        scores = RewardModels(settings, scheduler, roles.models, pool, load_tokenizer(source))
        make = make_sampler_factory(settings, roles.engines, pool, source)
        for name, generating in _decodings(asked).items():
            scheduler.sample()
            groups = roles.engines.run(sample_all(problems.all(), make(generating, "eval"), generating))
            scores.score(groups)
            found[name] = validation_metrics(groups)
            print(_line(name, found[name], groups), flush=True)
            report_failures(groups, "count as wrong")
            with writing(folder):
                dump_samples(folder / f"{name}.jsonl", 0, groups)
        roles.close()
    with writing(folder):
        write_atomically(folder / "metrics.json", json.dumps({"model": model, **found}, indent=1) + "\n")
    print(f"numbers and responses are in {folder}", flush=True)
    return ExitCode.DONE


def _folder(model: str) -> Path:
    """Return the folder of a model.

    Raises:
        MegatuneError: INPUT, if there is no model.
    """
    path = open_model(model).fetch() if is_hub_id(model) else Path(model)
    if (path / "config.json").is_file():
        return path
    fix, why = "name a folder with config.json, or an id of a hub", ""
    if (path / _ADAPTER).is_file():
        why, fix = "it is an adapter", f"megatune export --adapter_name_or_path {model} --export_dir MERGED"
    raise MegatuneError(Finding(f"{model} is not a model", "--evaluate", why, fix), ExitCode.INPUT)


def _decodings(asked: Generating) -> dict[str, Generating]:
    greedy = asked.model_copy(update={"do_sample": False, "num_return_sequences": 1})
    return {"greedy": greedy} if not asked.do_sample else {"greedy": greedy, "sampled": asked}


def _line(name: str, metrics: dict[str, float], groups: list[Group]) -> str:
    size = groups[0].size
    said = f"{name:<8} {'accuracy' if size == 1 else f'avg@{size}'} {metrics['accuracy']:.4f}"
    others = {key: value for key, value in metrics.items() if key.startswith(("pass@", "accuracy/"))}
    others |= {key: metrics[key] for key in ("reward", "response_length", "truncated")}
    said += "".join(f"  {key} {value:.4g}" for key, value in others.items())
    return said + f"  reward_errors {metrics['reward_errors']:.0f}" * bool(metrics["reward_errors"])
