"""torch.hub entries of all tasks.

    model = torch.hub.load("path/to/this/repository", "nvidia_resnet50", source="local", pretrained=False)

Listing the entries imports no task; calling one imports its task alone. A package that it needs and that is missing is
named in the error. Models that are loaded with ``pretrained=False`` need no network and write no file.
"""

import ast as _ast
import functools as _functools
import importlib as _importlib
import sys as _sys
from pathlib import Path as _Path

dependencies = ["torch"]

_ROOT = _Path(__file__).resolve().parent
_FOLDERS = {
    "convnets": "PyTorch/Classification/ConvNets",
    "ssd": "PyTorch/Detection/SSD",
    "tacotron2": "PyTorch/SpeechSynthesis/Tacotron2",
    "fastspeech": "CUDA-Optimized/FastSpeech",
    "se3_transformer": "DGLPyTorch/DrugDiscovery/SE3Transformer",
}
_ENTRIES = {
    "convnets.hub": [
        "nvidia_resnet50",
        "nvidia_resnext101_32x4d",
        "nvidia_resneXt",
        "nvidia_se_resnext101_32x4d",
        "nvidia_efficientnet_b0",
        "nvidia_efficientnet_b4",
        "nvidia_efficientnet_widese_b0",
        "nvidia_efficientnet_widese_b4",
        "nvidia_efficientnet",
        "nvidia_convnets_processing_utils",
        "mobilenet_v2",
        "efficientnet_lite0",
        "fashion_mnist_resnet14",
        "convnet",
    ],
    "ssd.hub": ["nvidia_ssd", "nvidia_ssd_processing_utils", "ssd300"],
    "tacotron2.hub": ["nvidia_tacotron2", "nvidia_waveglow", "nvidia_tts_utils"],
    "fastspeech.hub": ["nvidia_fastspeech", "nvidia_fastspeech_utils"],
    "se3_transformer.hub": ["se3_transformer", "se3_transformer_predictor"],
}
# A copy of one task (`./dlx copy`) has that task's entries alone.
_FOLDERS = {package: folder for package, folder in _FOLDERS.items() if (_ROOT / folder / package).is_dir()}
_ENTRIES = {module: names for module, names in _ENTRIES.items() if module.split(".")[0] in _FOLDERS}

_sys.path += [str(_ROOT / folder) for folder in ("Tools", *_FOLDERS.values()) if str(_ROOT / folder) not in _sys.path]


def _entry(module: str, name: str, doc: str):
    def call(*args, **kwargs):
        try:
            target = getattr(_importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            task = _FOLDERS[module.split(".")[0]]
            raise ModuleNotFoundError(
                f"{name} needs the package {error.name!r}: pip install -r {task}/requirements.txt", name=error.name
            ) from error
        return target(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    return call


@_functools.cache
def _docstrings(module: str) -> dict:
    """The docstrings of a module's functions, read without importing it."""
    package, _, rest = module.partition(".")
    path = _ROOT / _FOLDERS[package] / package / f"{rest.replace('.', '/')}.py"
    tree = _ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: _ast.get_docstring(node) or "" for node in tree.body if isinstance(node, _ast.FunctionDef)}


for _module, _names in _ENTRIES.items():
    for _name in _names:
        globals()[_name] = _entry(_module, _name, _docstrings(_module)[_name])
