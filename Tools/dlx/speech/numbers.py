"""Numbers in English words, the American way (no "and"): cardinals, ordinals, decimals, years, digit strings."""

from __future__ import annotations

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
SCALES = (
    " thousand million billion trillion quadrillion quintillion sextillion septillion octillion nonillion decillion"
).split(" ")
LIMIT = 1000 ** len(SCALES)  # numbers from here on are read digit by digit
IRREGULAR = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth",
    "twelve": "twelfth",
}  # fmt: skip


def cardinal(number: int) -> str:
    """1250 -> "one thousand two hundred fifty"; a negative number begins with "minus"."""
    if number < 0:
        return "minus " + cardinal(-number)
    if number >= LIMIT:
        return digits(str(number))
    if number < 1000:
        return _below_thousand(number)
    groups = []
    for scale in SCALES:
        number, group = divmod(number, 1000)
        if group:
            groups.append(f"{_below_thousand(group)} {scale}".strip())
        if not number:
            break
    return " ".join(reversed(groups))


def _below_thousand(number: int) -> str:
    if number < 20:
        return ONES[number]
    if number < 100:
        tens, one = divmod(number, 10)
        return TENS[tens] + (f"-{ONES[one]}" if one else "")
    hundreds, rest = divmod(number, 100)
    return f"{ONES[hundreds]} hundred" + (f" {_below_thousand(rest)}" if rest else "")


def ordinal(number: int) -> str:
    """21 -> "twenty-first"."""
    words = cardinal(number)
    cut = max(words.rfind(" "), words.rfind("-")) + 1
    head, last = words[:cut], words[cut:]
    if last in IRREGULAR:
        return head + IRREGULAR[last]
    return head + (last[:-1] + "ieth" if last.endswith("y") else last + "th")


def digits(text: str, zero: str = "zero") -> str:
    """ "405" -> "four zero five"; what is not a digit parts the groups: "555-12" -> "five five five, one two"."""
    groups = "".join(c if c.isdigit() else " " for c in text).split()
    return ", ".join(" ".join(zero if c == "0" else ONES[int(c)] for c in group) for group in groups)


def decimal(whole: str, fraction: str) -> str:
    """ "3", "14" -> "three point one four"; an empty whole part is not said."""
    head = cardinal(int(whole)) + " " if whole else ""
    return f"{head}point {digits(fraction)}"


def year(number: int) -> str:
    """1984 -> "nineteen eighty-four", 1905 -> "nineteen oh five", 2005 -> "two thousand five"; for 1000 to 9999."""
    century, rest = divmod(number, 100)
    if century % 10 == 0 and rest < 10:
        return cardinal(number)
    if rest == 0:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} " + (f"oh {ONES[rest]}" if rest < 10 else cardinal(rest))


def decade(number: int) -> str:
    """1990 -> "nineteen nineties", 1900 -> "nineteen hundreds", 2000 -> "two thousands", 90 -> "nineties"."""
    words = year(number) if number >= 1000 else cardinal(number)
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


# Denominators with a word of their own; others are ordinals.
_PARTS = {2: ("half", "halves"), 4: ("quarter", "quarters")}


def fraction(numerator: int, denominator: int) -> str:
    """1/2 -> "one half", 3/4 -> "three quarters", 2/3 -> "two thirds"; large denominators: "three over fifty-two"."""
    if denominator < 2 or denominator > 20 and denominator not in (100, 1000):
        return f"{cardinal(numerator)} over {cardinal(denominator)}"
    one, many = _PARTS.get(denominator) or (ordinal(denominator), ordinal(denominator) + "s")
    return f"{cardinal(numerator)} {one if numerator == 1 else many}"


def roman(text: str) -> int | None:
    """The value of a well-formed Roman numeral in capitals, else None: "XIV" -> 14, "IIII" -> None."""
    values = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
    total = 0
    for here, following in zip(text, text[1:] + " ", strict=False):
        if here not in values:
            return None
        value = values[here]
        total += -value if values.get(following, 0) > value else value
    return total if text and _to_roman(total) == text else None


def _to_roman(number: int) -> str:
    steps = (
        (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"),
        (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
    )  # fmt: skip
    found = ""
    for value, letters in steps:
        count, number = divmod(number, value)
        found += letters * count
    return found
