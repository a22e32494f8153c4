"""What MindSpeed compiles with CANN: its extensions, the schemas of their C++ functions, and kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from .training import (
    counted,
    grouped_products,
    npu_moe_token_permute,
    npu_moe_token_unpermute,
    npu_rotary_position_embedding,
    sizes_of,
    wide,
)

__all__ = ["EXTENSIONS", "Function"]
product = grouped_products


@dataclass(frozen=True)
class Function:
    """``schemas``: one for each of its C++ overloads. ``adapter`` makes what is called of the operator."""

    kernel: Callable
    schemas: tuple[str, ...]
    differentiable: bool = False
    adapter: Callable | None = None

    @property
    def name(self) -> str:
        return self.kernel.__name__


@counted
def npu_gmm(x, weight, bias, group_list, group_type, group_list_type):
    assert not bias
    return product(
        x, weight, group_list=group_list, group_type=group_type, group_list_type=group_list_type or 0,
        split_item=3,
    )  # fmt: skip


@counted
def npu_gmm_backward(grad, x, weight, group_list, group_list_type):
    """Gradients of x and weight; none of a bias."""
    by_inner = dict(group_list=group_list, group_type=2, group_list_type=group_list_type or 0, split_item=3)
    dx, _, none = npu_gmm_backward_fusion.__wrapped__(grad, weight, group_list, group_list_type)
    dw = [product([a.transpose(-1, -2)], [g], **by_inner)[0] for a, g in zip(x, grad, strict=True)]
    return dx, [d.reshape(w.shape) for d, w in zip(dw, weight, strict=True)], none


@counted
def npu_gmm_backward_fusion(grad, weight, group_list, group_list_type):
    """The gradient of x only."""
    transposed = [w.transpose(-1, -2) for w in weight]
    by_row = dict(group_list=group_list, group_type=0, group_list_type=group_list_type or 0, split_item=3)
    return product(grad, transposed, **by_row), [], []


@counted
def npu_groupmatmul_add_fp32(x, weight, group_list, grad):
    """Adds x^T weight of each group of rows to grad: [groups, in, out], or its first two as one."""
    sizes = sizes_of(group_list, 0)
    into = grad.view(len(sizes), x.shape[1], weight.shape[1])
    for group, (rows, others) in enumerate(zip(x.split(sizes), weight.split(sizes), strict=True)):
        into[group] += wide(rows).T @ wide(others)


@counted
def npu_matmul_add_fp32(x, weight, C):
    C += wide(x).T @ wide(weight)


@counted
def npu_apply_fused_adamw_v2(
    param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, state_step, lr, beta1, beta2, weight_decay, eps,
    amsgrad, maximize,
):  # fmt: skip
    """AdamW in place, in float32; ``state_step`` counts from 1."""
    assert not amsgrad, "AMSGrad is not here"
    grad, step = (-grad if maximize else grad).to(param.dtype), int(state_step)
    param.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    divisor = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(eps)
    param.addcdiv_(exp_avg, divisor, value=-lr / (1 - beta1**step))


def without_amsgrad(operator):
    """Without it, the caller gives a tensor of the host that is not looked at."""

    def call(*args):
        return operator(*args[:4], args[4] if args[11] else None, *args[5:])

    return call


@counted
def npu_ring_attention_update(
    prev_attn_out, prev_softmax_max, prev_softmax_sum, cur_attn_out, cur_softmax_max, cur_softmax_sum,
    actual_seq_qlen=None, layout="SBH",
):  # fmt: skip
    """One attention over the keys of two: output, maximum and sum of its softmax.

    SBH: outputs [tokens, batch, heads x channels], the others [batch, heads, tokens, 8]. TND: outputs
    [tokens, heads, channels]; the others [tokens, heads, 8] by name, in memory [heads, tokens, 8] for each
    sequence, which ``actual_seq_qlen`` (from 0) delimits.
    """
    maximum = torch.maximum(prev_softmax_max, cur_softmax_max)
    sums = [
        prev_softmax_sum * (prev_softmax_max - maximum).exp(),
        cur_softmax_sum * (cur_softmax_max - maximum).exp(),
    ]
    total = sums[0] + sums[1]
    output = 0.0
    for attention, part in zip((prev_attn_out, cur_attn_out), sums, strict=True):
        share = (part / total)[..., 0]
        if layout == "SBH":
            share = share.permute(2, 0, 1)
            each = wide(attention).unflatten(-1, (share.shape[-1], -1)) * share.unsqueeze(-1)
            each = each.flatten(-2)
        else:
            assert layout == "TND", f"layout {layout} is not here"
            each = wide(attention) * by_token(share, actual_seq_qlen.tolist()).unsqueeze(-1)
        output = output + each
    return [output.to(prev_attn_out.dtype), maximum, total]


def by_token(share: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """[tokens, heads], of numbers that are [heads, tokens] within each sequence."""
    heads, flat = share.shape[1], share.reshape(-1)
    return torch.cat([flat[a * heads : b * heads].view(heads, -1).T for a, b in pairwise(ends)])


def grouped(overloads: dict[str, str], kernel, before: str, after: str, returned: str) -> Function:
    """A function with a list of group sizes in two forms."""
    return Function(kernel, tuple(
        f"{kernel.__name__}{overload}({before}, {form} group_list{after}) -> {returned}"
        for overload, form in overloads.items()
    ))  # fmt: skip


_forms = {"": "Tensor?", ".list": "int[]?"}
_three = "(Tensor[], Tensor[], Tensor[])"
_gmm = (
    grouped(_forms, npu_gmm, "Tensor[] x, Tensor[] weight, Tensor[] bias",
            ", int? group_type, int? group_list_type", "Tensor[]"),
    grouped(_forms, npu_gmm_backward, "Tensor[] grad, Tensor[] x, Tensor[] weight", ", int? group_list_type",
            _three),
    grouped(_forms, npu_gmm_backward_fusion, "Tensor[] grad, Tensor[] weight", ", int? group_list_type",
            _three),
)  # fmt: skip


def alone(kernel, schema: str, **options) -> tuple[Function]:
    return (Function(kernel, (f"{kernel.__name__}{schema}",), **options),)


EXTENSIONS: dict[str, tuple[Function, ...]] = {
    "grouped_matmul": _gmm,
    "grouped_matmul_v2": _gmm,
    "npu_groupmatmul_add_fp32": alone(
        npu_groupmatmul_add_fp32, "(Tensor x, Tensor weight, Tensor group_list, Tensor(a!) grad) -> ()"
    ),
    "npu_matmul_add_fp32": alone(npu_matmul_add_fp32, "(Tensor x, Tensor weight, Tensor(a!) C) -> ()"),
    "npu_apply_fused_adamw_v2": alone(
        npu_apply_fused_adamw_v2,
        "(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
        "Tensor(d!)? max_exp_avg_sq, Tensor state_step, float lr, float beta1, float beta2, "
        "float weight_decay, float eps, bool amsgrad, bool maximize) -> ()",
        adapter=without_amsgrad,
    ),
    "npu_rotary_position_embedding": alone(
        npu_rotary_position_embedding, "(Tensor x, Tensor cos, Tensor sin, int mode=0) -> Tensor",
        differentiable=True,
    ),
    "npu_ring_attention_update": alone(
        npu_ring_attention_update,
        "(Tensor prev_attn_out, Tensor prev_softmax_max, Tensor prev_softmax_sum, Tensor cur_attn_out, "
        'Tensor cur_softmax_max, Tensor cur_softmax_sum, Tensor? actual_seq_qlen=None, str layout="SBH") '
        "-> Tensor[]",
    ),
    "npu_moe_token_permute": alone(
        npu_moe_token_permute,
        "(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) "
        "-> (Tensor, Tensor)",
        differentiable=True,
    ),
    "npu_moe_token_unpermute": alone(
        npu_moe_token_unpermute,
        "(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False, "
        "int[]? restore_shape=None) -> Tensor",
        differentiable=True,
    ),
}  # fmt: skip
