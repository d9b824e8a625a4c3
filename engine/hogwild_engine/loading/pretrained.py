"""Load a model and its tokenizer with transformers, as they are."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from hogwild_engine.api.config import EMBEDDED_MODEL, EngineConfig
from hogwild_engine.api.errors import HogwildError, ModelError, ModelNotFoundError, error_text
from hogwild_engine.loading import gguf_cache, quantized
from hogwild_engine.loading.source import Source, locate


class Pretrained(NamedTuple):
    """A causal language model and its tokenizer, both of transformers."""

    model: Any
    tokenizer: Any


def load_pretrained(config: EngineConfig) -> Pretrained:
    """Load the model that ``config`` names, in its dtype, on its device.

    Raises:
        ModelNotFoundError: no model has this name.
        ModelError: the model cannot be loaded.
    """
    source = locate(config.model)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    with _quiet(), _translated_errors(config, source):
        if source.gguf_file:
            pretrained = _load_gguf(Path(source.place, source.gguf_file), dtype)
        else:
            pretrained = _load_folder(source, config, dtype)
        pretrained.model.to(device).eval().requires_grad_(False)
    return pretrained


def _load_gguf(file: Path, dtype: torch.dtype) -> Pretrained:
    folder = gguf_cache.folder_for(file, str(dtype).removeprefix("torch."))
    if folder is not None and folder.is_dir():
        try:
            gguf_cache.check(folder)
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
            return Pretrained(model, tokenizer)
        except Exception as error:  # a damaged folder: convert the file again
            gguf_cache.discard(folder, error)
    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    options["quantization_config"] = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **options)
    if folder is not None:
        gguf_cache.save(folder, model, tokenizer)
    return Pretrained(model, tokenizer)


def _load_folder(source: Source, config: EngineConfig, dtype: torch.dtype) -> Pretrained:
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if source.local:
        options["local_files_only"] = True
    elif config.revision:
        options["revision"] = config.revision
    stated = AutoConfig.from_pretrained(source.place, **options)
    if method := quantized.stated_method(stated):
        quantized.require_loadable(config.model, method)
        # Quantized layers often run only in the dtype that they were made in.
        if config.dtype == "auto" and stated.dtype is not None:
            dtype = getattr(torch, str(stated.dtype).removeprefix("torch."))
    tokenizer = AutoTokenizer.from_pretrained(source.place, **options)
    model = AutoModelForCausalLM.from_pretrained(source.place, dtype=dtype, **options)
    return Pretrained(model, tokenizer)


def resolve_device(device: str) -> torch.device:
    """Return the torch device of a setting; "auto" is CUDA if available, else the CPU.

    Raises:
        ModelError: the device is unknown or not available.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).split("\n")[0]
        wanted = "'auto' or a torch device that is at hand"
        raise ModelError(error_text("device", wanted, device, reason)) from error
    return found


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype of a setting; "auto" is bfloat16 if ``device`` computes it fast, else
    float32.
    """
    if dtype == "auto":
        fast = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
        dtype = "bfloat16" if fast else "float32"
    return getattr(torch, dtype)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars and warnings that transformers prints while it loads a model."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_level = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    gguf: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    bar = gguf.tqdm
    gguf.tqdm = partial(bar, disable=True)  # this one ignores disable_progress_bar() below
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        gguf.tqdm = bar
        hub_logging.set_verbosity(hub_level)
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _translated_errors(config: EngineConfig, source: Source) -> Iterator[None]:
    """Raise whatever loading raises as a `ModelError`."""
    try:
        yield
    except HogwildError:
        raise
    except Exception as error:  # loaders of file formats raise errors of many types
        reason = " ".join(str(error).split())[:300]
        if isinstance(error, OSError) and not source.local:
            near = difflib.get_close_matches(config.model, [EMBEDDED_MODEL])
            meant = f"did you mean {EMBEDDED_MODEL!r}? " if near else ""
            wanted = "a model of the hub, a folder, a .gguf file or 'smollm2-135m'"
            offline = " (offline)" if os.environ.get("HF_HUB_OFFLINE") else ""
            todo = f"{meant}check the name and the connection{offline}: {reason}"
            raise ModelNotFoundError(error_text("model", wanted, config.model, todo)) from error
        wanted = "one that transformers loads"
        raise ModelError(error_text("model", wanted, config.model, reason)) from error
