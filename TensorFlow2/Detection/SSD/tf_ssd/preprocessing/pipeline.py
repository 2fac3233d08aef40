"""`preprocess`: a list of steps over one example."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from . import fields
from .cache import PreprocessorCache, StepCache
from .draws import Seed, fold, fresh_seed
from .registry import CACHE, STEPS, arguments_of

__all__ = ["ArgumentMap", "get_default_func_arg_map", "preprocess"]

ArgumentMap = Mapping[Callable[..., Any], Any]
Option = tuple[Callable[..., Any], Mapping[str, Any]]


def get_default_func_arg_map(
    include_label_weights: bool = True,
    include_label_confidences: bool = False,
    include_multiclass_scores: bool = False,
    include_instance_masks: bool = False,
    include_keypoints: bool = False,
) -> dict[Callable[..., Any], tuple[str | None, ...]]:
    """For each function, the tensors that it is given, in the order of its arguments; None for one that is left out.

    A tensor that a function cannot do without is passed whatever the flags say.
    """
    left_out = {
        name
        for name, included in (
            (fields.WEIGHTS, include_label_weights),
            (fields.CONFIDENCES, include_label_confidences),
            (fields.SCORES, include_multiclass_scores),
            (fields.MASKS, include_instance_masks),
            (fields.KEYPOINTS, include_keypoints),
        )
        if not included
    }
    arguments = {field: argument for argument, field in fields.ARGUMENTS.items()}
    found = {}
    for step in STEPS.values():
        parameters = inspect.signature(step.function).parameters
        optional = {name for name in step.tensors if parameters[arguments[name]].default is None}
        found[step.function] = tuple(None if name in left_out & optional else name for name in step.tensors)
    return found


def preprocess(
    tensor_dict: Mapping[str, Any],
    preprocess_options: Sequence[Option],
    func_arg_map: ArgumentMap | None = None,
    preprocess_vars_cache: PreprocessorCache | None = None,
    seed: Seed = None,
) -> dict[str, Any]:
    """Apply the steps in order and return a new dictionary; neither the given one nor the options are changed.

    `tensor_dict`: see `fields`; its image is [1, H, W, C], and other entries are passed on. `preprocess_options`: pairs
    of a function and its keyword arguments. `func_arg_map` has for each function (or, for one of your own, any
    callable) the entries of the example that are passed to it in order and take what it returns, None for an argument
    left out; the default is `get_default_func_arg_map()`. What a function returns beyond that is dropped (the shape
    that resizing gives).

    `preprocess_vars_cache`: draws that it holds are replayed, others are added. `seed`: an int, or an integer tensor
    [2] such as (epoch, number of the picture), fixes every draw; without, each call draws anew from TensorFlow's
    global generator. A number as `seed` in a step's arguments is folded into it and gives that step another draw;
    without a seed of the call it alone counts, and the step's draw is the same for every picture. A tensor as a step's
    seed stands for itself.

    ValueError: an image that is not of rank 4 or of more than one picture, a function that the map lacks, a tensor that
    a step needs and the example lacks, a wrong parameter (with the step's number and name).
    """
    argument_map = get_default_func_arg_map() if func_arg_map is None else func_arg_map
    example = dict(tensor_dict)
    if fields.IMAGE in example:
        example[fields.IMAGE] = _squeeze(example[fields.IMAGE])
    call_seed = fresh_seed() if seed is None and _draws_anything(preprocess_options) else seed
    for position, (function, arguments) in enumerate(preprocess_options):
        where = f"step {position + 1} ({getattr(function, '__name__', function)})"
        if function not in argument_map:
            raise ValueError(f"{where}: the function is not in func_arg_map")
        names = argument_map[function]
        missing = [name for name in names if name is not None and name not in example]
        if missing:
            raise ValueError(f"{where}: the example has no {', '.join(missing)}; it has: {', '.join(example)}")
        keywords = _keywords(function, arguments, position, call_seed, seed is not None, preprocess_vars_cache)
        try:
            results = function(*(None if name is None else example[name] for name in names), **keywords)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        results = list(results) if isinstance(results, list | tuple) else [results]
        targets = [name for name in names if name is not None]
        if len(results) < len(targets):
            raise ValueError(f"{where}: returned {len(results)} values for {', '.join(targets)}")
        example.update(zip(targets, results, strict=False))
    if fields.IMAGE in example:
        example[fields.IMAGE] = tf.expand_dims(example[fields.IMAGE], 0)
    return example


def _keywords(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    position: int,
    call_seed: Seed,
    seeded: bool,
    cache: PreprocessorCache | None,
) -> dict[str, Any]:
    """A copy of the step's arguments, with its own stream of the seed and its own view of the cache."""
    keywords = dict(arguments)
    seed_name, takes_cache = arguments_of(function)
    if seed_name is not None:
        own = keywords.get(seed_name)
        if own is None:
            keywords[seed_name] = fold(call_seed, "step", position)
        elif tf.is_tensor(own):
            keywords[seed_name] = fold(own, "step", position)
        else:
            keywords[seed_name] = fold(call_seed if seeded else 0, "step", position, own)
    if takes_cache and cache is not None:
        keywords[CACHE] = StepCache(cache, position)
    return keywords


def _draws_anything(options: Sequence[Option]) -> bool:
    return any(arguments_of(function)[0] is not None for function, _ in options)


def _squeeze(image: Any) -> tf.Tensor:
    image = tf.convert_to_tensor(image)
    if image.shape.rank != 4:
        raise ValueError(f"the image must be of rank 4, [1, height, width, channels], got the shape {image.shape}")
    if image.shape[0] not in (1, None):
        raise ValueError(f"the image must be a single one, [1, height, width, channels], got the shape {image.shape}")
    return tf.squeeze(image, axis=0)
