"""How training loops that know nothing of an averager are counted: by the steps their optimizer makes."""

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def on_each_step(
    optimizer: Optimizer, count: Callable[[float], object], *, num_samples: float | Callable[[], float]
) -> RemovableHandle:
    """Have every step counted that the optimizer really makes, with the samples it was made over."""

    def after(stepped: Optimizer, _args: object, _kwargs: object) -> None:
        # Fused optimizers are called even for a step that must be skipped, and find out themselves.
        found_inf = getattr(stepped, "found_inf", None)
        if isinstance(found_inf, Tensor) and bool(found_inf.any()):
            return
        count(num_samples() if callable(num_samples) else num_samples)

    return optimizer.register_step_post_hook(after)
