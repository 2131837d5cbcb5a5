"""Machines that are well, to be made ill one thing at a time; and examinations without the real machine."""

import argparse
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from elastic_hieravg.cli import doctor
from elastic_hieravg.cli.run import known_variables
from elastic_hieravg.doctor.children import Lookup, Question
from elastic_hieravg.doctor.examination import Probes, examine
from elastic_hieravg.doctor.findings import Finding, Section, Severity
from elastic_hieravg.doctor.machine import Interface, Machine, Mount
from elastic_hieravg.doctor.software import Software

GIB = 1 << 30
SOFTWARE = Software(
    python="3.11.7",
    versions={"torch": "2.13.0+cpu", "etcd3": "0.12.0", "protobuf": "7.36.2", "grpcio": "1.85.1"},
    backend="gloo",
    has_gloo=True,
    flags=("nnodes", "nproc_per_node", "rdzv_endpoint", "rdzv_conf"),
    etcd_module="etcd3.etcdrpc",
)
MACHINE = Machine(
    host_name="h1",
    cores=8.0,
    memory_bytes=64 * GIB,
    available_bytes=60 * GIB,
    shared_memory=Mount("tmpfs", 32 * GIB, 32 * GIB),
    open_files_max=65536,
    locked_bytes_max=None,
    ephemeral_ports=(32768, 60999),
    interfaces=(Interface("lo", ("127.0.0.1",)), Interface("eth0", ("10.0.0.1",), 10000)),
    root_process=("/opt/hieravg/bin/python", "/opt/hieravg/bin/hieravg", "run"),
)


def only(findings: Iterable[Finding], check: str) -> Finding:
    """The finding of a check that has one."""
    (found,) = [each for each in findings if each.check == check]
    return found


def severities(findings: Iterable[Finding]) -> set[Severity]:
    return {each.severity for each in findings}


def read_flags(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    doctor.add_parser(commands)
    flags = parser.parse_args(["doctor", *arguments])
    flags.step_s = None if flags.step_s is None else float(flags.step_s)
    return flags


def examined(
    *arguments: str,
    machine: Machine = MACHINE,
    software: Software = SOFTWARE,
    names: Mapping[str, tuple[str, ...]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Section]:
    """The real settings on a machine that is made up. `names`: what resolves, and to what."""
    known = {"h1": ("10.0.0.1",), "127.0.0.1": ("127.0.0.1",)} | dict(names or {})

    def look_up(questions: Collection[Question]) -> dict[Question, Lookup]:
        return {
            each: Lookup(each.name, () if each.is_reverse else known.get(each.name, ()), 0.01, "no such name")
            for each in questions
        }

    probes = Probes(lambda: replace(software), lambda: machine, look_up)
    sections = examine(
        read_flags("--metrics-port", "auto", *arguments),
        environment=environment or {},
        known_flags=known_variables(),
        probes=probes,
    )
    return {each.name: each for each in sections}
