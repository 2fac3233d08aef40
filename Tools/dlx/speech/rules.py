"""English text into words, rule by rule. `text.normalize` applies `RULES` in this order to ASCII text.

A rule is a pattern and what to put for a match. Later rules see what earlier ones made, so the special (an amount of
money) comes before the general (a number).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from . import abbreviations as words
from . import numbers

Rule = tuple[str, re.Pattern[str], "str | Callable[[re.Match[str]], str]"]

NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
MINUS = r"(?:(?<![\w.)])-)?"
MONTH = r"(?:" + "|".join(sorted(words.MONTH_WORDS, key=len, reverse=True)) + r")"
YEARS = r"(?:1[0-9]|20)\d\d"


def _any(names: dict[str, object] | list[str], ignore_case: bool = False) -> str:
    found = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return f"(?i:{found})" if ignore_case else f"(?:{found})"


def say_number(text: str) -> str:
    """Cardinals and decimals, with thousands' commas and a sign: "-1,250.5". Leading zeros are said digit by digit."""
    if text.startswith("-"):
        return "minus " + say_number(text[1:])
    whole, _, fraction = text.replace(",", "").partition(".")
    if fraction:
        return numbers.decimal(whole, fraction)
    round_number = whole.endswith("000")
    if len(whole) > 1 and whole.startswith("0") or len(whole) >= 10 and not round_number and "," not in text:
        return numbers.digits(whole)
    return numbers.cardinal(int(whole))


# Addresses


def _address(match: re.Match[str]) -> str:
    text = re.sub(r"^(https?|ftp)://", "", match[0], flags=re.IGNORECASE)
    tail = re.search(r"[.,;:!?)/]*$", text).group()
    text = text[: len(text) - len(tail)]
    text = re.sub(r"^www\.", "w w w.", text, flags=re.IGNORECASE)
    signs = {".": " dot ", "/": " slash ", "@": " at ", "-": " dash ", "_": " underscore ", ":": " colon ", "?": " ",
             "=": " equals ", "&": " and ", "#": " hash ", "%": " percent ", "+": " plus ", "~": " tilde "}  # fmt: skip
    return "".join(signs.get(c, c) for c in text) + tail.replace("/", "")


# Money


def _money(match: re.Match[str]) -> str:
    minus, sign, amount, magnitude = match["minus"], match["sign"], match["amount"], match["magnitude"]
    one, many, small_one, small_many = words.CURRENCIES[sign]
    head = "minus " if minus else ""
    if magnitude:
        return f"{head}{say_number(amount)} {words.MAGNITUDES[magnitude]} {many}"
    whole, _, fraction = amount.replace(",", "").partition(".")
    if len(fraction) not in (0, 2):
        return f"{head}{say_number(amount)} {many}"
    large, small = int(whole or 0), int(fraction or 0)
    parts = [f"{numbers.cardinal(large)} {one if large == 1 else many}"] if large or not small else []
    parts += [f"{numbers.cardinal(small)} {small_one if small == 1 else small_many}"] if small else []
    return head + " and ".join(parts)


# Dates and times


def _day(text: str) -> str:
    return numbers.ordinal(int(re.match(r"\d+", text).group()))


def _year(text: str) -> str:
    return numbers.year(int(text)) if len(text) == 4 else numbers.cardinal(int(text))


def _iso_date(match: re.Match[str]) -> str:
    year, month, day = match.groups()
    if not (1 <= int(month) <= 12 and 1 <= int(day) <= 31):
        return numbers.digits(match[0])
    return f"{words.MONTHS[int(month) - 1]} {_day(day)}, {_year(year)}"


def _slash_date(match: re.Match[str]) -> str:
    """Month first, as in the United States, unless only the other order makes a date."""
    first, second, year = int(match[1]), int(match[2]), match[3]
    month, day = (first, second) if first <= 12 else (second, first)
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return " slash ".join(numbers.cardinal(int(part)) for part in match.groups())
    if len(year) == 2:
        year = ("20" if int(year) < 50 else "19") + year
    return f"{words.MONTHS[month - 1]} {_day(str(day))}, {_year(year)}"


def _month_day(match: re.Match[str]) -> str:
    year = f", {_year(match['year'])}" if match["year"] else ""
    return f"{words.MONTH_WORDS[match['month'].lower()]} {_day(match['day'])}{year}"


def _day_month(match: re.Match[str]) -> str:
    year = f", {_year(match['year'])}" if match["year"] else ""
    return f"the {_day(match['day'])} of {words.MONTH_WORDS[match['month'].lower()]}{year}"


def _decade(match: re.Match[str]) -> str:
    return numbers.decade(int(match[1]))


def _time(match: re.Match[str]) -> str:
    hour, minute, second, half = int(match["hour"]), match["minute"], match["second"], match["half"]
    if hour > 24 or int(minute or 0) > 59 or int(second or 0) > 59:
        return match[0].replace(":", " to ")
    said = [numbers.cardinal(hour)]
    if minute and int(minute):
        said.append(("oh " if int(minute) < 10 else "") + numbers.cardinal(int(minute)))
    elif minute and not half and not second:
        said.append("hundred" if hour > 12 or hour == 0 else "o'clock")
    if second:
        said.append(f"and {numbers.cardinal(int(second))} second{'' if int(second) == 1 else 's'}")
    if not half:
        return " ".join(said)
    # The full stop of "p.m." may end the sentence, too.
    ends = match[0].endswith(".") and re.match(r"\s*$|\s+[A-Z]", match.string[match.end() :])
    return " ".join(said) + f" {half.lower()} m" + ("." if ends else "")


# Numbers with something


def _phone(match: re.Match[str]) -> str:
    plus = "plus " if match[0].startswith("+") else ""
    return plus + numbers.digits(match[0])


def _unit(match: re.Match[str]) -> str:
    amount, unit, power, per = match["amount"], match["unit"], match["power"], match["per"]
    one, many = words.UNITS[unit]
    said = say_number(amount)
    name = one if said in ("one", "minus one") else many
    if power:
        name = {"2": "square ", "3": "cubic "}[power] + name
    if per:
        name += " per " + (words.UNITS[per][0] if per in words.UNITS else per)
    return f"{said} {name}"


def _mixed(match: re.Match[str]) -> str:
    whole, numerator, denominator = (int(part) for part in match.groups())
    part = numbers.fraction(numerator, denominator)
    part = {"one half": "a half", "one quarter": "a quarter"}.get(part, part)
    return f"{numbers.cardinal(whole)} and {part}"


def _fraction(match: re.Match[str]) -> str:
    numerator, denominator = int(match[1]), int(match[2])
    if numerator >= denominator:
        return f"{numbers.cardinal(numerator)} slash {numbers.cardinal(denominator)}"
    return numbers.fraction(numerator, denominator)


def _range(match: re.Match[str]) -> str:
    def say(text: str) -> str:
        return numbers.year(int(text)) if re.fullmatch(YEARS, text) and int(text) >= 1100 else say_number(text)

    return f"{say(match[1])} to {say(match[2])}"


def _version(match: re.Match[str]) -> str:
    return " " + " point ".join(numbers.cardinal(int(part)) for part in match[0].split("."))


def _plain_year(match: re.Match[str]) -> str:
    return numbers.year(int(match[0]))


# Words


def _trailing(match: re.Match[str]) -> str:
    ends = re.match(r"\s*$|\s+[A-Z]", match.string[match.end() :])
    return words.TRAILING[match[1].lower()] + ("." if ends else "")


def _street(match: re.Match[str]) -> str:
    """After a name: "Main St. is long", but "the road to St. Louis" where a name follows."""
    before = match.string[: match.start()].split()[-1]
    if not before[0].isupper():
        return match[0]
    return "street" + ("." if not match.string[match.end() :].strip() else "")


def _acronym_dots(match: re.Match[str]) -> str:
    ends = not match.string[match.end() :].strip()
    return " ".join(re.findall("[A-Za-z]", match[0])).lower() + ("." if ends else "")


def _roman(match: re.Match[str]) -> str:
    value = numbers.roman(match[2])
    return match[0] if value is None else f"{match[1]} {numbers.cardinal(value)}"


def _regnal(match: re.Match[str]) -> str:
    value = numbers.roman(match[2])
    return match[0] if value is None else f"{match[1]} the {numbers.ordinal(value)}"


def _capitals(match: re.Match[str]) -> str:
    word, plural = match[1], match[2]
    if word in words.SAID_AS_WORDS or word in words.ORDINARY:
        return match[0]
    consonants_only = not re.search("[AEIOUY]", word)
    vowels_only = not re.search("[^AEIOU]", word)
    shouting = sum(map(str.isupper, match.string)) > 2 * sum(map(str.islower, match.string))
    if consonants_only or vowels_only or len(word) <= 3 and not shouting:
        return " ".join(word) + ("'s" if plural else "")
    return match[0]


def _rule(name: str, pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> Rule:
    return name, re.compile(pattern), replacement


SIGNS = {
    "&": " and ", "@": " at ", "+": " plus ", "=": " equals ", "%": " percent ", "#": " hash ", "<": " less than ",
    ">": " greater than ", "~": " about ", "^": " to the power of ", "°": " degrees ", "µ": " micro ", "$": " dollars ",
    "£": " pounds ", "€": " euros ", "¥": " yen ", "₹": " rupees ", "¢": " cents ", "*": " ", "_": " ", "|": " ",
    "\\": " backslash ", "/": " slash ", '"': "", "[": "(", "]": ")", "{": "(", "}": ")", "`": "'",
}  # fmt: skip
_PERIODS = r"(?P<half>[aApP])\.?[mM]\b\.?"
_CLOSE = rf"(?P<minus>{MINUS})(?P<sign>[$£€¥₹])\s?(?P<amount>{NUMBER})"
_MAGNITUDE = r"(?:\s?(?P<magnitude>thousand|[mb]illion|trillion|[kKMBT]|[mbt]n|b|m)(?![\w]))?"
_PER = rf"(?:/(?P<per>{_any(words.UNITS)}))?"
_YEAR_AFTER = r"(?:,?\s+(?P<year>1\d{3}|20\d\d)(?![\d,.]?\d))?"
_DOMAINS = r"(?:com|org|net|edu|gov|io|info|de|uk|fr|eu|ch|at|us|ca|au)"

RULES: tuple[Rule, ...] = (
    _rule("address", r"(?i)\b(?:https?|ftp)://\S+", _address),
    _rule("e-mail", r"(?i)\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+", _address),
    _rule("domain", rf"(?i)\b(?:www\.)?(?:[a-z0-9-]+\.)+{_DOMAINS}\b(?:/[^\s,;)]*)?", _address),
    _rule("missing space", r"(?<=[a-z])\.(?=[A-Z][a-z])", ". "),
    _rule("phrase", rf"(?<![\w.]){_any(words.PHRASES, True)}", lambda m: words.PHRASES[m[0].lower()]),
    _rule("money", _CLOSE + _MAGNITUDE, _money),
    _rule("cents", r"\b(\d+)\s?¢", lambda m: f"{say_number(m[1])} cent{'' if m[1] == '1' else 's'}"),
    _rule("ISO date", r"(?<![\d-])(\d{4})-(\d\d)-(\d\d)(?![\d-])", _iso_date),
    _rule("date with slashes", r"(?<![\d/])(\d{1,2})/(\d{1,2})/(\d{4}|\d\d)(?![\d/])", _slash_date),
    _rule("month and day", rf"\b(?P<month>(?i:{MONTH}))\b\.?\s+(?P<day>[0-3]?\d)(?:st|nd|rd|th)?(?![\d:.,/%-]*\d)\b"
          + _YEAR_AFTER, _month_day),
    _rule("day and month", rf"\b(?:the\s+)?(?P<day>[0-3]?\d)(?:st|nd|rd|th)?\s+(?:of\s+)?(?P<month>(?i:{MONTH}))\b\.?"
          + _YEAR_AFTER, _day_month),
    _rule("month and year", rf"\b(?P<m>(?i:{MONTH}))\b\.?,?\s+(?P<y>{YEARS})(?![\d,.]?\d)",
          lambda m: f"{words.MONTH_WORDS[m['m'].lower()]} {_year(m['y'])}"),
    _rule("short month", r"\b(?i:jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec)\.(?=\s+\w)",
          lambda m: words.MONTH_WORDS[m[0][:-1].lower()]),
    _rule("short day", rf"\b{_any(words.DAYS, True)}\.(?=,?\s+\w)", lambda m: words.DAYS[m[0][:-1].lower()]),
    _rule("decade", r"(?<![\w,.])'?(\d{3}0|[2-9]0)'?s\b", _decade),
    _rule("clock", rf"\b(?P<hour>\d?\d):(?P<minute>\d\d)(?::(?P<second>\d\d))?(?!\d)(?:\s?{_PERIODS})?", _time),
    _rule("hour", rf"\b(?P<hour>\d?\d)(?P<minute>)(?P<second>)\s?{_PERIODS}", _time),
    _rule("always", r"\b24/7\b", "twenty-four seven"),
    _rule("phone", r"(?<![\w.-])(?:\+\d{1,3}[ .-]?)?(?:\(\d{3}\)\s?|\d{3}[ .-])\d{3}[.-]\d{4}(?![\w-])", _phone),
    _rule("international phone", r"\+\d{1,3}(?:[ -]?\d{2,5}){2,5}(?![\w-])", _phone),
    _rule("short phone", r"(?<![\w.-])\d{3}-\d{4}(?![\w-])", _phone),
    _rule("digit groups", r"(?<![\w.-])\d+(?:-\d+){2,}(?![\w-])", _phone),
    _rule("reference", rf"\b{_any(words.REFERENCES, True)[:-1]})\.\s?(?=\d)",
          lambda m: words.REFERENCES[m[0].rstrip()[:-1].lower()] + " "),
    _rule("number sign", r"#\s?(?=\d)", "number "),
    _rule("dimensions", r"(?<=\d)\s?[x×]\s?(?=\d)", " by "),
    _rule("range of percents", r"\b(\d[\d.]*)\s?%?\s?-\s?(\d[\d.]*)\s?%", lambda m: f"{m[1]} to {m[2]} percent"),
    _rule("percent", rf"(?P<amount>{MINUS}(?:{NUMBER}))\s?%", lambda m: f"{say_number(m['amount'])} percent"),
    _rule("range", r"(?<![\w.,-])(\d{1,4}(?:\.\d+)?)-(\d{1,4}(?:\.\d+)?)(?![\w-]|[.,]\d)", _range),
    _rule("unit", rf"(?<![\w.])(?P<amount>{MINUS}(?:{NUMBER}))[\s-]?(?P<unit>{_any(words.UNITS)})"
          r"(?:\^?(?P<power>[23]))?" + _PER + r"(?![\w/^])", _unit),
    _rule("ordinal", r"\b(\d{1,3}(?:,\d{3})+|\d+)(?:st|nd|rd|th)\b",
          lambda m: numbers.ordinal(int(m[1].replace(",", "")))),
    _rule("mixed fraction", r"(?<![\w./])(\d+)\s+(\d{1,2})/(\d{1,2})(?![\w/])", _mixed),
    _rule("fraction", r"(?<![\w./])(\d{1,4})/(\d{1,4})(?![\w/]|\.\d)", _fraction),
    _rule("version", r"(?<![\d.])\d+(?:\.\d+){2,}(?![\w]|\.\d)", _version),
    _rule("old year", r"(?<=\b[iI]n )10\d\d(?![\w,]|\.\d)|(?<=\b[yY]ear )10\d\d(?![\w,]|\.\d)", _plain_year),
    _rule("year", r"(?<![\w.,-])(?:1[1-9]|20)\d\d(?![\w]|[,.]\d)", _plain_year),
    _rule("regnal number", rf"\b({_any(words.REGNAL)})\s+([IVX]{{2,5}}|[VX])\b(?!\.[A-Za-z])", _regnal),
    _rule("roman number", rf"\b({_any(words.BEFORE_ROMAN, True)})\s+([IVXLC]{{2,7}}|[VX]|I(?=[,.;:)]|\s*$|\sof\b))"
          r"(?![\w'])", _roman),
    _rule("letters beside digits", r"(?<=[A-Za-z])(?=\d)|(?<=\d)(?=[A-Za-z])", " "),
    _rule("joined digits", r"(?<=[A-Za-z])-(?=\d)", " "),
    _rule("number", rf"{MINUS}(?:{NUMBER})",
          lambda m: " " * m.string[m.start() - 1 : m.start()].isalpha() + say_number(m[0])),
    _rule("title", rf"\b{_any(words.TITLES, True)[:-1]})(?:\.(?=\s*\S)|(?=\s+[A-Z]))",
          lambda m: words.TITLES[m[0].rstrip(".").lower()]),
    _rule("street", r"(?<=[a-z]\s)St\.(?!\s+[A-Z])", _street),
    _rule("before a name", rf"\b{_any(words.BEFORE_NAMES, True)[:-1]})\.(?=\s+[A-Z])",
          lambda m: words.BEFORE_NAMES[m[0][:-1].lower()]),
    _rule("trailing", rf"\b({_any(words.TRAILING, True)})\.", _trailing),
    _rule("abbreviation", rf"\b{_any(words.ANYWHERE, True)[:-1]})\.(?=\s*\S)",
          lambda m: words.ANYWHERE[m[0][:-1].lower()]),
    _rule("versus", r"\bvs\b", "versus"),
    _rule("doctorate", r"\bPh\.?D\b\.?", "p h d"),
    _rule("dotted letters", r"\b(?:[A-Za-z]\.){2,}(?![a-z]{2})(?:[A-Za-z]\b)?", _acronym_dots),
    _rule("capitals", r"\b([A-Z]{2,5})(s?)\b(?!')", _capitals),
    _rule("dot in a word", r"(?<=[A-Za-z0-9])\.(?=[a-z0-9])", " dot "),
    _rule("and or", r"\band/or\b", "and or"),
    _rule("w/o", r"\bw/o\b", "without"),
    _rule("sign", "[" + re.escape("".join(SIGNS)) + "]", lambda m: SIGNS[m[0]]),
)  # fmt: skip
