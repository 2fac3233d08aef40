"""Word lists of the English rules: abbreviations, units, acronyms, names that take Roman numerals."""

from __future__ import annotations

# Before a name; the full stop belongs to them. Those of the second table only when a capital follows.
TITLES = {
    "mr": "mister", "mrs": "missus", "ms": "miz", "dr": "doctor", "prof": "professor", "messrs": "messers",
}  # fmt: skip
BEFORE_NAMES = {
    "st": "saint", "mt": "mount", "ft": "fort", "gen": "general", "col": "colonel", "maj": "major", "capt": "captain",
    "lt": "lieutenant", "sgt": "sergeant", "cpl": "corporal", "adm": "admiral", "rev": "reverend", "hon": "honorable",
    "sen": "senator", "rep": "representative", "gov": "governor", "pres": "president", "supt": "superintendent",
}  # fmt: skip
# After a name or at the end of a list; their full stop may end the sentence, too.
TRAILING = {
    "jr": "junior", "sr": "senior", "co": "company", "ltd": "limited", "inc": "incorporated", "corp": "corporation",
    "bros": "brothers", "etc": "et cetera", "esq": "esquire", "ave": "avenue", "blvd": "boulevard", "rd": "road",
    "st": "street", "dept": "department", "univ": "university", "assn": "association", "intl": "international",
}  # fmt: skip
ANYWHERE = {"vs": "versus", "approx": "approximately", "est": "established", "misc": "miscellaneous", "viz": "namely"}
PHRASES = {"e.g.": "for example", "i.e.": "that is", "cf.": "compare", "a.k.a.": "also known as", "ca.": "about"}
# Only before a number.
REFERENCES = {
    "no": "number", "nos": "numbers", "nr": "number", "p": "page", "pp": "pages", "vol": "volume", "ch": "chapter",
    "chap": "chapter", "fig": "figure", "figs": "figures", "sec": "section", "eq": "equation", "art": "article",
    "par": "paragraph", "ed": "edition", "apt": "apartment", "rm": "room",
}  # fmt: skip

MONTHS = ("january february march april may june july august september october november december").split()
MONTH_WORDS = {month: month for month in MONTHS} | {
    short: next(month for month in MONTHS if month.startswith(short[:3]))
    for short in "jan feb mar apr jun jul aug sep sept oct nov dec".split()
}
DAYS = {
    "mon": "monday", "tue": "tuesday", "tues": "tuesday", "wed": "wednesday", "thu": "thursday", "thur": "thursday",
    "thurs": "thursday", "fri": "friday", "sat": "saturday", "sun": "sunday",
}  # fmt: skip

# Unit: singular, plural. Capitals matter.
UNITS = {
    "km": ("kilometer", "kilometers"), "m": ("meter", "meters"), "cm": ("centimeter", "centimeters"),
    "mm": ("millimeter", "millimeters"), "µm": ("micrometer", "micrometers"), "nm": ("nanometer", "nanometers"),
    "mi": ("mile", "miles"), "ft": ("foot", "feet"), "yd": ("yard", "yards"), "kg": ("kilogram", "kilograms"),
    "g": ("gram", "grams"), "mg": ("milligram", "milligrams"), "µg": ("microgram", "micrograms"),
    "lb": ("pound", "pounds"), "lbs": ("pound", "pounds"), "oz": ("ounce", "ounces"), "l": ("liter", "liters"),
    "L": ("liter", "liters"), "ml": ("milliliter", "milliliters"), "mL": ("milliliter", "milliliters"),
    "ha": ("hectare", "hectares"), "s": ("second", "seconds"), "sec": ("second", "seconds"),
    "secs": ("second", "seconds"), "ms": ("millisecond", "milliseconds"), "µs": ("microsecond", "microseconds"),
    "ns": ("nanosecond", "nanoseconds"), "min": ("minute", "minutes"), "mins": ("minute", "minutes"),
    "h": ("hour", "hours"), "hr": ("hour", "hours"), "hrs": ("hour", "hours"), "Hz": ("hertz", "hertz"),
    "kHz": ("kilohertz", "kilohertz"), "MHz": ("megahertz", "megahertz"), "GHz": ("gigahertz", "gigahertz"),
    "B": ("byte", "bytes"), "kB": ("kilobyte", "kilobytes"), "KB": ("kilobyte", "kilobytes"),
    "MB": ("megabyte", "megabytes"), "GB": ("gigabyte", "gigabytes"), "TB": ("terabyte", "terabytes"),
    "KiB": ("kibibyte", "kibibytes"), "MiB": ("mebibyte", "mebibytes"), "GiB": ("gibibyte", "gibibytes"),
    "W": ("watt", "watts"), "kW": ("kilowatt", "kilowatts"), "MW": ("megawatt", "megawatts"),
    "kWh": ("kilowatt hour", "kilowatt hours"), "V": ("volt", "volts"), "mA": ("milliampere", "milliamperes"),
    "mAh": ("milliampere hour", "milliampere hours"), "Pa": ("pascal", "pascals"), "hPa": ("hectopascal",
    "hectopascals"), "N": ("newton", "newtons"), "J": ("joule", "joules"), "kJ": ("kilojoule", "kilojoules"),
    "cal": ("calorie", "calories"), "kcal": ("kilocalorie", "kilocalories"), "dB": ("decibel", "decibels"),
    "px": ("pixel", "pixels"), "mph": ("mile per hour", "miles per hour"), "rpm": ("revolution per minute",
    "revolutions per minute"), "°C": ("degree celsius", "degrees celsius"), "°F": ("degree fahrenheit",
    "degrees fahrenheit"), "°": ("degree", "degrees"), "kbps": ("kilobit per second", "kilobits per second"),
    "Mbps": ("megabit per second", "megabits per second"), "Gbps": ("gigabit per second", "gigabits per second"),
}  # fmt: skip

# Sign: one, many, one hundredth, hundredths.
CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"), "£": ("pound", "pounds", "penny", "pence"),
    "€": ("euro", "euros", "cent", "cents"), "¥": ("yen", "yen", "sen", "sen"),
    "₹": ("rupee", "rupees", "paisa", "paise"),
}  # fmt: skip
MAGNITUDES = {
    "thousand": "thousand", "million": "million", "billion": "billion", "trillion": "trillion", "k": "thousand",
    "K": "thousand", "M": "million", "m": "million", "mn": "million", "bn": "billion", "B": "billion", "b": "billion",
    "tn": "trillion", "T": "trillion",
}  # fmt: skip

# Words of capitals that are said as words, and those that are ordinary words however they are written.
SAID_AS_WORDS = frozenset(
    "NASA NATO UNESCO UNICEF OPEC AIDS LASER RADAR SCUBA SONAR ROM RAM PIN SIM LAN WAN GIF JPEG SARS NAFTA ASCII BIOS "
    "CAD VAT COVID LED".split()
) - {"LED"}
ORDINARY = frozenset(
    "A I AM AN AS AT BE BY DO GO HE IF IN IS IT ME MY NO OF OH OK ON OR SO TO UP WE AD ALL AND ANY ARE ASK BAD BIG BUT "
    "BUY CAN DAY DID END FAR FEW FOR GET GOD GOT HAD HAS HER HIM HIS HOT HOW ITS JOB LET LOT LOW MAN MAY MEN NEW NOT "
    "NOW OFF OLD ONE OUR OUT OWN PUT RED RUN SAW SAY SEE SET SHE SIX SON TEN THE TOO TOP TRY TWO USE WAR WAS WAY WHO "
    "WHY WIN YES YET YOU".split()
)

BEFORE_ROMAN = (
    "act appendix article book chapter class figure grade level line mark part phase rocky section series stage step "
    "table title type version volume war"
).split()
REGNAL = (
    "Albert Alexander Alfonso Benedict Catherine Charles Christian Clement Edward Elizabeth Ferdinand Francis "
    "Frederick George Gregory Gustav Harald Henry Innocent Ivan James John Joseph Juan Leo Leopold Louis Ludwig Mary "
    "Maximilian Napoleon Nicholas Olaf Otto Paul Peter Philip Philippe Pius Pope Ramses Richard Robert Rudolf Urban "
    "Victor Wilhelm William"
).split()
