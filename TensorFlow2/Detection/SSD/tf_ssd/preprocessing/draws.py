"""Random draws that a seed determines and a cache can replay.

Every draw has a name, and every name its own stream of the seed: no two draws of a step, and no two steps of a list,
are correlated, and adding a draw leaves the others as they are. All draws are uniform in [0, 1); functions map them to
what they need, which is what makes a kept draw fit a picture of another size.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Hashable, Sequence
from numbers import Integral
from typing import Any

import tensorflow as tf

from .cache import PreprocessorCache, StepCache

__all__ = ["AnyCache", "Draws", "Seed", "fold", "fresh_seed"]

Seed = int | Sequence[int] | tf.Tensor | None
PHILOX = 1  # its number among TensorFlow's algorithms
AnyCache = PreprocessorCache | StepCache | None


def fresh_seed() -> tf.Tensor:
    """[2] int64 from TensorFlow's global generator: another one in each run; tf.random.set_seed fixes the row."""
    return tf.random.uniform([2], maxval=tf.int64.max, dtype=tf.int64)


def fold(seed: Seed, *words: Hashable) -> tf.Tensor:
    """[2] int64: the stream of `seed` that the words name. `seed`: an int, two ints, or an integer tensor [2] or []."""
    if seed is None:
        seed = fresh_seed()
    elif not tf.is_tensor(seed):
        numbers = [seed, 0] if isinstance(seed, Integral) else list(seed)
        if len(numbers) != 2:
            raise ValueError(f"seed must be an int or two ints, got {seed!r}")
        seed = tf.constant(numbers, tf.int64)
    seed = tf.cast(seed, tf.int64)
    if seed.shape.rank == 0:
        seed = tf.stack([seed, tf.zeros_like(seed)])
    if not seed.shape.is_compatible_with([2]):
        raise ValueError(f"seed must have shape [2], got {seed.shape}")
    # Adding a 128-bit hash: seeds that follow each other, such as (epoch, number of the picture), stay apart.
    digest = hashlib.blake2b(repr(words).encode(), digest_size=16).digest()
    return seed + tf.constant(struct.unpack("<qq", digest), tf.int64)


def uniform(shape: Sequence[Any], seed: tf.Tensor) -> tf.Tensor:
    """Uniform float32 in [0, 1), multiples of 2**-24; the same on every device and in XLA.

    TensorFlow's own floats are not: which algorithm it picks, and which bits it turns into a float, depend on both.
    Philox (Salmon et al., 2011) makes random bits of a key and a counter that runs along the values drawn. The key is
    one half of the seed and the counter starts at 2**64 times the other: no two streams meet.
    """
    words = tf.bitcast(seed, tf.uint64)
    start = tf.concat([tf.zeros([1], tf.uint64), words[1:]], 0)
    bits = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=shape, key=words[:1], counter=start, alg=PHILOX, dtype=tf.uint32
    )
    return tf.cast(tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32)), tf.float32) * 2.0**-24


class Draws:
    """The draws of one call of a function. Nothing random is built for a draw that the cache holds.

    `parameters` are those that the draws are made with; they are part of the key in the cache.
    """

    def __init__(self, function_id: str, parameters: Sequence[Any], seed: Seed, cache: AnyCache) -> None:
        self.function_id, self.cache = function_id, cache
        self.parameters = tuple(_hashable(value) for value in parameters)
        self._seed = seed

    def inner(self, function_id: str, name: str, parameters: Sequence[Any] = ()) -> Draws:
        """The draws of a part of this function, which are its own: `name` says which part."""
        seed = self._seed if self._seed is None else fold(self._seed, name)
        return Draws(function_id, [self.function_id, name, *self.parameters, *parameters], seed, self.cache)

    def uniform(self, name: str, shape: Sequence[Any] = ()) -> tf.Tensor:
        """Uniform float32 in [0, 1)."""
        return self.remember(name, lambda: self.fresh_uniform(name, shape))

    def fresh_uniform(self, name: str, shape: Sequence[Any] = ()) -> tf.Tensor:
        """A draw that is not kept: part of something that is kept as a whole, or of what cannot be replayed."""
        if self._seed is None:  # one for all draws of this call, and none if the cache holds them all
            self._seed = fresh_seed()
        return uniform(shape, fold(self._seed, self.function_id, name))

    def remember(self, name: str, make: Callable[[], Any]) -> Any:
        """What the cache holds under this name, or else what `make` gives, which is kept."""
        if self.cache is None:
            return make()
        key = (name, *self.parameters)
        value = self.cache.get(self.function_id, key)
        if value is None:
            value = make()
            self.cache.update(self.function_id, key, value)
        return value

    def between(self, name: str, low: Any, high: Any) -> tf.Tensor:
        """Uniform in [low, high); the draw that is kept is the fraction."""
        return low + self.uniform(name) * (high - low)


def _hashable(value: Any) -> Hashable:
    """Parameters as part of a key: lists as tuples, tensors by dtype and shape since their values are not known."""
    if tf.is_tensor(value):
        return ("tensor", value.dtype.name, str(value.shape))
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    return value if isinstance(value, Hashable) else repr(value)
