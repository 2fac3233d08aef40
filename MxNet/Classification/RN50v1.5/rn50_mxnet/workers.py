"""The workers of a run and what they tell each other, over MXNet's kvstore.

Alone (`local`) there is nothing to tell. With `dist_sync` each worker is a process, started by `runner`, and a
parameter server adds up what all have pushed. The server only adds: every worker makes the same update itself, so that
optimiser states are on the workers and can be saved.
"""

from __future__ import annotations

import os

import mxnet as mx
import numpy as np

FIRST_KEY = 1_000_000  # Gluon's trainer numbers its own keys from 0


class Workers:
    """``rank`` of ``size`` workers. `sum` is a collective call: all workers must make it, in the same order."""

    def __init__(self, kind: str = "local") -> None:
        self.store = None
        self.rank, self.size = 0, 1
        self._keys: dict[int, int] = {}
        if kind == "local":
            return
        if kind != "dist_sync":
            raise ValueError(f"kvstore {kind!r} is neither local nor dist_sync")
        if not mx.runtime.Features().is_enabled("DIST_KVSTORE"):
            raise ValueError("kvstore dist_sync: this MXNet is built without DIST_KVSTORE")
        if os.environ.get("DMLC_ROLE") != "worker":
            raise ValueError(
                "kvstore dist_sync needs workers and a server: start it with `python -m rn50_mxnet.runner`"
            )
        self.store = mx.kv.create(kind)
        self.rank, self.size = self.store.rank, self.store.num_workers

    @property
    def is_main(self) -> bool:
        """Whether this worker writes logs and checkpoints."""
        return self.rank == 0

    def sum(self, values: np.ndarray) -> np.ndarray:
        """float32 (N,), added up over all workers."""
        values = np.asarray(values, np.float32).reshape(-1)
        if self.store is None:
            return values
        if len(values) not in self._keys:
            self._keys[len(values)] = FIRST_KEY + len(self._keys)
            self.store.init(self._keys[len(values)], mx.nd.zeros((len(values),)))
        key = self._keys[len(values)]
        # The store writes what it pulls into the pushed array, too, so that is one of our own.
        self.store.push(key, mx.nd.array(values))
        total = mx.nd.zeros((len(values),))
        self.store.pull(key, out=total)
        return total.asnumpy()
