"""What a text says about how it is to be said: emphasis of words and pauses.

I *really* mean it.            "really" lasts 1.4 times as long
I *really:2* mean it.          twice as long; below 1: shorter
Wait [500ms] for it. [1.2s]    silence after the word before it
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from dlx.speech.frontend import FrontEnd
from dlx.speech.symbols import PHONES, UnpronounceableText
from dlx.speech.text import punctuate, split_sentences

EMPHASIS = 1.4
STRONGEST = 5.0  # a factor above it is a slip of the pen
LONGEST = 10.0  # seconds of a pause
_MARK = re.compile(
    r"\*(?P<words>[^*\s][^*]*?)(?::(?P<factor>\d+(?:\.\d+)?))?\*|\[(?P<time>\d+(?:\.\d+)?)(?P<unit>ms|s)\]"
)


@dataclass(frozen=True)
class Piece:
    """A part of a text that is said in one go: symbols, and for each its emphasis and seconds of pause after it."""

    text: str
    symbols: list[int]
    emphasis: list[float]
    pauses: list[float]


def pieces(front_end: FrontEnd, text: str, limit: int = 200, strict: bool = False, lead: bool = True) -> list[Piece]:
    """The pieces of a text of about at most `limit` characters as they are read, in their order.

    Each begins with a space if `lead`. ValueError for marks out of range and where nothing can be said.
    """
    symbols = front_end.symbols.symbols
    space = [symbols.index(" ")] if lead and " " in symbols else []
    found: list[Piece] = []
    if not _MARK.search(text):
        for part in front_end.chunks(text, limit, strict):
            numbers = space + front_end.symbols.encode(part, strict)
            found.append(Piece(part, numbers, [1.0] * len(numbers), [0.0] * len(numbers)))
        return found
    waiting = 0.0  # a pause with nothing before it in its own part
    for part in _parted(text, limit):
        piece, before = _marked(front_end, part, strict, space)
        waiting += before
        if found and waiting:
            found[-1].pauses[-1] += waiting
            waiting = 0.0
        if piece is not None:
            piece.pauses[0] += waiting
            found, waiting = [*found, piece], 0.0
    if not found:
        raise UnpronounceableText(f"nothing of {text[:80]!r} can be said")
    return found


def _parted(text: str, limit: int) -> list[str]:
    """Sentences and parts of them; no cut goes through a mark."""
    held = _MARK.sub(lambda match: match[0].replace(" ", "\x00"), text)
    return [part.replace("\x00", " ") for part in split_sentences(held, limit)]


def _segments(part: str) -> list[tuple[str, float, float]]:
    """(words, emphasis, seconds of pause after them) in their order."""
    found, place = [], 0
    for match in _MARK.finditer(part):
        found.append((part[place : match.start()], 1.0, 0.0))
        if match["time"]:
            seconds = float(match["time"]) * (0.001 if match["unit"] == "ms" else 1)
            if seconds > LONGEST:
                raise ValueError(f"{match[0]}: a pause is at most {LONGEST:g} s")
            found.append(("", 1.0, seconds))
        else:
            factor = float(match["factor"] or EMPHASIS)
            if not 1 / STRONGEST <= factor <= STRONGEST:
                raise ValueError(f"{match[0]}: an emphasis lies between {1 / STRONGEST:g} and {STRONGEST:g}")
            found.append((match["words"], factor, 0.0))
        place = match.end()
    return [*found, (part[place:], 1.0, 0.0)]


def _marked(front_end: FrontEnd, part: str, strict: bool, space: list[int]) -> tuple[Piece | None, float]:
    """A part as a piece, None where it holds no words; and the pause before its first word."""
    plain = replace(front_end, punctuation=False)
    text, emphasis, pauses = "", [], []
    before = 0.0
    apart = False
    for words, factor, seconds in _segments(part):
        cleaned = plain.clean(words, strict) if words.strip() else ""
        apart = apart or words[:1].isspace()
        if cleaned:
            if apart and text and cleaned[0] not in ",.;:!?)":
                text, emphasis, pauses = text + " ", [*emphasis, 1.0], [*pauses, 0.0]
            apart = words[-1:].isspace()
        else:
            apart = apart or bool(words)
        text += cleaned
        emphasis += [factor] * len(cleaned)
        pauses += [0.0] * len(cleaned)
        if seconds and pauses:
            pauses[-1] += seconds
        elif seconds:
            before += seconds
    if not any(character.isalnum() for character in text):
        return None, before + sum(pauses)
    if front_end.punctuation:
        marked = punctuate(text)
        emphasis += [1.0] * (len(marked) - len(text))
        pauses += [0.0] * (len(marked) - len(text))
        text = marked
    table = front_end.symbols
    if PHONES.search(text):
        raise ValueError(f"{part!r}: phones in braces and marks do not go together in one sentence")
    kept = [place for place, character in enumerate(text) if not table.unknown(character)]
    numbers = table.encode("".join(text[place] for place in kept), strict)
    piece = Piece(
        text,
        space + numbers,
        [1.0] * len(space) + [emphasis[place] for place in kept],
        [0.0] * len(space) + [pauses[place] for place in kept],
    )
    return piece, before
