"""What the documents' command lines name and the repository does not have, each as something tiny."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from doc_commands import ROOT
from pictures_kit import draw, write_rows
from script_kit import run_script

from megatune.demo.checkpoint import make_checkpoint

_ROLL_FILES = ROOT / "tests" / "config" / "roll_files"
_QWEN3 = ("out/demo-model", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-8B")


def link_repository(folder: Path) -> None:
    """Give a folder what a clone has."""
    for name in ("benchmarks", "Makefile", "constraints.txt", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "examples", folder / "examples")


def write_models(folder: Path) -> None:
    """Write models: those of hubs lie where a folder of their id would."""
    for name in _QWEN3:
        make_checkpoint("qwen3", folder / name, max_position_embeddings=40960)
    make_checkpoint("qwen3_moe", folder / "Qwen/Qwen3-30B-A3B")
    for name in ("Qwen/Qwen3-VL-8B-Instruct", "out/vl-demo"):
        make_checkpoint("qwen3_vl", folder / name)
    run_script(folder / "examples/rl/make.py", folder / "out/rl")
    shutil.copytree(folder / "out/rl/model", folder / "out/rl/warmup")


def write_data(folder: Path) -> None:
    """Write LLaMA-Factory's demo data under their names, and files of a user's own."""
    identity = json.loads((folder / "examples/demo/identity.json").read_text(encoding="utf-8"))
    (data := folder / "data").mkdir()
    draw(data / "one.png")
    (data / "rows.json").write_text(json.dumps(identity), encoding="utf-8")
    pictured = [{**row, "instruction": "<image>What?", "images": ["one.png"]} for row in identity[:8]]
    (data / "pictured.json").write_text(json.dumps(pictured), encoding="utf-8")
    rows = {"file_name": "rows.json"}
    media = {"file_name": "pictured.json", "columns": {"images": "images"}}
    info = {"identity": rows, "alpaca_en_demo": rows, "mllm_demo": media}
    (data / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    for name in ("my.jsonl", "test.jsonl"):
        write_rows(folder / name, [{"instruction": f"Say {n}.", "output": f"{n}."} for n in range(8)])
    (folder / "questions.txt").write_text("Who are you?\nWho made you?\n", encoding="utf-8")
    (folder / "chat.yaml").write_text("model_name_or_path: out/demo-model\ntemplate: qwen3_nothink\n", encoding="utf-8")
    draw(folder / "cat.jpg")
    draw(folder / "dog.jpg", seed=1)
    write_clip(folder / "clip.mp4")


def write_clip(path: Path) -> None:
    import av
    from PIL import Image

    with av.open(str(path), "w") as clip:
        stream = clip.add_stream("mpeg4", rate=4, width=64, height=32, pix_fmt="yuv420p")
        for seed in range(8):
            frame = av.VideoFrame.from_image(Image.open(draw(path.with_suffix(".png"), seed=seed)))
            clip.mux(stream.encode(frame))
        clip.mux(stream.encode())


def write_rl_files(folder: Path) -> None:
    """Write a file of reinforcement learning under the names that the documents have for one."""
    (there := folder / "examples/qwen3-8B-rlvr_megatron").mkdir()
    for path in (there / "rlvr_config.yaml", folder / "rlvr_config.yaml"):
        shutil.copy(_ROLL_FILES / "qwen3_8b.yaml", path)
    shutil.copy(_ROLL_FILES / "colocated_vllm_packing.yaml", folder / "rlvr.yaml")


def copy_runs(folder: Path) -> None:
    """Copy two runs that are there to the places where the documents have more of their kind."""
    for name in ("out/second", "out/third", "out/demo", "out/chat", "out/tools", "out/dpo"):
        shutil.copytree(folder / "out/first", folder / name)
    for name in ("out/lora2", "saves/qwen3-4b/lora/sft"):
        shutil.copytree(folder / "out/lora", folder / name)
