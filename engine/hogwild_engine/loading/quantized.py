"""Weights that another library quantised: which, and what has to be installed to load them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from hogwild_engine.api.errors import ModelError, complaint

PACKAGES = {
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "gptq": ("gptqmodel", "optimum"),
    "hqq": ("hqq",),
    "quanto": ("optimum-quanto",),
    "torchao": ("torchao",),
}
"""What transformers needs for a method beside itself. Others have none, or are told by its own
errors.
"""


def stated_method(config: Any) -> str | None:
    """How the weights of a model with this configuration are quantised; ``None``: they are not."""
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return None
    stated = stated if isinstance(stated, dict) else stated.to_dict()
    if stated.get("load_in_4bit") or stated.get("load_in_8bit"):
        return "bitsandbytes"
    return _name(stated.get("quant_method"))


def method_of(model: Any) -> str | None:
    """How a loaded model is quantised; ``None`` where it is not, or no longer."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or getattr(quantizer.quantization_config, "dequantize", False):
        return None
    return _name(quantizer.quantization_config.quant_method)


def require_loadable(model: str, method: str) -> None:
    """Refuse what transformers would load as if it were not quantised, or not at all.

    Args:
        model: its name, for the error.
        method: from `stated_method`.

    Raises:
        ModelError: transformers knows no such method, or a package is not installed.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    known = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZER_MAPPING}
    if method not in known:
        wanted = "weights that are quantised in a way that transformers knows"
        todo = f"it is quantised by {method!r}; use another copy of it, or a newer transformers"
        raise ModelError(complaint("model", wanted, model, todo))
    missing = [package for package in PACKAGES.get(method, ()) if not _installed(package)]
    if missing:
        wanted = f"the packages to be installed that {method} weights need"
        todo = f"run: pip install {' '.join(missing)}"
        raise ModelError(complaint("model", wanted, model, todo))


def _name(method: Any) -> str:
    return str(getattr(method, "value", method))


def _installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
