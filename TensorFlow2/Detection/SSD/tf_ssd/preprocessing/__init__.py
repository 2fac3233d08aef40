"""Preprocessing and augmentation of pictures with objects: boxes, labels, masks and keypoints change with the picture.

    options = load_steps("augment.yaml")                      # or [(random_horizontal_flip, {}), ...]
    example = preprocess(example, options, get_default_func_arg_map(), seed=(epoch, number))

Every function works eagerly, in a tf.function and in tf.data, and draws with stateless operations from its seed.
`fields` names the tensors, `pipeline` applies lists of steps, `cache` replays draws on a second picture, `steps` reads
YAML.
"""

from __future__ import annotations

from . import fields
from .cache import PreprocessorCache
from .colour import *  # noqa: F403
from .colour import __all__ as _colour
from .crop import *  # noqa: F403
from .crop import __all__ as _crop
from .geometry import *  # noqa: F403
from .geometry import __all__ as _geometry
from .pad import *  # noqa: F403
from .pad import __all__ as _pad
from .pipeline import get_default_func_arg_map, preprocess
from .registry import STEPS
from .resize import *  # noqa: F403
from .resize import __all__ as _resize
from .ssd import *  # noqa: F403
from .ssd import __all__ as _ssd
from .steps import list_steps, load_steps, parse_steps
from .values import *  # noqa: F403
from .values import __all__ as _values

__all__ = [
    "STEPS", "PreprocessorCache", "fields", "get_default_func_arg_map", "list_steps", "load_steps", "parse_steps",
    "preprocess", *_colour, *_crop, *_geometry, *_pad, *_resize, *_ssd, *_values,
]  # fmt: skip
