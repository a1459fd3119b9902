"""Which dtype a model is computed in."""

from forebay.models.config import ModelConfig
from forebay.settings import Device, DType, Settings


def compute_dtype(config: ModelConfig, settings: Settings) -> str:
    """Of weights and activations: as asked, else the model's own if that does not overflow.

    Activations of a float16 checkpoint leave float16's range. So it is computed in float32 on a
    CPU, which holds all its numbers, and on a GPU in bfloat16, which takes no more memory.
    """
    if settings.dtype is not DType.AUTO:
        return settings.dtype.value
    if config.dtype != "float16":
        return config.dtype
    return "float32" if settings.device is Device.CPU else "bfloat16"
