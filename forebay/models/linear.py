"""Linear layers that are fast on the CPU too.

On a CPU, weights are kept in oneDNN's blocked layout, so that no call reorders them: at one row this is twice as fast as
`F.linear`, and activation or residual ride in the same kernel, rounded once. Elsewhere this is `F.linear`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_pointwise: Any = torch.ops.mkldnn._linear_pointwise


class Linear:
    """`y = x @ weight.T + bias` for `weight (out, in)`, `bias (out,)` and `x (T, in)`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        assert weight.dim() == 2, weight.shape
        self.out_features, self.in_features = weight.shape
        self._packed = can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """`(T, in)` -> `(T, out)`."""
        if self._packed:
            return _pointwise(x, self._weight, self._bias, "none", [], "")  # type: ignore[no-any-return]
        return F.linear(x, self._weight, self._bias)

    def silu(self, x: Tensor) -> Tensor:
        """`silu(linear(x))`."""
        if self._packed:
            return _pointwise(x, self._weight, self._bias, "swish", [], "")  # type: ignore[no-any-return]
        return F.silu(F.linear(x, self._weight, self._bias))

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """`linear(x) * other`, `other (T, out)`."""
        if self._packed:
            return _pointwise.binary(x, other, self._weight, self._bias, "mul")  # type: ignore[no-any-return]
        return F.linear(x, self._weight, self._bias) * other

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """`linear(x) + other`, `other (T, out)`."""
        if self._packed:
            return _pointwise.binary(x, other, self._weight, self._bias, "add")  # type: ignore[no-any-return]
        return F.linear(x, self._weight, self._bias) + other


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN takes this weight on this machine."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
