"""What metrics cost a training step: counted, told, served and scraped every second, beside nothing of it.

One worker with steps of about 10 ms under `hieravg run`, with metrics and without, in turn. Exit code 1, and a
line on stderr for each, if a figure that was promised is missed.
"""

import argparse
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from report.running import add_flags, begin, finish

sys.path.append(str(Path(__file__).parent.parent))

from tests.membership.etcd_servers import free_ports

SCRIPT = Path(__file__).parent / "metrics_script.py"
SCRAPE_S = 1.0
BOUND_S = 600.0
# The promised figures: in the training thread, and in all, of a step of 10 ms.
CALL_US_MAX = 20.0
SHARE_MAX = 0.005
STEP_US = 10_000.0


@dataclass(frozen=True, slots=True)
class Run:
    """`call_us`: of `averager.step()`, in the training thread. `beside_us`: of all others, for each step."""

    is_counted: bool
    step_s: float
    call_us: float
    beside_us: float
    load: float


def measure(folder: Path, *, is_counted: bool, num_steps: int) -> Run:
    port, result = free_ports(1)[0], folder / "result"
    command = [str(Path(sys.executable).with_name("hieravg")), "run", "--standalone", "--nproc-per-node=1"]
    command += ["--metrics-port", str(port) if is_counted else "off", str(SCRIPT)]
    command += ["--result", str(result), "--steps", str(num_steps), *([] if is_counted else ["--uncounted"])]
    with scraping(port) if is_counted else contextlib.nullcontext():
        subprocess.run(command, check=True, timeout=BOUND_S, capture_output=True)
    return Run(is_counted, **json.loads(result.read_text()), load=os.getloadavg()[0])


@contextlib.contextmanager
def scraping(port: int) -> Iterator[None]:
    """As Prometheus and somebody who looks at the page would, all the time."""
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(SCRAPE_S):
            for path in ("/metrics", "/status"):
                with contextlib.suppress(OSError, http.client.HTTPException):
                    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SCRAPE_S)
                    connection.request("GET", path)
                    connection.getresponse().read()
                    connection.close()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def middle(runs: Sequence[Run], name: str, *, is_counted: bool) -> float:
    return statistics.median(float(getattr(run, name)) for run in runs if run.is_counted == is_counted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="of each")
    parser.add_argument("--steps", type=int, default=1000, help="of each run")
    add_flags(parser, quick="one short run of each")
    arguments = parser.parse_args()
    run = begin("metrics", arguments)
    num_repeats, num_steps = (1, 100) if run.is_quick else (arguments.repeats, arguments.steps)
    runs = []
    for _ in range(num_repeats):
        for is_counted in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                runs.append(measure(Path(folder), is_counted=is_counted, num_steps=num_steps))
    print(
        "| metrics | step, ms | averager.step(), us | other threads, us a step | load |\n|---|---|---|---|---|"
    )
    for is_counted, name in ((True, "counted, served, scraped every second"), (False, "nothing of it")):
        cells = [middle(runs, each, is_counted=is_counted) for each in ("call_us", "beside_us", "load")]
        step_ms = 1e3 * middle(runs, "step_s", is_counted=is_counted)
        print(f"| {name} | {step_ms:.3f} | {cells[0]:.2f} | {cells[1]:.1f} | {cells[2]:.1f} |")
    call_us = middle(runs, "call_us", is_counted=True)
    more_us = sum(
        middle(runs, name, is_counted=True) - middle(runs, name, is_counted=False)
        for name in ("call_us", "beside_us")
    )
    ratio = middle(runs, "step_s", is_counted=True) / middle(runs, "step_s", is_counted=False)
    print(
        f"\nmetrics cost {more_us:.1f} us of processor time a step, {more_us / STEP_US:.2%} of 10 ms; "
        f"steps took {ratio:.4f} times as long"
    )
    figures = {"more_us": more_us, "step_us": STEP_US, "num_repeats": num_repeats}
    figures_and_runs = {**figures, "runs": [asdict(each) for each in runs]}
    return finish(run, figures=figures_and_runs, missed=misses(call_us, more_us))


def misses(call_us: float, more_us: float) -> list[str]:
    """The promised figures that were not reached."""
    found = []
    if call_us >= CALL_US_MAX:
        found.append(f"a step took {call_us:.1f} us in the training thread, promised < {CALL_US_MAX:.0f} us")
    if more_us / STEP_US >= SHARE_MAX:
        found.append(f"metrics cost {more_us / STEP_US:.2%} of a step, promised < {SHARE_MAX:.1%}")
    return found


if __name__ == "__main__":
    sys.exit(main())
