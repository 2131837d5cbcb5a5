"""What is installed, printed as JSON by a process of its own, which runs this module.

It imports what an agent imports, in the same order. A library that crashes or hangs takes only this process.
"""

import json
import platform
import sys
from collections.abc import Callable
from importlib import metadata

PACKAGES = ("torch", "etcd3", "protobuf", "grpcio", "prometheus-client", "rich")


def main() -> None:
    found: dict[str, object] = {
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }
    found["torch"] = _tried(_torch)
    found["etcd"] = _tried(_etcd)
    print(json.dumps(found))  # noqa: T201 - printing is what it is for


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _tried(probe: Callable[[], dict[str, object]]) -> dict[str, object]:
    try:
        return probe()
    # Whatever a broken installation raises is what was found.
    except Exception as exc:  # noqa: BLE001
        return {"why": f"{type(exc).__name__}: {exc}"[:500]}


def _torch() -> dict[str, object]:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.run import get_args_parser  # noqa: PLC0415

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "accelerator": "" if device is None else device.type,
        "num_accelerators": 0 if device is None else torch.accelerator.device_count(),
        "backend": dist.get_default_backend_for_device("cpu" if device is None else device.type),
        "has_gloo": dist.is_gloo_available(),
        # For flags that are given as PET_ variables.
        "flags": [action.dest for action in get_args_parser()._actions],  # noqa: SLF001
    }


def _etcd() -> dict[str, object]:
    from elastic_hieravg.membership.etcd_stubs import etcd_stubs  # noqa: PLC0415

    stubs = etcd_stubs()
    implementation = sys.modules["google.protobuf.internal.api_implementation"].Type()
    return {"module": stubs.__name__, "implementation": implementation}


if __name__ == "__main__":
    main()
