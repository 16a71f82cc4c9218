"""The options of `megatune plan`, next to the settings of a run."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from megatune.config.options import Flag
from megatune.config.setting import Count, Group

_AMOUNTS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def _amount(text: str) -> float | None:
    """Read 1B, 250M or 3_000_000."""
    plain = text.replace("_", "").replace(",", "").lower()
    factor = _AMOUNTS.get(plain[-1:], 1.0)
    try:
        value = float(plain[:-1] if factor != 1.0 else plain) * factor
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class PlanOptions(Group):
    """The options of `megatune plan`."""

    gpu: Annotated[str | None, Flag("KIND")] = None
    """a device of the catalogue, such as a100-80g (this machine's); several, or any, are compared in a table"""
    price: Annotated[list[str], Flag("KIND=PRICE ...")] = Field(default=[])
    """price of one GPU of a kind for an hour, for the table of several kinds"""
    gpus: Count | None = None
    """devices of the whole run (num_processes, or this machine's)"""
    gpus_per_node: Count | None = None
    """devices of one machine (usual for the kind)"""
    link: Annotated[str | None, Flag("NAME")] = None
    """interconnect of the devices in a machine (usual for the kind)"""
    network: Annotated[str | None, Flag("NAME")] = None
    """network between machines, such as ib-400 or ethernet-100g (usual for the kind)"""
    seq: Count | None = None
    """tokens of a row: cutoff_len (2048)"""
    global_batch: Count | None = None
    """rows of a step (those of the settings; 64, or one per device, for a model without settings)"""
    trainable: Literal["full", "lora"] | None = None
    """what is trained (full)"""
    document_length: Annotated[float | None, Flag("L"), Field(ge=1)] = None
    """mean tokens of a sequence: of a row, or of those packed into a row (from the data)"""
    longest_document: Count | None = None
    """tokens of the longest sequence (from the data, or cutoff_len)"""
    image_tokens: Annotated[int | None, Field(ge=0)] = None
    """image tokens of a row (one image of image_max_pixels)"""
    dataset_tokens: Annotated[
        float | None, Flag("N", read=_amount, expected="a number above 0, such as 1B, 250M or 3000000"), Field(ge=1)
    ] = None
    """tokens of the whole run, such as 1B or 250M, to print its duration"""
    prompt_tokens: Annotated[float | None, Flag("N"), Field(ge=1)] = None
    """mean tokens of a prompt, for an RL file (a quarter of the longest)"""
    response_tokens: Annotated[float | None, Flag("N"), Field(ge=1)] = None
    """mean tokens of a response, for an RL file (half of the longest)"""
    top: Count = 10
    """number of layouts to list"""
    output: Annotated[str | None, Flag("FILE.yaml")] = None
    """write the best layout as a settings file for megatune train"""
    figures: Annotated[str | None, Flag("DIR")] = None
    """draw memory against time as a PNG, and write the schedule as a trace for Perfetto, in this folder"""
    launch: Annotated[Literal["torchrun", "slurm", "skypilot", "kubernetes"] | None, Flag(bare="torchrun")] = None
    """print how to start the run: a line for each machine, or a file for a cluster"""
    launch_file: Annotated[str | None, Flag("FILE")] = None
    """write the output of --launch to this file instead of printing it"""
    devices: Annotated[str | None, Flag("FILE")] = None
    """a file with your own devices and interconnects"""
    calibration: Annotated[str | None, Flag("FILE")] = None
    """a file with the factors of --calibrate (those of the device, if any)"""
    calibrate: Annotated[list[str], Flag("RUN ...")] = Field(default=[])
    """fit the planner to the measurements of these runs"""
    json_: bool = False
    """print one JSON document"""
