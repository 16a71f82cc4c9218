"""Records what ms-swift itself trains on the golden cases; run it in an environment of ms-swift, one version at a time.

    python tests/swift_golden/make.py --models DIR --version 4 --out FILE

DIR comes from models.py. Each case goes through ms-swift's own reading of rows and its own templates, as `megatron
sft`, `pt` and `rlhf` do. Megatron-Core is not needed: the arguments are those of `swift`'s base class with defaults of
the `megatron` commands, each with the place where it was read.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import json
import logging
import multiprocessing
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

DATE = "26 Jul 2024"  # that of the published chat template; ms-swift writes today's
TOO_LONG = "longer than max_length"


def main() -> None:
    """Write the results of every case of one version, one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--version", type=int, choices=(3, 4), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="a part of the names of the cases to make")
    chosen = parser.parse_args()

    from cases import CASES

    caches = tempfile.TemporaryDirectory()
    os.environ |= {"HF_HOME": caches.name, "MODELSCOPE_CACHE": caches.name}
    system = Swift(chosen.version, chosen.models.resolve())
    cases = [case for case in CASES if case["version"] == chosen.version and chosen.only in case["name"]]
    # Variables are read where a processor is loaded first in a process: such cases get one of their own, before others.
    results = {case["name"]: system.encode_alone(case) for case in cases if "env" in case}
    results |= {case["name"]: system.encode(case) for case in cases if "env" not in case}
    lines = [json.dumps({"name": case["name"], **results[case["name"]]}, ensure_ascii=False, separators=(",", ":"))
             for case in cases]  # fmt: skip
    with gzip.GzipFile(chosen.out, "wb", mtime=0) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


class Swift:
    """One version of ms-swift, and the folder of model folders."""

    def __init__(self, version: int, models: Path) -> None:
        self.version, self.models = version, models
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LOG_LEVEL": "CRITICAL"}
        _let_torchvision_import()
        import datasets

        if version == 4:
            from swift.arguments import BaseArguments
            from swift.pipelines.train import prepare_kto_dataset
            from swift.template import TEMPLATE_MAPPING
            from swift.utils import parse_args
        else:
            from swift.llm import BaseArguments, load_dataset
            from swift.llm.template import TEMPLATE_MAPPING
            from swift.llm.train.kto import prepare_kto_dataset
            from swift.utils import parse_args

            # v3: SwiftSft._get_dataset of swift/llm/train/sft.py; v4 has it as BaseArguments.load_dataset
            BaseArguments.load_dataset = lambda self: load_dataset(
                self.dataset, split_dataset_ratio=0.0, shuffle=self.dataset_shuffle, **self.get_dataset_kwargs()
            )
        logging.disable(logging.CRITICAL)
        datasets.disable_progress_bars()
        self.parse_args, self.prepare_kto_dataset = parse_args, prepare_kto_dataset
        self.classes = _argument_classes(BaseArguments, version)
        self.templates = TEMPLATE_MAPPING
        for meta in TEMPLATE_MAPPING.values():
            for key in ("prefix", "system_prefix"):
                parts = getattr(meta, key)
                if parts is not None:
                    setattr(meta, key, [re.sub(r"(?<=Today Date: )[^\n]*", DATE, part) if isinstance(part, str)
                                        else part for part in parts])  # fmt: skip
        self.placeholders = {
            meta.template_cls: list(meta.template_cls.placeholder_tokens) for meta in TEMPLATE_MAPPING.values()
        }
        self.processors: dict[tuple[str, str | None], Any] = {}

    def encode_alone(self, case: dict[str, Any]) -> dict[str, Any]:
        """As `encode`, in a process of its own."""
        reader, writer = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=lambda: writer.send(self.encode(case)))
        child.start()
        result: dict[str, Any] = reader.recv()
        child.join()
        return result

    def encode(self, case: dict[str, Any]) -> dict[str, Any]:
        """Return what the command of the case trains: its rows, or the error that ends it."""
        with tempfile.TemporaryDirectory() as folder, _environment(case.get("env", {})), contextlib.chdir(folder):
            try:
                return self._encode(case, Path(folder))
            except Exception as error:  # the command ends with it
                return {"error": _said(error, Path(folder), self.models)}

    def _encode(self, case: dict[str, Any], folder: Path) -> dict[str, Any]:
        for name, text in case.get("files", {}).items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "pictures").symlink_to(self.models / "pictures")
        rows = folder / "rows.jsonl"
        # The channel numbers the rows, so that a row that is filtered out is known; it changes no encoding.
        numbered = [{**row, "channel": str(number)} for number, row in enumerate(case["rows"])]
        rows.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in numbered), encoding="utf-8")

        model = str(self.models / case["model"])
        words = ["--model", model, "--dataset", str(rows), "--dataset_shuffle", "false", *case["flags"]]
        arguments, rest = self.parse_args(self.classes[case["verb"]], words)
        if rest:
            raise ValueError(f"remaining_argv: {rest}")  # swift/pipelines/base.py, SwiftPipeline._parse_args
        if self.version == 4:
            arguments.dataset_num_proc = None  # the default of 1 forks a process for every step, with the same rows
        template = self._template(arguments, case["verb"], (case["model"], arguments.task_type))
        train, _ = arguments.load_dataset()
        if case["verb"] == "rlhf" and arguments.rlhf_type == "kto":
            train, _ = self.prepare_kto_dataset(arguments, train, None)
        # swift/pipelines/train/sft.py, SwiftSft._encode_dataset
        if arguments.truncation_strategy == "split" and (template.mode != "train" or arguments.use_chat_template):
            raise ValueError("`--truncation_strategy split` is currently only supported for pre-training.")
        results = [{"dropped": "filtered"} for _ in case["rows"]]
        for row in train:
            results[int(row["channel"])] = self._encode_row(template, row, arguments)
        weighted = not _is_binary(template)
        return {"rows": results, "weighted": True} if weighted else {"rows": results}

    def _template(self, arguments: Any, verb: str, key: tuple[str, str | None]) -> Any:
        """As MegatronSft.__init__ and _prepare_template of megatron sft, pt and rlhf."""
        if key not in self.processors:
            self.processors[key] = arguments.get_model_processor(load_model=False)[1]
        if self.version == 3 and verb == "pt":  # v3: swift/megatron/train/pt.py sets them whatever the flags say
            arguments.use_chat_template, arguments.loss_scale = False, "all"
        for cls, tokens in self.placeholders.items():
            cls.placeholder_tokens = list(tokens)  # an instance writes the ids of its tokenizer into the class
        processor = self.processors[key]
        template = arguments.get_template(processor)
        for token in ("image", "video"):
            if hasattr(template, f"{token}_token_id"):
                # The class has the published tokenizer's ids; a tiny tokenizer has others.
                pad = template.tokenizer.convert_tokens_to_ids(f"<|{token}_pad|>")
                setattr(template, f"{token}_token_id", pad)
        template.set_mode("train")
        if verb == "rlhf":
            template.set_mode({"kto": "kto"}.get(arguments.rlhf_type, "rlhf"))
        template.use_megatron = True
        return template

    def _encode_row(self, template: Any, row: dict[str, Any], arguments: Any) -> dict[str, Any]:
        """As AddLengthPreprocessor and LazyLLMDataset (dataset/utils.py): a row with an error is left out."""
        try:
            encoded = template.encode(copy.deepcopy(row), return_length=True)
        except Exception as error:
            if arguments.strict and type(error).__name__ != "MaxLengthError":
                raise
            too_long = type(error).__name__ == "MaxLengthError"
            return {"dropped": TOO_LONG if too_long else _said(error, Path.cwd(), self.models)}
        if isinstance(encoded, list):
            return {"pieces": [_document(piece, "") for piece in encoded]}
        if "chosen_input_ids" not in encoded:
            return _document(encoded, "")
        if "label" in encoded:  # kto
            return {**_document(encoded, "chosen_"), "label": encoded["label"]}
        return {side: _document(encoded, f"{side}_") for side in ("chosen", "rejected")}


def _argument_classes(base: type, version: int) -> dict[str, type]:
    """The arguments of megatron sft, pt and rlhf as far as rows and templates read them.

    v4: swift/megatron/arguments/{megatron,sft,pretrain,rlhf}_args.py;
    v3: swift/megatron/argument/{megatron,train,rlhf}_args.py.
    """
    kto = {"loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0, "calculate_KL": True}

    @dataclass
    class SftArguments(base):  # type: ignore[misc, valid-type]
        padding_free: bool = True  # MegatronArguments
        load_args: bool = False  # MegatronSftArguments, v3 MegatronTrainArguments
        global_batch_size: int = 16  # MegatronArguments
        micro_batch_size: int = 1  # MegatronArguments
        rlhf_type: str | None = None  # RLHFMegatronArgumentsMixin

        def __post_init__(self) -> None:
            super().__post_init__()
            for name, value in kto.items():
                setattr(self, name, value)

    @dataclass
    class PtArguments(SftArguments):
        # v4: MegatronPretrainArguments; v3 sets both after parsing (see Swift._template).
        use_chat_template: bool | None = False if version == 4 else None
        loss_scale: str = "all" if version == 4 else "default"

    @dataclass
    class RlhfArguments(SftArguments):
        rlhf_type: str | None = "dpo"  # MegatronRLHFArguments, as what follows
        loss_scale: str = "last_round"

        def __post_init__(self) -> None:
            if self.rlhf_type == "rm":
                self.task_type = "seq_cls"
                self.num_labels = 1
            super().__post_init__()

    return {"sft": SftArguments, "pt": PtArguments, "rlhf": RlhfArguments}


def _document(encoded: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Token ids; how many are masked, trained, masked, ... in turn; weights if there are; grids of pictures."""
    ids = [int(token) for token in encoded[f"{prefix}input_ids"]]
    document: dict[str, Any] = {"ids": ids}
    labels = encoded.get(f"{prefix}labels")
    if labels is not None:
        runs, trained = [0], False
        for token, label in zip(ids, labels, strict=True):
            if (label != -100) != trained:
                trained = not trained
                runs.append(0)
            assert label in (-100, token), (label, token)
            runs[-1] += 1
        document["trained"] = runs
    scale = encoded.get(f"{prefix}loss_scale")
    if scale is not None and any(weight not in (0, 1) for weight in scale):
        document["weights"] = [float(weight) for weight in scale]
    grids = encoded.get(f"{prefix}image_grid_thw")
    if grids is not None:
        document["grids"] = grids.tolist()
    return document


def _is_binary(template: Any) -> bool:
    scale = template.loss_scale
    return bool(scale.is_binary_loss_scale if hasattr(scale, "is_binary_loss_scale") else scale.is_loss_scale_binary)


def _said(error: Exception, folder: Path, models: Path) -> str:
    """The error in a line that is the same on every machine."""
    text = re.sub(r"\s+", " ", str(error).replace(str(folder), "FOLDER").replace(str(models), "MODELS"))
    return f"{type(error).__name__}: {text[:120]}"


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Any:
    before = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _let_torchvision_import() -> None:
    """Declare the compiled operators that torchvision needs to import, where its build is not for this torch.

    Resizing of pictures, all that is wanted of it, uses none.
    """
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        globals()["_kept"] = library


if __name__ == "__main__":
    main()
