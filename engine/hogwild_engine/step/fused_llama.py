"""The fused Llama forward: the decoder layers of models of the Llama shape, without module calls.

Matrices are fused (QKV, gate and up), and all layers are one call of the C code if it has all
matrices. A model has this shape if its modules say so (`FusedLlamaForward.fits`) and its logits
agree (loading/load.py); its name does not matter. Other models use `TransformersForward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hogwild_engine.cache.kv_cache import LayerShape
from hogwild_engine.cache.rope import Rotation
from hogwild_engine.step.attention_hook import StepTensors
from hogwild_engine.step.linear_layers import NativeInt8Linear, NativeLinear
from hogwild_engine.step.linear_packing import (
    ActivationAbsmax,
    Quantization,
    is_plain,
    pack_linear,
)
from hogwild_kernels.cpu import c_backend, decoder_layers

_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_ATTENTION = {*_PROJECTIONS, "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}

_CosSin = dict[Rotation, tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Layer:
    """One decoder layer. Matrices are callables; after `FusedLlamaForward.pack` they are modules.

    Args:
        head_norms: weights of the RMS norms of queries and keys, and their epsilon.
        scale: factor on attention scores.
    """

    qkv: Any
    out: Any
    gate_up: Any
    down: Any
    before_attention: decoder_layers.Norm
    before_mlp: decoder_layers.Norm
    head_norms: tuple[torch.Tensor, torch.Tensor, float] | None
    scale: float


class FusedLlamaForward:
    """Runs the forward of a model of the Llama shape on the CPU.

    It uses the model's own weights until `pack` is called.

    Args:
        model: a causal language model that `fits`.
        shapes: what its layers store.
        windows: each layer's sliding window.
    """

    def __init__(self, model: Any, shapes: list[LayerShape], windows: Sequence[int | None]) -> None:
        self._shapes = shapes
        self._rotations = list(dict.fromkeys(shape.rotation for shape in shapes))
        kinds = [(shape.rotation, window) for shape, window in zip(shapes, windows, strict=True)]
        distinct = list(dict.fromkeys(kinds))
        self._kind_of_layer = [distinct.index(kind) for kind in kinds]
        self._first_layer_of_kind = [kinds.index(kind) for kind in distinct]
        self._modules = list(model.model.layers)
        self._embedding: torch.Tensor = model.get_input_embeddings().weight.detach()
        self._norm = _norm(model.model.norm)
        self._lm_head: Any = model.get_output_embeddings()
        self._rope_scale = float(getattr(model.model.rotary_emb, "attention_scaling", 1.0))
        self._layers = [_plain_layer(module) for module in self._modules]
        self._buffers = _ActivationBuffers(0, self._embedding.dtype)
        self._in_c: decoder_layers.Layers | None = None

    @staticmethod
    def fits(model: Any, shapes: list[LayerShape]) -> bool:
        """Return whether the modules have the Llama shape, in sizes that the C code takes."""
        base, lm_head = getattr(model, "model", None), model.get_output_embeddings()
        if c_backend.build_error() or not isinstance(base, nn.Module) or not is_plain(lm_head):
            return False
        if _names(base) != _MODEL or type(base.embed_tokens) is not nn.Embedding:
            return False
        if {weight.dtype for weight in base.parameters()} != {shape.dtype for shape in shapes}:
            return False
        cache_fits = all(
            shape.device.type == "cpu"
            and shape.dtype in c_backend.DTYPES
            and shape.head_dim % 32 == 0
            and shape.head_dim <= c_backend.MAX_HEAD_DIM
            and shape.rotation.permutation is None
            for shape in shapes
        )
        layers: Any = base.layers
        return cache_fits and lm_head.bias is None and all(map(_layer_fits, layers, shapes))

    def pack(self, quantization: Quantization, absmax: ActivationAbsmax) -> None:
        """Fuse and pack the matrices; the model's own weights are freed, layer by layer.

        Args:
            quantization: see `hogwild_engine.step.linear_packing.pack_linear`.
            absmax: from `hogwild_engine.step.linear_packing.recorded_absmax`.
        """
        for layer, module in zip(self._layers, self._modules, strict=True):
            attention, mlp = module.self_attn, module.mlp
            projections = [getattr(attention, name) for name in _PROJECTIONS]
            layer.qkv = _fuse(projections, quantization, absmax)
            layer.out = _fuse([attention.o_proj], quantization, absmax)
            layer.gate_up = _fuse([mlp.gate_proj, mlp.up_proj], quantization, absmax)
            layer.down = _fuse([mlp.down_proj], quantization, absmax)
        lm_head = self._lm_head
        tied = lm_head.weight.data_ptr() == self._embedding.data_ptr()
        self._lm_head = pack_linear(
            lm_head.weight, None, quantization, absmax.get(lm_head), share=tied
        )
        self._modules.clear()
        self._in_c = self._layers_in_c()

    @torch.inference_mode()
    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tensors: StepTensors,
        logit_indices: torch.Tensor,
    ) -> torch.Tensor:
        """See `hogwild_engine.step.forward.Forward`."""
        x = nn.functional.embedding(tokens, self._embedding)
        cos_sin = {rotation: self._cos_sin(rotation, positions) for rotation in self._rotations}
        slots = tensors.slots[self._shapes[0].device]
        if len(tokens) != self._buffers.num_tokens:
            self._buffers = _ActivationBuffers(len(tokens), x.dtype)
        if self._in_c is None:
            y = self._run(x, cos_sin, slots, tensors)
        else:
            y = self._run_in_c(self._in_c, x, cos_sin, slots, tensors)
        h = self._buffers.get("h", x.shape[1])
        c_backend.add_norm(x, y, self._norm.weight, self._norm.eps, h)
        return self._lm_head(h[logit_indices])

    def _run(
        self, x: torch.Tensor, cos_sin: _CosSin, slots: torch.Tensor, tensors: StepTensors
    ) -> torch.Tensor | None:
        """Run the layers on ``x`` in place, one operation at a time.

        Returns:
            What the last layer adds to ``x``: each sum is fused with the norm that follows it.
        """
        buffers = self._buffers
        h, y = buffers.get("h", x.shape[1]), None
        for index, (layer, shape) in enumerate(zip(self._layers, self._shapes, strict=True)):
            keys, values = tensors.cache.layers[index]
            c_backend.add_norm(x, y, layer.before_attention.weight, layer.before_attention.eps, h)
            qkv = layer.qkv(h)
            width = qkv.shape[1] - 2 * shape.num_kv_heads * shape.head_dim
            q = qkv[:, :width].unflatten(1, (-1, shape.head_dim))
            table = tensors.tables[index]
            params, workspace = c_backend.attention_params(q, keys, values, table, layer.scale)
            c_backend.rotate_write(
                params, qkv, layer.head_norms, *cos_sin[shape.rotation], slots, keys, values
            )
            out, lse = buffers.get("attended", width), buffers.lse(q.shape[1])
            c_backend.attend(params, q, keys, values, None, out, lse, workspace)
            y = layer.out(out)
            c_backend.add_norm(x, y, layer.before_mlp.weight, layer.before_mlp.eps, h)
            gate_up = layer.gate_up(h)
            activated = buffers.get("activated", gate_up.shape[1] // 2)
            c_backend.silu_mul(gate_up, activated)
            y = layer.down(activated)
        return y

    def _run_in_c(
        self,
        layers: decoder_layers.Layers,
        x: torch.Tensor,
        cos_sin: _CosSin,
        slots: torch.Tensor,
        tensors: StepTensors,
    ) -> torch.Tensor:
        """The same as `_run` in one call."""
        buffers, layer, dim = self._buffers, self._layers[0], self._shapes[0].head_dim
        heads = layer.out.matrix.width // dim
        activations = decoder_layers.Activations(
            hidden=buffers.get("h", x.shape[1]),
            qkv=buffers.get("qkv", layer.qkv.matrix.columns),
            attended=buffers.get("attended", heads * dim),
            output=buffers.get("y", x.shape[1]),
            gate_up=buffers.get("gate_up", layer.gate_up.matrix.columns),
            activated=buffers.get("activated", layer.down.matrix.width),
            lse=buffers.lse(heads),
        )
        q = activations.qkv[:, : heads * dim].unflatten(1, (heads, dim))
        kinds = []
        for index in self._first_layer_of_kind:
            stored, table = tensors.cache.layers[index], tensors.tables[index]
            params, workspace = c_backend.attention_params(q, *stored, table, layer.scale)
            rope = cos_sin[self._shapes[index].rotation]
            kinds.append(decoder_layers.LayerKind(params, workspace, *rope))
        layers(x, tensors.cache.layers, kinds, activations, slots)
        return activations.output

    def _layers_in_c(self) -> decoder_layers.Layers | None:
        """The layers for the C code; ``None`` if sizes differ or a matrix is not in C."""
        made, sizes = [], set()
        for layer, shape, kind in zip(self._layers, self._shapes, self._kind_of_layer, strict=True):
            modules = (layer.qkv, layer.out, layer.gate_up, layer.down)
            if not all(isinstance(module, NativeLinear | NativeInt8Linear) for module in modules):
                return None
            qkv, out, gate_up, down = (module.matrix for module in modules)
            norms = (layer.before_attention, layer.before_mlp, layer.head_norms)
            made.append(decoder_layers.LayerParts(qkv, out, gate_up, down, *norms, kind))
            heads = (shape.num_kv_heads, shape.head_dim, layer.scale)
            sizes.add((*heads, qkv.columns, out.width, gate_up.columns))
        return decoder_layers.Layers(made, self._embedding.dtype) if len(sizes) == 1 else None

    def _cos_sin(
        self, rotation: Rotation, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rotation.table(positions)
        # YaRN scales queries and keys; a layer without rotation has no YaRN.
        scale = self._rope_scale if rotation.inv_freq else 1.0
        return cos * scale, sin * scale


class _ActivationBuffers:
    """Memory that every layer reuses, and later steps with the same number of query tokens."""

    def __init__(self, num_tokens: int, dtype: torch.dtype) -> None:
        self.num_tokens = num_tokens
        self._dtype = dtype
        self._tensors: dict[tuple[str, int], torch.Tensor] = {}

    def get(self, name: str, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._tensors.get((name, width))
        if tensor is None:
            tensor = torch.empty((self.num_tokens, width), dtype=dtype or self._dtype)
            self._tensors[name, width] = tensor
        return tensor

    def lse(self, num_heads: int) -> torch.Tensor:
        return self.get("lse", num_heads, torch.float32)


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _layer_fits(layer: Any, shape: LayerShape) -> bool:
    if _names(layer) != _LAYER or _names(layer.mlp) != _MLP:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = sorted(_names(attention) & _HEAD_NORMS)
    if _names(attention) - _HEAD_NORMS != _ATTENTION or len(head_norms) == 1:
        return False
    if len({_norm(getattr(attention, name)).eps for name in head_norms}) > 1:
        return False  # the C code has one epsilon for both
    matrices = [getattr(attention, name) for name in _ATTENTION]
    matrices += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    sizes = [size for m in matrices if is_plain(m) for size in m.weight.shape]
    if len(sizes) != 2 * len(matrices) or any(size % c_backend.LANES for size in sizes):
        return False
    group = attention.q_proj.weight.shape[0] // (shape.num_kv_heads * shape.head_dim)
    return group <= c_backend.MAX_GROUP and _is_silu(mlp.act_fn)


@torch.inference_mode()
def _is_silu(function: Any) -> bool:
    x = torch.linspace(-9, 9, 37)
    return torch.allclose(function(x), nn.functional.silu(x))


def _norm(module: Any) -> decoder_layers.Norm:
    eps = getattr(module, "variance_epsilon", None) or module.eps
    return decoder_layers.Norm(module.weight.detach(), float(eps))


def _plain_layer(module: Any) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    norms = None
    if hasattr(attention, "q_norm"):
        q_norm, k_norm = _norm(attention.q_norm), _norm(attention.k_norm)
        norms = (q_norm.weight, k_norm.weight, q_norm.eps)
    return Layer(
        qkv=_concatenated([getattr(attention, name) for name in _PROJECTIONS]),
        out=attention.o_proj,
        gate_up=_concatenated([mlp.gate_proj, mlp.up_proj]),
        down=mlp.down_proj,
        before_attention=_norm(module.input_layernorm),
        before_mlp=_norm(module.post_attention_layernorm),
        head_norms=norms,
        scale=float(attention.scaling),
    )


def _concatenated(parts: list[nn.Linear]) -> Any:
    return lambda x: torch.cat([part(x) for part in parts], dim=-1)


def _fuse(parts: list[nn.Linear], quantization: Quantization, absmax: ActivationAbsmax) -> Any:
    """Return one packed matrix for several with the same input, and free their weights."""
    weight, bias = torch.cat([part.weight for part in parts]), None
    if any(part.bias is not None for part in parts):
        zeros = [torch.zeros(len(part.weight), dtype=weight.dtype) for part in parts]
        biases = [z if p.bias is None else p.bias for z, p in zip(zeros, parts, strict=True)]
        bias = torch.cat(biases)
    for part in parts:
        part.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return pack_linear(weight, bias, quantization, absmax.get(parts[0]))
