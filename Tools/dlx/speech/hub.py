"""What torch.hub entries of text-to-speech tasks share: texts in, symbols out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .frontend import FrontEnd


class TextUtils:
    """Texts in, symbols out, with the call of NVIDIA's hub."""

    def __init__(
        self, front_end: FrontEnd | None = None, device: str | torch.device = "cpu", lead: Sequence[int] = ()
    ) -> None:
        """`lead`: symbols that every text begins with."""
        self.front_end, self.device = front_end or FrontEnd(punctuation=False), torch.device(device)
        self.lead = list(lead)

    def prepare_input_sequence(
        self, texts: str | Sequence[str], cpu_run: bool = False, device: str | torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """Symbols int64 (B, T), padded with 0, and lengths int64 (B,), in the order of ``texts``.

        ``cpu_run`` puts them on the CPU whatever ``device`` says. Characters that cannot be said are left out with a
        warning; a text of which nothing is left is a ValueError.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        if not texts:
            raise ValueError("there are no texts")
        rows = [torch.tensor(self.lead + self.front_end.encode(text)) for text in texts]
        symbols = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        place = torch.device("cpu") if cpu_run else torch.device(device) if device is not None else self.device
        return symbols.to(place), torch.tensor([len(row) for row in rows]).to(place)
