"""The rendezvous plug-in for stock torchrun: `torchrun --rdzv-backend=etcd3`.

torch loads this with every torchrun, whatever its backend, so nothing is imported before it is asked for.
"""

from typing import Any

BACKEND = "etcd3"


def etcd3() -> Any:
    """The entry point `torchrun.handlers`: what makes a handler out of torchrun's flags."""
    return _create


def _create(parameters: Any) -> Any:
    from elastic_hieravg.rendezvous.handler import create_handler  # noqa: PLC0415 - see above

    return create_handler(parameters)
