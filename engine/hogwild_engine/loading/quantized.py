"""Models that another library quantized: which method, and which packages it needs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from hogwild_engine.api.errors import ModelError, error_text

PACKAGES = {
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "gptq": ("gptqmodel", "optimum"),
    "hqq": ("hqq",),
    "quanto": ("optimum-quanto",),
    "torchao": ("torchao",),
}
"""Packages that transformers needs for a method. Other methods need none, or transformers' own
errors name them.
"""


def stated_method(config: Any) -> str | None:
    """Return the quantization method of a model's configuration, ``None`` if it has none."""
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return None
    stated = stated if isinstance(stated, dict) else stated.to_dict()
    if stated.get("load_in_4bit") or stated.get("load_in_8bit"):
        return "bitsandbytes"
    return _name(stated.get("quant_method"))


def method_of(model: Any) -> str | None:
    """Return the quantization method of a loaded model, ``None`` if it is not quantized or was
    dequantized when it was loaded.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or getattr(quantizer.quantization_config, "dequantize", False):
        return None
    return _name(quantizer.quantization_config.quant_method)


def require_loadable(model: str, method: str) -> None:
    """Raise an error if transformers cannot load such weights.

    Without this check it ignores a method that it does not know and loads noise.

    Args:
        model: its name, for the error.
        method: from `stated_method`.

    Raises:
        ModelError: transformers does not know the method, or a package is not installed.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    known = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZER_MAPPING}
    if method not in known:
        wanted = "weights that are quantized in a way that transformers knows"
        todo = f"it is quantized by {method!r}; use another copy of it, or a newer transformers"
        raise ModelError(error_text("model", wanted, model, todo))
    missing = [package for package in PACKAGES.get(method, ()) if not _installed(package)]
    if missing:
        wanted = f"the packages to be installed that {method} weights need"
        todo = f"run: pip install {' '.join(missing)}"
        raise ModelError(error_text("model", wanted, model, todo))


def _name(method: Any) -> str:
    return str(getattr(method, "value", method))


def _installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
