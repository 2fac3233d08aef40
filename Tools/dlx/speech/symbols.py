"""Symbols that a speech model reads, as configuration: stored in checkpoints, compared when one is loaded.

table = SymbolTable.english()
table.encode("turn {HH AH0 L OW1} on")     # ARPAbet in braces is one symbol per phone
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

VOWELS = "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW".split()
CONSONANTS = "B CH D DH F G HH JH K L M N NG P R S SH T TH V W Y Z ZH".split()
# A vowel without a stress, unstressed, with first and with second stress.
ARPABET = tuple(sorted([f"{vowel}{stress}" for vowel in VOWELS for stress in ("", 0, 1, 2)] + CONSONANTS))
PHONES = re.compile(r"\{([^{}]*)\}")
PUNCTUATION = "!'(),.:;? "
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class UnpronounceableText(ValueError):
    """Text of which nothing can be said with a table's symbols."""


def is_phones(text: str) -> bool:
    """Whether the inside of a pair of braces is ARPAbet."""
    words = text.split()
    return bool(words) and all(word in ARPABET for word in words)


@dataclass(frozen=True)
class SymbolTable:
    """Symbols in the order of a model's embedding. Symbol 0 pads and never stands for text.

    One character each, but ARPAbet phones, which begin with '@'. `silent` are the symbols that alone say nothing.
    """

    symbols: tuple[str, ...]
    name: str = "custom"
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.symbols) < 2:
            raise ValueError(f"a symbol table needs padding and a symbol, got {list(self.symbols)}")
        twice = sorted({symbol for symbol in self.symbols if self.symbols.count(symbol) > 1})
        if twice:
            raise ValueError(f"symbol table {self.name!r} holds symbols twice: {twice}")
        bad = [s for s in self.symbols if len(s) != 1 and not (s.startswith("@") and len(s) > 1)]
        if bad:
            raise ValueError(f"symbol table {self.name!r}: {bad} are neither one character nor '@' with a phone")
        object.__setattr__(self, "_ids", {symbol: number for number, symbol in enumerate(self.symbols)})

    @classmethod
    def english(cls) -> SymbolTable:
        """The 148 symbols of NVIDIA's and keithito's published Tacotron 2, in their order."""
        return cls(("_", "-", *PUNCTUATION, *LETTERS, *(f"@{phone}" for phone in ARPABET)), "english_basic")

    @classmethod
    def of_letters(cls, letters: Sequence[str], punctuation: str = PUNCTUATION + "-") -> SymbolTable:
        """A table for another alphabet, e.g. `of_letters("абв...")`."""
        return cls(("_", *punctuation, *letters), "custom")

    def __len__(self) -> int:
        return len(self.symbols)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "symbols": list(self.symbols)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SymbolTable:
        return cls(tuple(values["symbols"]), values.get("name", "custom"))

    def require_same(self, other: SymbolTable, mine: str = "the model", theirs: str = "the data") -> None:
        """ValueError names the first differing symbols, also of two tables of one size."""
        if self.symbols == other.symbols:
            return
        pairs = enumerate(zip(self.symbols, other.symbols, strict=False))
        different = [f"{number}: {a!r} and {b!r}" for number, (a, b) in pairs if a != b][:5]
        sizes = f"{len(self)} and {len(other)} symbols"
        raise ValueError(f"{mine} and {theirs} have different symbol tables ({sizes}; " + ", ".join(different) + ")")

    def unknown(self, text: str) -> list[str]:
        """Characters and phones of the text that the table lacks, each once, in their order."""
        return list(dict.fromkeys(symbol for symbol in self._split(text) if symbol not in self._ids))

    def encode(self, text: str, strict: bool = False) -> list[int]:
        """Symbol numbers. What the table lacks is left out with a warning that lists it, or refused if `strict`.

        UnpronounceableText, a ValueError, when no letter, digit or phone is left.
        """
        found = list(self._split(text))
        lacking = list(dict.fromkeys(symbol for symbol in found if symbol not in self._ids))
        if lacking and strict:
            raise ValueError(f"the symbol table {self.name!r} lacks {lacking} of {text!r}")
        kept = [symbol for symbol in found if symbol in self._ids and symbol != self.symbols[0]]
        if not any(len(symbol) > 1 or symbol.isalnum() for symbol in kept):
            raise UnpronounceableText(f"nothing of {text!r} can be said with the symbol table {self.name!r}")
        if lacking:
            warnings.warn(f"left out of {text!r}: {lacking}, which are not symbols", stacklevel=2)
        return [self._ids[symbol] for symbol in kept]

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of symbol numbers; phones come in braces, padding is left out. ValueError for other numbers."""
        pieces: list[str] = []
        phones: list[str] = []
        for number in (*numbers, 0):
            if not 0 <= number < len(self):
                raise ValueError(f"symbol number {number} is not within the {len(self)} of table {self.name!r}")
            symbol = self.symbols[number]
            if len(symbol) > 1:
                phones.append(symbol[1:])
                continue
            if phones:
                pieces.append("{" + " ".join(phones) + "}")
                phones = []
            pieces.append(symbol if number else "")
        return "".join(pieces)

    def _split(self, text: str) -> list[str]:
        found: list[str] = []
        rest = 0
        for match in PHONES.finditer(text):
            if is_phones(match[1]):
                found += [*text[rest : match.start()], *(f"@{phone}" for phone in match[1].split())]
                rest = match.end()
        return found + list(text[rest:])
