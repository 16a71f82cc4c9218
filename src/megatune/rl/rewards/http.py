"""JSON to a service and back."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from megatune.rl.rewards.answer import RewardError

WAITS = (1.0, 4.0)  # seconds before the second and the third try


def post_json(url: str, message: Mapping[str, Any], timeout: float, headers: Mapping[str, str] | None = None) -> Any:
    """Post a message and return the answer; tried three times where the service is busy or not there.

    Raises:
        RewardError: it does not answer, or refuses the message.
    """
    data = json.dumps(message).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    for wait in (*WAITS, None):
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            failure = f"{url} answers {error.code}: {error.read(300).decode(errors='replace').strip()}"
            if error.code < 500 and error.code not in (408, 429):
                break
        except (OSError, ValueError) as error:  # URLError, timeouts, JSON that breaks off
            failure = f"{url}: {getattr(error, 'reason', None) or error}"
        if wait is not None:
            time.sleep(wait)
    raise RewardError(failure)
