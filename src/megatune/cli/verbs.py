"""The table of verbs."""

from __future__ import annotations

# The module of a verb, whose `run` takes the verb and the words behind it; and what it does.
VERBS = {
    "train": ("train", "train a model as a YAML file says"),
    "sft": ("train", "supervised fine-tuning, from flags"),
    "pt": ("train", "continued pretraining on plain text, from flags"),
    "dpo": ("train", "preference training on pairs of answers, from flags"),
    "kto": ("train", "preference training on desirable and undesirable answers, from flags"),
    "rm": ("train", "a reward model from pairs of answers, from flags"),
    "plan": ("plan", "which layouts are valid, fit in memory, and how fast they are, before anything is started"),
    "explain": ("explain", "what a setting does, when to change it, what it costs here"),
    "families": ("families", "which models are supported, and what proves each"),
    "data": ("data", "look at the data: preview rows, count tokens"),
    "verify": ("verify", "compare a layout with Transformers: logits, loss, gradients"),
    "infer": ("infer", "chat, complete, or answer data sets, from a Hugging Face or a training checkpoint"),
    "evaluate": ("evaluate", "score a model: its answers to a data set, or benchmarks of lm_eval"),
    "serve": ("serve", "serve a model over HTTP with OpenAI's API"),
    "export": ("export", "merge adapters into their model, or convert from and to Megatron-Core's checkpoints"),
    "rl": ("rl", "reinforcement learning with verifiable rewards, on Ray"),
    "new": ("new", "plan, write and start a new run from a few answers"),
    "sweep": ("sweep", "train a file with several values of settings, and compare the runs"),
    "rehearse": ("rehearse", "try a run with a small model on this machine before it starts elsewhere"),
    "ui": ("ui", "a web page of runs: curves, settings, rows, checkpoints, logs; start, stop, resume"),
    "report": ("report", "write one HTML file of one run, or of several side by side"),
    "doctor": ("doctor", "check machines before a run: versions, GPUs, disks, network, speed of ranks"),
    "demo-model": ("demo_model", "create a tiny random checkpoint with a real tokenizer"),
    "megatron": ("swift", "train and export with Megatron-SWIFT's command lines"),
    "swift": ("swift", "export, infer and deploy with ms-swift's command lines"),
    "completion": ("completion", "write completions for bash, zsh or fish"),
    "shims": ("shims", "write programs called megatron and swift"),
}

# The verbs of --help, in its order, by what a person does.
GROUPS = {
    "look": "families data explain ui report doctor",
    "plan": "plan rehearse verify",
    "train": "new train sft pt dpo kto rm rl sweep",
    "use": "infer evaluate serve",
    "convert": "export demo-model megatron swift shims completion",
}

# The verbs that run something, which take --quiet.
RUNS = "train sft pt dpo kto rm rl new sweep rehearse verify infer evaluate export demo-model megatron swift"
QUIET = "--quiet"
