"""Text as a recogniser knows it: words without punctuation, in lower case.

words_of("Please dial 2, or stay on the line.")  ->  ["please", "dial", "two", "or", "stay", "on", "the", "line"]
"""

from __future__ import annotations

import unicodedata

from dlx.speech.text import basic, normalize


def words_of(text: str, language: str = "en") -> list[str]:
    """The words that are said: numbers spelled out (English only), apostrophes kept inside words, no punctuation."""
    text = text.replace("\u2019", "'")
    plain = normalize(text) if language == "en" else basic(text)
    letters = "".join(c if c == "'" or unicodedata.category(c)[0] in "LM" else " " for c in plain)
    return [word for word in (word.strip("'") for word in letters.split()) if word]
