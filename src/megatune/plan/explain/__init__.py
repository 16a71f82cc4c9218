"""What settings are, how they work, when to change them, and what they cost for a model on its machines."""

from megatune.plan.explain.file import explain_file
from megatune.plan.explain.ground import Ground, default_grounds, ground_of_file
from megatune.plan.explain.key import explain_key, settings_page
from megatune.plan.explain.language import LANGUAGES, Language, language_of

__all__ = [
    "LANGUAGES",
    "Ground",
    "Language",
    "default_grounds",
    "explain_file",
    "explain_key",
    "ground_of_file",
    "language_of",
    "settings_page",
]
