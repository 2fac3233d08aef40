"""Text of other alphabets in ASCII letters, as far as a small table and Unicode's decompositions go.

"naïve café" -> "naive cafe", "Straße" -> "Strasse", "Москва" -> "Moskva". What has no counterpart (Chinese, emoji) is
left out and reported.
"""

from __future__ import annotations

import unicodedata

_LETTERS = {
    "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "ß": "ss", "ẞ": "SS", "ł": "l", "Ł": "L",
    "đ": "d", "Đ": "D", "ð": "d", "Ð": "D", "þ": "th", "Þ": "Th", "ı": "i", "ħ": "h", "Ħ": "H", "ŋ": "ng", "Ŋ": "NG",
    "ə": "e", "ĸ": "k", "ŧ": "t", "Ŧ": "T", "ƒ": "f",
}  # fmt: skip
_MARKS = {
    "‘": "'", "’": "'", "‚": "'", "‛": "'", "′": "'", "´": "'", "`": "'", "ʼ": "'", "“": '"', "”": '"', "„": '"',
    "‟": '"', "″": '"', "«": '"', "»": '"', "‹": "'", "›": "'", "‐": "-", "‑": "-", "‒": "-", "–": "-", "—": " - ",
    "―": " - ", "−": "-", "…": "...", "¿": "", "¡": "", "•": ", ", "·": " ", "×": " times ", "÷": " divided by ",
    "±": " plus or minus ", "≤": " less than or equal to ", "≥": " greater than or equal to ", "≈": " about ",
    "≠": " not equal to ", "§": " section ", "¶": "", "№": " No. ", "™": "", "®": "", "©": "", "°": "°", "µ": "µ",
    "μ": "µ", "²": "^2", "³": "^3", "⁄": "/", "℃": "°C", "℉": "°F", "→": " to ",
    "¢": "¢", "£": "£", "¥": "¥", "€": "€", "₹": "₹", "\u00ad": "", "\u200b": "", "\ufeff": "",
}  # fmt: skip
_FRACTIONS = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅛": "1/8", "⅜": "3/8",
              "⅝": "5/8", "⅞": "7/8"}  # fmt: skip
_CYRILLIC = dict(
    zip(
        "абвгдеёжзийклмнопрстуфхцчшщъыьэюяіїєґ",
        "a b v g d e yo zh z i y k l m n o p r s t u f kh ts ch sh shch  y  e yu ya i yi ye g".split(" "),
        strict=True,
    )
)
_GREEK = dict(
    zip(
        "αβγδεζηθικλνξοπρςστυφχψω",
        "a v g d e z i th i k l n x o p r s s t y f ch ps o".split(),
        strict=True,
    )
)
_TABLE = {**_LETTERS, **_MARKS, **_CYRILLIC, **_GREEK}
_TABLE.update({letter.upper(): text.capitalize() for letter, text in (_CYRILLIC | _GREEK).items() if letter != "ς"})


def to_ascii(text: str) -> tuple[str, list[str]]:
    """The text, and the characters that were left out, each once, in their order.

    Besides ASCII the text may hold the signs that number rules read: ° µ ¢ £ ¥ € ₹. Control characters are spaces.
    """
    if text.isascii() and text.isprintable():
        return text, []
    pieces: list[str] = []
    dropped: dict[str, None] = {}
    for character in unicodedata.normalize("NFC", text):
        found = _one(character, pieces[-1][-1:] if pieces else "")
        if found is None:
            dropped[character] = None
            continue
        if found:
            pieces.append(found)
    return "".join(pieces), list(dropped)


def _one(character: str, before: str) -> str | None:
    if character in _FRACTIONS:
        return (" " if before.isdigit() else "") + _FRACTIONS[character]
    if character in _TABLE:
        return _TABLE[character]
    if character.isascii():
        return character if character.isprintable() else " "
    if character.isspace():
        return " "
    kind = unicodedata.category(character)
    if kind in ("Mn", "Me", "Cf"):  # accents left over, joiners, marks of direction
        return ""
    plain = [_TABLE.get(c, c) for c in unicodedata.normalize("NFKD", character) if unicodedata.category(c) != "Mn"]
    found = "".join(plain)
    return found if found and found.isascii() and found.isprintable() else None
