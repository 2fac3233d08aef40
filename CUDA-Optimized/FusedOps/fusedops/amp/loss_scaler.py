"""The scale of a loss and the rules by which it changes."""

from __future__ import annotations

__all__ = ["LossScaler"]

WINDOW = 2000
FACTOR = 2.0


class LossScaler:
    """Static: ``loss_scale`` is a number and stays. "dynamic": it begins at ``init_scale`` (at most the maximum).

    After an overflow the step is skipped, the scale is halved (not below ``min_loss_scale``) and the count of clean
    steps starts again; after ``scale_window`` clean steps it is doubled (not above ``max_loss_scale``) and the count
    starts again.
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        init_scale: float = 2.0**16,
        scale_factor: float = FACTOR,
        scale_window: int = WINDOW,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._scale = min(max_loss_scale, init_scale) if self.dynamic else float(loss_scale)
        self.scale_factor, self.scale_window = scale_factor, scale_window
        self.min_loss_scale, self.max_loss_scale = min_loss_scale, max_loss_scale
        self.unskipped = 0

    def loss_scale(self) -> float:
        """What a loss is multiplied by now."""
        return self._scale

    def update(self, overflow: bool) -> bool:
        """Take note of a backward pass; -> whether its step is to be skipped."""
        if not self.dynamic:
            return False
        if overflow:
            self._scale = max(self._scale / self.scale_factor, self.min_loss_scale or 0.0)
            self.unskipped = 0
            return True
        self.unskipped += 1
        if self.unskipped == self.scale_window:
            self._scale = min(self._scale * self.scale_factor, self.max_loss_scale)
            self.unskipped = 0
        return False

    def state_dict(self) -> dict[str, float | int]:
        return {"loss_scale": self._scale, "unskipped": self.unskipped}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self._scale, self.unskipped = float(state["loss_scale"]), int(state["unskipped"])
