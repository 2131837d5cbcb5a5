"""A real Prometheus for the tests, on a free port and in a folder of its own, that scrapes every second.

What it scrapes is told by node, through a file: as the README shows for machines without Kubernetes.
"""

import contextlib
import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.membership.etcd_servers import free_ports

WITHIN_S = 90.0
POLL_S = 0.1
ANSWER_S = 30.0
SCRAPE_S = 1.0

_SETTINGS = """\
global:
  scrape_interval: 1s
  scrape_timeout: 1s
  evaluation_interval: 1s
rule_files:
  - {rules}
scrape_configs:
  - job_name: hieravg
    file_sd_configs:
      - files: [{targets}]
        refresh_interval: 1s
"""


@dataclass(frozen=True, slots=True)
class Series:
    """`points`: times and values."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points]

    @property
    def has_number(self) -> bool:
        return any(math.isfinite(value) for value in self.values)


class PrometheusServer:
    def __init__(self, folder: Path, *, rules: Path) -> None:
        folder.mkdir(parents=True)
        self._targets_path = folder / "targets.json"
        self._targets: dict[str, dict[str, Any]] = {}
        self._targets_path.write_text("[]")
        settings = folder / "prometheus.yml"
        settings.write_text(_SETTINGS.format(rules=rules, targets=self._targets_path))
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        self._log = folder / "log"
        command = ["setpriv", "--pdeathsig", "KILL", "prometheus", f"--config.file={settings}"]
        command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=ANSWER_S)
        finally:
            self._process.kill()
            self._process.wait()

    def scrape(self, node: str, port: int, *, training_job: str) -> None:
        """From now on scrape this port as this node, and no other as the same."""
        labels = {"training_job": training_job, "node": node}
        self._targets[node] = {"targets": [f"127.0.0.1:{port}"], "labels": labels}
        new = self._targets_path.with_suffix(".new")
        new.write_text(json.dumps(list(self._targets.values())))
        new.rename(self._targets_path)

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WITHIN_S
        while not condition():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline_s, f"not within {WITHIN_S:.0f} s: {what}"
            time.sleep(POLL_S)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=ANSWER_S) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    # --- its API ----------------------------------------------------------------------------------------------

    def query(self, expr: str, *, at_s: float | None = None) -> list[Series]:
        """The newest value of each series."""
        told = self._get("query", query=expr, **({} if at_s is None else {"time": at_s}))
        assert told["resultType"] == "vector", expr
        return [_series(each["metric"], [each["value"]]) for each in told["result"]]

    def query_range(self, expr: str, *, begin_s: float, end_s: float) -> list[Series]:
        told = self._get("query_range", query=expr, start=begin_s, end=end_s, step=SCRAPE_S)
        return [_series(each["metric"], each["values"]) for each in told["result"]]

    def label_values(self, series: str, label: str) -> list[str]:
        found: list[str] = self._get(f"label/{label}/values", **{"match[]": series})
        return found

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def alerts(self) -> dict[str, dict[str, Any]]:
        return {each["labels"]["alertname"]: each for each in self._get("alerts")["alerts"]}

    def _get(self, path: str, **parameters: object) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as exc:
            raise AssertionError(f"{parameters}: {exc.read().decode()}") from exc


@contextlib.contextmanager
def prometheus_server(folder: Path, *, rules: Path) -> Iterator[PrometheusServer]:
    server = PrometheusServer(folder, rules=rules)
    try:
        server.wait_for("Prometheus is ready", server.is_ready)
        yield server
    finally:
        server.close()


def _series(labels: Mapping[str, str], points: list[tuple[float, str]]) -> Series:
    return Series(labels, tuple((float(at_s), float(value)) for at_s, value in points))
