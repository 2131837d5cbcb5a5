"""Whether what is installed goes together: Python, torch and its backend, what talks to etcd. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from elastic_hieravg.doctor.findings import Finding, absent, note, ok, problem

PYTHON_MIN = (3, 11)
TESTED_TORCH = "2.13"
INSTALL = "install it again: pip install elastic_hieravg"


@dataclass(frozen=True, slots=True)
class Software:
    """What the probe found. `why`: it found nothing, because. `torch_why`, `etcd_why`: that does not load."""

    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    accelerator: str = ""
    num_accelerators: int = 0
    backend: str = ""
    has_gloo: bool = False
    flags: tuple[str, ...] = ()
    etcd_module: str = ""
    torch_why: str = ""
    etcd_why: str = ""
    why: str = ""


def read_software(answer: Mapping[str, object] | str) -> Software:
    if isinstance(answer, str):
        return Software(why=answer)
    versions, torch, etcd = (_object(answer.get(name)) for name in ("versions", "torch", "etcd"))
    flags, number = torch.get("flags"), torch.get("num_accelerators")
    return Software(
        python=str(answer.get("python", "")),
        versions={name: str(version) for name, version in versions.items()},
        accelerator=str(torch.get("accelerator", "")),
        num_accelerators=number if isinstance(number, int) else 0,
        backend=str(torch.get("backend", "")),
        has_gloo=torch.get("has_gloo") is True,
        flags=tuple(str(each) for each in flags) if isinstance(flags, list) else (),
        etcd_module=str(etcd.get("module", "")),
        torch_why=str(torch.get("why", "")),
        etcd_why=str(etcd.get("why", "")),
    )


def check_software(software: Software, *, needs_etcd: bool) -> Iterator[Finding]:
    if software.why:
        yield problem("software", f"a process that imports torch and etcd3 fails: {software.why}", INSTALL)
        return
    yield _python(software.python)
    yield _torch(software)
    if not software.torch_why:
        yield _accelerator(software)
        yield _gloo(software)
    yield _etcd(software, needs_etcd=needs_etcd)


def _python(version: str) -> Finding:
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if found < PYTHON_MIN:
        return problem("Python", f"{version}, older than 3.11", "take Python 3.11 or newer")
    return ok("Python", version)


def _torch(software: Software) -> Finding:
    version = software.versions.get("torch", "")
    if software.torch_why:
        found = f"torch {version or 'is not installed'}: {software.torch_why}"
        return problem("torch", found, "install torch for this machine: pip install torch")
    if not f"{version}.".startswith(f"{TESTED_TORCH}."):
        return note("torch", f"{version}; {TESTED_TORCH} is the version that is tested", "try `hieravg demo`")
    return ok("torch", version)


def _accelerator(software: Software) -> Finding:
    if not software.accelerator:
        return ok("accelerator", f"none; torch's backend would be {software.backend}")
    found = f"{software.num_accelerators} {software.accelerator}; torch's backend would be {software.backend}"
    return note("accelerator", found, "averages go through the memory of the CPU; nothing was tested on a GPU")


def _gloo(software: Software) -> Finding:
    if software.has_gloo:
        return ok("gloo", "there")
    return problem("gloo", "this torch has no gloo", "install a build of torch that has: nodes average over it")


def _etcd(software: Software, *, needs_etcd: bool) -> Finding:
    names = {"etcd3": "etcd3", "protobuf": "protobuf", "grpcio": "grpc"}
    found = ", ".join(f"{name} {software.versions.get(key, 'missing')}" for key, name in names.items())
    if not software.etcd_why:
        return ok("etcd client", f"{found}, as {software.etcd_module}")
    if not needs_etcd:
        return absent("etcd client", f"not needed; {found} do not load")
    advice = "pip install etcd3 protobuf grpcio, or etcd-sdk-python in place of etcd3"
    return problem("etcd client", f"{found}: {software.etcd_why}", advice)


def _object(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
