"""A target whose import starts a process, which ends while the ranks run."""

import subprocess
import time

subprocess.Popen(["sleep", "0.2"])


def work(context, payload):
    context.beat("work", 1)
    time.sleep(1.5)
    context.beat("work", 2)
