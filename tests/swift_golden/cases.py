"""The golden cases: command lines and rows, chosen so that every pair of values of the axes of a group meets.

A case is `{"name", "version": 3 or 4, "verb": "sft", "pt" or "rlhf", "model": a key of models.MODELS, "flags": words of
the command line, "rows": rows of a JSONL file}`, with "env" (variables) and "files" (name: text) where it needs them.
"""

from __future__ import annotations

import chat_cases
import family_cases
import pair_cases
import picture_cases
import row_cases
import tool_cases
from casework import CASES

__all__ = ["CASES"]

chat_cases.thoughts()
chat_cases.thoughts_of_rows()
chat_cases.defaults()
chat_cases.systems()
chat_cases.templates()
chat_cases.stop_words()
row_cases.formats()
row_cases.losses()
tool_cases.tools()
row_cases.truncation()
chat_cases.pretraining()
pair_cases.preferences()
picture_cases.media()
picture_cases.in_conversations()
family_cases.families()
