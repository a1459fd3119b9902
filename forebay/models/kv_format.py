"""How a number of the KV cache is kept, in whatever dtype the model computes.

float32, bfloat16, float16    the number, rounded
int8, fp8_e4m3                number / scale, where scale = largest of the head's vector / largest code; one float32 scale for
                              each token, layer, K/V and head, so that a decode never rewrites what is there
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_DTYPE = torch.float32


@dataclass(frozen=True, slots=True)
class KvFormat:
    """``storage``: dtype of the pages. ``largest``: the code that a vector's largest number gets; 0 = no scales.

    fp8 is kept as bytes: torch's own float8 tensors can be neither indexed nor filled on a CPU.
    """

    name: str
    storage: torch.dtype
    largest: float = 0.0

    @property
    def is_scaled(self) -> bool:
        return self.largest > 0

    @property
    def bound(self) -> float:
        """The largest size of a number that pages of this format can be made of."""
        return torch.finfo(torch.float16 if self.name == "float16" else torch.bfloat16).max

    @property
    def scale_bytes(self) -> int:
        """Bytes that one token's vector of one head takes beside its codes."""
        return SCALE_DTYPE.itemsize if self.is_scaled else 0

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """``rows (N, head_dim)`` -> codes of the same shape, and scales ``(N,)`` if there are any. A vector of zeros has scale 0."""
        if not self.is_scaled:
            return rows.to(self.storage), None
        wide = rows.float()
        scales = wide.abs().amax(-1) / self.largest
        units = (wide / scales.where(scales > 0, 1.0)[:, None]).clamp_(-self.largest, self.largest)
        if self.storage == torch.int8:
            return units.round_().to(torch.int8), scales
        return units.to(torch.float8_e4m3fn).view(torch.uint8), scales

    def decode(self, codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The numbers in ``dtype``: codes ``(..., head_dim)``, scales ``(...)``."""
        if scales is None:
            return codes.to(dtype)
        units = codes.view(torch.float8_e4m3fn) if self.storage == torch.uint8 else codes
        return (units.float() * scales[..., None]).to(dtype)


KV_FORMATS = {
    form.name: form
    for form in (
        KvFormat("float32", torch.float32),
        KvFormat("bfloat16", torch.bfloat16),
        KvFormat("float16", torch.float16),
        KvFormat("int8", torch.int8, 127.0),
        KvFormat("fp8_e4m3", torch.uint8, 448.0),
    )
}


def kv_format(name: str, compute: torch.dtype) -> KvFormat:
    """The format of that name; ``auto`` keeps numbers as they are computed."""
    return KV_FORMATS[str(compute).removeprefix("torch.") if name == "auto" else name]
