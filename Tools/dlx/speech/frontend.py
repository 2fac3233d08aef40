"""From written text to the symbol numbers a model reads: cleaner, symbol table and options, stored with the model.

front_end = FrontEnd()
front_end.encode("Dr. Lee has 2 dogs")        # [41, 52, ...]
FrontEnd.from_dict(checkpoint["front_end"]).require_same(front_end)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .symbols import SymbolTable
from .text import CLEANERS, punctuate, split_sentences


@dataclass(frozen=True)
class FrontEnd:
    """`cleaner`: "english" (numbers and abbreviations spelled out) or "basic" (lower case; for any alphabet).

    `punctuation`: end every text with a full stop where it has no mark.
    """

    symbols: SymbolTable = field(default_factory=SymbolTable.english)
    cleaner: str = "english"
    punctuation: bool = True

    def __post_init__(self) -> None:
        if self.cleaner not in CLEANERS:
            raise ValueError(f"cleaner {self.cleaner!r} is none of {', '.join(CLEANERS)}")

    def to_dict(self) -> dict[str, Any]:
        return {"symbols": self.symbols.to_dict(), "cleaner": self.cleaner, "punctuation": self.punctuation}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FrontEnd:
        return cls(SymbolTable.from_dict(values["symbols"]), values["cleaner"], values["punctuation"])

    def require_same(self, other: FrontEnd, mine: str = "the model", theirs: str = "the data") -> None:
        """ValueError names what differs; the option of punctuation may."""
        self.symbols.require_same(other.symbols, mine, theirs)
        if self.cleaner != other.cleaner:
            raise ValueError(f"{mine} and {theirs} have different cleaners: {self.cleaner} and {other.cleaner}")

    def clean(self, text: str, strict: bool = False) -> str:
        """The text as it will be read."""
        cleaned = CLEANERS[self.cleaner](text, strict=strict)
        return punctuate(cleaned) if self.punctuation else cleaned

    def encode(self, text: str, strict: bool = False) -> list[int]:
        """Symbol numbers of a text as it is written; see `SymbolTable.encode` for what cannot be said."""
        return self.symbols.encode(self.clean(text, strict), strict)

    def chunks(self, text: str, limit: int = 200, strict: bool = False) -> list[str]:
        """A long text as cleaned pieces of at most `limit` characters, in their order, each with something to say.

        Sentences are found before they are cleaned, and parted after, when numbers have their full length. `limit`
        counts the mark that `punctuation` may add. ValueError when nothing of the text can be said.
        """
        room = limit - self.punctuation
        if room < 1:
            raise ValueError(f"the limit must be at least {1 + self.punctuation} characters, got {limit}")
        pieces = []
        for sentence in split_sentences(text, max(len(text), 1)):
            parts = split_sentences(CLEANERS[self.cleaner](sentence, strict=strict), room)
            if self.punctuation and parts:  # a comma where the sentence goes on
                parts = [*(punctuate(part, ",") for part in parts[:-1]), punctuate(parts[-1])]
            pieces += parts
        said = [piece for piece in pieces if any(c.isalnum() for c in piece)]
        if not said:
            self.symbols.encode(text[:80])  # which says why
        return said
