"""A forward pass of the Llama shape without module calls: fused matrices, and all layers in one
call of the C code where it has the matrices too.

Whether a model has this shape is read off its modules, and shown by its logits (selfcheck.py); its
name plays no part. Models of other shapes run through transformers' own forward (forward.py).
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
from hogwild_engine.step.linear_packing import Quantization, Reaches, is_plain, matrix
from hogwild_kernels.cpu import c_backend, decoder_layers

_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_ATTENTION = {*_PROJECTIONS, "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


_Turns = dict[Rotation, tuple[torch.Tensor, torch.Tensor]]


def _norm(module: Any) -> decoder_layers.Norm:
    eps = getattr(module, "variance_epsilon", None) or module.eps
    return decoder_layers.Norm(module.weight.detach(), float(eps))


@dataclass
class Layer:
    """One decoder layer. Matrices are callables, modules once they are packed."""

    qkv: Any
    out: Any
    gate_up: Any
    down: Any
    before_attention: decoder_layers.Norm
    before_mlp: decoder_layers.Norm
    head_norms: tuple[torch.Tensor, torch.Tensor, float] | None
    scale: float


class FusedLlamaForward:
    """Runs a pass of a model that has the Llama shape, on the CPU.

    Matrices are plain, over the model's own weights, until `pack` is called.

    Args:
        model: a causal language model that `fits`.
        shapes: what its layers store.
        windows: each layer's sliding window.
    """

    def __init__(self, model: Any, shapes: list[LayerShape], windows: Sequence[int | None]) -> None:
        self._shapes = shapes
        self._rotations = list(dict.fromkeys(shape.rotation for shape in shapes))
        kinds = [(shape.rotation, window) for shape, window in zip(shapes, windows, strict=True)]
        views = list(dict.fromkeys(kinds))
        self._view_of_layer = [views.index(kind) for kind in kinds]
        self._first_of_view = [kinds.index(kind) for kind in views]
        self._modules = list(model.model.layers)
        self._embedding: torch.Tensor = model.get_input_embeddings().weight.detach()
        self._norm = _norm(model.model.norm)
        self._head: Any = model.get_output_embeddings()
        self._turn_scale = float(getattr(model.model.rotary_emb, "attention_scaling", 1.0))
        self._layers = [_plain_layer(module) for module in self._modules]
        self._space = _Space(0, self._embedding.dtype)
        self._in_c: decoder_layers.Layers | None = None

    @staticmethod
    def fits(model: Any, shapes: list[LayerShape]) -> bool:
        """Whether the modules are those of the Llama shape, in sizes that the C code takes."""
        base, head = getattr(model, "model", None), model.get_output_embeddings()
        if c_backend.build_error() or not isinstance(base, nn.Module) or not is_plain(head):
            return False
        if _names(base) != _MODEL or type(base.embed_tokens) is not nn.Embedding:
            return False
        if {weight.dtype for weight in base.parameters()} != {shape.dtype for shape in shapes}:
            return False
        stored = all(
            shape.device.type == "cpu"
            and shape.dtype in c_backend.DTYPES
            and shape.head_dim % 32 == 0
            and shape.head_dim <= c_backend.MAX_DIM
            and shape.rotation.permutation is None
            for shape in shapes
        )
        layers: Any = base.layers
        return stored and head.bias is None and all(map(_layer_fits, layers, shapes))

    def pack(self, quantization: Quantization, reaches: Reaches) -> None:
        """Fuse and pack the matrices; the model's own weights are freed, layer by layer.

        Args:
            quantization: see `hogwild_engine.step.linear_packing.matrix`.
            reaches: from `hogwild_engine.step.linear_packing.measured`.
        """
        for layer, module in zip(self._layers, self._modules, strict=True):
            attention, mlp = module.self_attn, module.mlp
            rows = [getattr(attention, name) for name in _PROJECTIONS]
            layer.qkv = _fused(rows, quantization, reaches)
            layer.out = _fused([attention.o_proj], quantization, reaches)
            layer.gate_up = _fused([mlp.gate_proj, mlp.up_proj], quantization, reaches)
            layer.down = _fused([mlp.down_proj], quantization, reaches)
        reach = reaches.get(self._head)
        self._head = matrix(self._head.weight, None, quantization, reach)
        self._modules.clear()
        self._in_c = self._compiled()

    @torch.inference_mode()
    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tensors: StepTensors,
        keep: torch.Tensor,
    ) -> torch.Tensor:
        """Logits ``[R, V]`` of the kept rows; see `hogwild_engine.step.forward.Forward`."""
        x = nn.functional.embedding(tokens, self._embedding)
        turns = {rotation: self._turn(rotation, positions) for rotation in self._rotations}
        slots = tensors.slots[self._shapes[0].device]
        if len(tokens) != self._space.num_rows:
            self._space = _Space(len(tokens), x.dtype)
        if self._in_c is not None and len(tokens) <= self._in_c.max_rows:
            y = self._run_in_c(self._in_c, x, turns, slots, tensors)
        else:
            y = self._run(x, turns, slots, tensors)
        h = self._space.get("h", x.shape[1])
        c_backend.add_norm(x, y, self._norm.weight, self._norm.eps, h)
        return self._head(h[keep])

    def _run(
        self, x: torch.Tensor, turns: _Turns, slots: torch.Tensor, tensors: StepTensors
    ) -> torch.Tensor | None:
        """Take ``x`` through the layers, in place; gives what the last one adds to it."""
        space = self._space
        h, y = space.get("h", x.shape[1]), None
        for index, (layer, shape) in enumerate(zip(self._layers, self._shapes, strict=True)):
            keys, values = tensors.cache.layers[index]
            c_backend.add_norm(x, y, layer.before_attention.weight, layer.before_attention.eps, h)
            qkv = layer.qkv(h)
            width = qkv.shape[1] - 2 * shape.num_kv_heads * shape.head_dim
            q = qkv[:, :width].unflatten(1, (-1, shape.head_dim))
            table = tensors.tables[index]
            job, work = c_backend.job_for(q, keys, values, table, layer.scale)
            c_backend.rotate_write(
                job, qkv, layer.head_norms, *turns[shape.rotation], slots, keys, values
            )
            read = space.get("read", width)
            c_backend.attend(job, q, keys, values, None, read, space.lse(q.shape[1]), work)
            y = layer.out(read)
            c_backend.add_norm(x, y, layer.before_mlp.weight, layer.before_mlp.eps, h)
            gate_up = layer.gate_up(h)
            active = space.get("active", gate_up.shape[1] // 2)
            c_backend.silu_mul(gate_up, active)
            y = layer.down(active)
        return y

    def _run_in_c(
        self,
        layers: decoder_layers.Layers,
        x: torch.Tensor,
        turns: _Turns,
        slots: torch.Tensor,
        tensors: StepTensors,
    ) -> torch.Tensor:
        """What `_run` does, in one call."""
        space, layer, dim = self._space, self._layers[0], self._shapes[0].head_dim
        heads = layer.out.matrix.width // dim
        scratch = decoder_layers.Scratch(
            h=space.get("h", x.shape[1]),
            qkv=space.get("qkv", layer.qkv.matrix.columns),
            read=space.get("read", heads * dim),
            y=space.get("y", x.shape[1]),
            gate_up=space.get("gate_up", layer.gate_up.matrix.columns),
            active=space.get("active", layer.down.matrix.width),
            lse=space.lse(heads),
        )
        q = scratch.qkv[:, : heads * dim].unflatten(1, (heads, dim))
        views = []
        for index in self._first_of_view:
            stored, table = tensors.cache.layers[index], tensors.tables[index]
            job, work = c_backend.job_for(q, *stored, table, layer.scale)
            views.append(decoder_layers.View(job, work, *turns[self._shapes[index].rotation]))
        layers(x, tensors.cache.layers, views, scratch, slots)
        return scratch.y

    def _compiled(self) -> decoder_layers.Layers | None:
        """The layers for the C code, where they are alike in size and it has all their matrices."""
        made, sizes = [], set()
        for layer, shape, view in zip(self._layers, self._shapes, self._view_of_layer, strict=True):
            modules = (layer.qkv, layer.out, layer.gate_up, layer.down)
            if not all(isinstance(module, NativeLinear | NativeInt8Linear) for module in modules):
                return None
            qkv, out, gate_up, down = (module.matrix for module in modules)
            parts = decoder_layers.LayerParts(
                qkv=qkv,
                out=out,
                gate_up=gate_up,
                down=down,
                before_attention=layer.before_attention,
                before_mlp=layer.before_mlp,
                head_norms=layer.head_norms,
                view=view,
            )
            made.append(parts)
            heads = (shape.num_kv_heads, shape.head_dim, layer.scale)
            sizes.add((*heads, qkv.columns, out.width, gate_up.columns))
        return decoder_layers.Layers(made, self._embedding.dtype) if len(sizes) == 1 else None

    def _turn(
        self, rotation: Rotation, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rotation.table(positions)
        if not rotation.inv_freq:
            return cos, sin
        return cos * self._turn_scale, sin * self._turn_scale


class _Space:
    """Memory that layers use one after another, and passes of as many rows."""

    def __init__(self, num_rows: int, dtype: torch.dtype) -> None:
        self.num_rows = num_rows
        self._dtype = dtype
        self._kept: dict[tuple[str, int], torch.Tensor] = {}

    def get(self, name: str, width: int) -> torch.Tensor:
        return self._make(name, width, self._dtype)

    def lse(self, num_heads: int) -> torch.Tensor:
        return self._make("lse", num_heads, torch.float32)

    def _make(self, name: str, width: int, dtype: torch.dtype) -> torch.Tensor:
        kept = self._kept.get((name, width))
        if kept is None:
            kept = self._kept[name, width] = torch.empty((self.num_rows, width), dtype=dtype)
        return kept


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _layer_fits(layer: Any, shape: LayerShape) -> bool:
    if _names(layer) != _LAYER or _names(layer.mlp) != _MLP:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if _names(attention) - _HEAD_NORMS != _ATTENTION:
        return False
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


def _plain_layer(module: Any) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    norms = None
    if hasattr(attention, "q_norm"):
        of_query, of_key = _norm(attention.q_norm), _norm(attention.k_norm)
        norms = (of_query.weight, of_key.weight, of_query.eps)
    return Layer(
        qkv=_side_by_side([getattr(attention, name) for name in _PROJECTIONS]),
        out=attention.o_proj,
        gate_up=_side_by_side([mlp.gate_proj, mlp.up_proj]),
        down=mlp.down_proj,
        before_attention=_norm(module.input_layernorm),
        before_mlp=_norm(module.post_attention_layernorm),
        head_norms=norms,
        scale=float(attention.scaling),
    )


def _side_by_side(parts: list[nn.Linear]) -> Any:
    return lambda x: torch.cat([part(x) for part in parts], dim=-1)


def _fused(parts: list[nn.Linear], quantization: Quantization, reaches: Reaches) -> Any:
    """One matrix in place of several; their weights are given up."""
    weight = torch.cat([part.weight for part in parts])
    biases = [part.bias for part in parts]
    bias = None
    if any(b is not None for b in biases):
        made = [
            torch.zeros(len(part.weight), dtype=weight.dtype) if part.bias is None else part.bias
            for part in parts
        ]
        bias = torch.cat(made)
    for part in parts:
        part.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return matrix(weight, bias, quantization, reaches.get(parts[0]))
