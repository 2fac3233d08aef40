"""Finding things by name, with an error that helps."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def lookup(known: Mapping[str, T], name: str, kind: str) -> T:
    """``known[name]``; a ValueError for an unknown name says what ``kind`` of thing it is and suggests the nearest."""
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, 3, 0.5)
    advice = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known) or 'none'}"
    raise ValueError(f"unknown {kind} {name!r}; {advice}")
