"""Rows of every supported form to one: a text, a conversation or a preference pair.

The forms: alpaca, sharegpt and openai (`chat`), query_response, text, and preference pairs of all but text (`pairs`).
`detect` tells them apart. What can be wrong with a row is listed in `megatune.data.bad_rows.CODES`.
"""

from __future__ import annotations

from megatune.data.formats.detection import Form, detect
from megatune.data.formats.examples import to_example

__all__ = ["Form", "detect", "to_example"]
