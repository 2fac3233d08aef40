"""Text as it is written into text as it is read: English normalisation, a plain cleaner, splitting of long text.

    normalize("Dr. Lee paid $3.50 on 3/15/2024.")
    # "doctor lee paid three dollars and fifty cents on march fifteenth, twenty twenty-four."

ARPAbet in braces passes through untouched: "turn {HH AH0 L OW1} on".
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

from .rules import RULES
from .symbols import PHONES, is_phones
from .transliteration import to_ascii

PASSES = 8
LONG = 500
# Characters of the private use area stand for ARPAbet while the rules run; in text of others they are left out.
_FIRST = 0xE000
_CLOSERS = "'\")]"


def normalize(text: str, language: str = "en", strict: bool = False) -> str:
    """Lower-case ASCII words and punctuation, numbers and abbreviations spelled out.

    Idempotent: its own result comes back unchanged. Characters that cannot be written in ASCII are left out with a
    warning that lists them, or refused with a ValueError if `strict`. ValueError for other languages than "en"; `basic`
    is for those.
    """
    if language != "en":
        raise ValueError(f"there are no rules for language {language!r}, only for 'en'; use the 'basic' cleaner")
    # Sentence by sentence where it is long: some patterns take time that grows with the square of the length.
    pieces = [text] if len(text) <= LONG else split_sentences(text, LONG)
    return " ".join(_normalize(piece, strict) for piece in pieces).strip()


def _normalize(text: str, strict: bool) -> str:
    for _ in range(PASSES):
        result = _keep_phones(text, lambda plain: _apply_rules(_ascii(plain, strict)))
        if result == text:
            break
        text = result
    return text


def basic(text: str, strict: bool = False) -> str:
    """Lower case and single spaces, for any alphabet."""
    return _keep_phones(text, lambda plain: _tidy(plain.lower()))


CLEANERS: dict[str, Callable[..., str]] = {"english": normalize, "basic": basic}


def _keep_phones(text: str, clean: Callable[[str], str]) -> str:
    """`clean` applied to the text between the ARPAbet in braces."""
    kept: list[str] = []

    def hide(match: re.Match[str]) -> str:
        if not is_phones(match[1]):
            return match[0]
        kept.append("{" + " ".join(match[1].split()) + "}")
        return f" {chr(_FIRST + len(kept) - 1)} " if _words_touch(match) else chr(_FIRST + len(kept) - 1)

    if "{" not in text:
        return clean(text)
    found = clean(PHONES.sub(hide, re.sub("[\ue000-\uf8ff]", "", text)))
    return re.sub("[\ue000-\uf8ff]", lambda match: kept[ord(match[0]) - _FIRST], found)


def _words_touch(match: re.Match[str]) -> bool:
    around = match.string[match.start() - 1 : match.start()] + match.string[match.end() : match.end() + 1]
    return any(c.isdigit() for c in around)  # else the digit's rule would not see a border of a word


def _ascii(text: str, strict: bool) -> str:
    pieces = re.split("([\ue000-\uf8ff])", text) if "\ue000" in text else [text]
    dropped: list[str] = []
    for place in range(0, len(pieces), 2):
        pieces[place], lost = to_ascii(pieces[place])
        dropped += lost
    if dropped:
        message = f"{list(dict.fromkeys(dropped))} of {text!r} cannot be written in ASCII"
        if strict:
            raise ValueError(message)
        warnings.warn(f"left out: {message}", stacklevel=7)
    return "".join(pieces)


def _apply_rules(text: str) -> str:
    for _, pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    return _tidy(text.lower())


def _tidy(text: str) -> str:
    """Single spaces, none before punctuation or inside parentheses."""
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"\s+([,.;:!?)])", r"\1", text)
    text = re.sub(r"\(\s+", "(", text)
    return re.sub(r"\(\)\s?|,(?=[,.;:!?])", "", text).strip()


def punctuate(text: str, mark: str = ".") -> str:
    """The text with a mark if it ends in no punctuation: "Hi" -> "Hi."; models stop better after one."""
    text = text.rstrip()
    return text if not text or text.rstrip(_CLOSERS)[-1:] in ".!?;:,-" and text[-1] != "}" else text + mark


# Long text

_SENTENCE = re.compile(r"[.!?]+[\"')\]]*(?=\s)|\n\s*\n")
_CLAUSE = re.compile(r"[,;:)](?=\s)|\s-{1,2}(?=\s)")
TAIL = 16  # characters that tell
# Full stops that end no sentence: of titles and other short words, initials, and numbers of lists.
_NO_END = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Mt|Ft|Gen|Col|Capt|Lt|Sgt|Rev|Hon|Sen|Rep|Gov|Pres|Messrs|No|Nos|pp?|vol|fig|vs|"
    r"e\.g|i\.e|approx|cf|ca|[A-Z])|(?:^|\s)\d{1,2})\.$",
    re.IGNORECASE,
)


def split_sentences(text: str, limit: int = 200) -> list[str]:
    """The sentences of a text, parted further where one is longer than `limit` characters.

    Such a sentence is cut at the last clause, else the last word that fits; only a word longer than the limit is cut
    inside. ARPAbet in braces counts as one word. Chunks hold all words in their order, none is empty.
    """
    if limit < 1:
        raise ValueError(f"the limit must be at least one character, got {limit}")
    chunks: list[str] = []
    for sentence in _sentences(text):
        while len(sentence) > limit:
            cut = _cut(sentence, limit)
            chunks.append(sentence[:cut].rstrip())
            sentence = sentence[cut:].lstrip()
        if sentence:
            chunks.append(sentence)
    return chunks


def _sentences(text: str) -> list[str]:
    found, start = [], 0
    for match in _SENTENCE.finditer(text):
        here = text[max(start, match.end() - TAIL) : match.end()]
        following = text[match.end() :].lstrip()[:1]
        if match[0] == "." and (_NO_END.search(here) or following.islower() and re.search(r"\b\w{1,4}\.$", here)):
            continue
        found.append(" ".join(text[start : match.end()].split()))
        start = match.end()
    found.append(" ".join(text[start:].split()))
    return [sentence for sentence in found if sentence]


def _cut(sentence: str, limit: int) -> int:
    """Where to part a sentence that is too long: at most `limit`, at least 1."""
    blocked = [range(m.start() + 1, m.end()) for m in PHONES.finditer(sentence) if is_phones(m[1])]

    def allowed(place: int) -> bool:
        return 0 < place <= limit and not any(place in span for span in blocked)

    for pattern in (_CLAUSE, re.compile(r"\s+")):
        places = [match.end() for match in pattern.finditer(sentence[: limit + 2])]
        if pattern is not _CLAUSE:
            places = [match.start() for match in pattern.finditer(sentence[: limit + 2])]
        places = [place for place in places if allowed(place)]
        # A clause of a few letters is no place to stop: the rest would be as long as before.
        if pattern is _CLAUSE:
            places = [place for place in places if place >= limit // 4]
        if places:
            return places[-1]
    first = next((span for span in blocked if limit in span), None)
    if first is not None and first.start > 1:
        return first.start - 1
    return first.stop if first is not None else limit
