"""What metrics are reported to: ROLL's keys as those of every other run, and as variables that trackers read."""

from __future__ import annotations

from megatune.config.dialects.roll_reader import Part, Reader
from megatune.config.groups.output import LoggingSettings

_MODES = {"wandb": ("online", "offline", "disabled"), "swanlab": ("cloud", "local", "offline")}


def reported(logging: LoggingSettings, top: Part) -> LoggingSettings:
    """Return the settings of the log with what `track_with` and `tracker_kwargs` say."""
    keys, names = top.inner["tracker_kwargs"], [name for name in top["track_with"] if name != "stdout"]
    return logging.model_copy(
        update={
            "logging_steps": top["logging_steps"],
            "report_to": names or ["none"],
            "tensorboard_dir": keys["log_dir"],
            "wandb_project": keys["project"],
            "wandb_save_dir": keys["log_dir"] if "wandb" in names else None,
            "swanlab_project": keys["project"],
            "swanlab_workspace": keys["workspace"],
            "swanlab_mode": keys["mode"] if keys["mode"] in _MODES["swanlab"] else None,
        }
    )


def tracker_variables(top: Part, reader: Reader) -> dict[str, str]:
    """Return variables of the environment that say the rest of it, the account's key among them."""
    keys, names = top.inner["tracker_kwargs"], top["track_with"]
    found = {}
    for tracker, modes in _MODES.items():
        if tracker not in names:
            continue
        if keys["mode"] and keys["mode"] not in modes:
            fix = f"write mode: {' or '.join(modes)}"
            reader.find(f"tracker_kwargs.mode {keys['mode']} with {tracker}", keys.where("mode"), "", fix)
        if keys["api_key"]:
            found[f"{tracker.upper()}_API_KEY"] = keys["api_key"]
    if "wandb" in names:
        given = {"NOTES": keys["notes"], "TAGS": ",".join(keys["tags"]), "MODE": keys["mode"]}
        found |= {f"WANDB_{name}": value for name, value in given.items() if value}
    return found
