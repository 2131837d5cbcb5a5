"""A node's registry: whatever its workers do, counters go on, and every metric is declared from the start."""

import math
import re
import subprocess

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from elastic_hieravg.metrics import catalogue as names
from elastic_hieravg.metrics.catalogue import BY_NAME, CATALOGUE, Cause, Kind
from elastic_hieravg.metrics.registry import SERIES_MAX, USER_NAMES_MAX, Registry
from elastic_hieravg.metrics.samples import Distribution, Key, Samples

STEP_COUNTS = len(BY_NAME[names.STEP_SECONDS].buckets) + 1


def samples(steps: int = 0, *, loss: float | None = None, divergence: float | None = None) -> Samples:
    gauges: dict[Key, float] = {}
    if loss is not None:
        gauges[names.USER_VALUE, ("loss",)] = loss
    if divergence is not None:
        gauges[names.DIVERGENCE, ("global",)] = divergence
    counts = (steps, *[0] * (STEP_COUNTS - 1))
    return Samples(
        step=steps,
        counters={(names.STEPS, ()): float(steps), (names.BADPUT_SECONDS, (Cause.QUIET,)): steps / 2},
        gauges=gauges,
        distributions={(names.STEP_SECONDS, ()): Distribution(counts, steps / 10)},
    )


def exported(registry: Registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(registry.text().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_metric_is_declared_before_there_is_any_sample() -> None:
    text = Registry().text().decode()
    kinds = {Kind.INFO: "gauge"}
    for metric in CATALOGUE:
        assert f"# TYPE {metric.name} {kinds.get(metric.kind, str(metric.kind))}\n" in text
        assert f"# HELP {metric.name} {metric.help}\n" in text
    assert not re.search("^[^#]", text, re.MULTILINE), "there is no sample yet"


def test_everything_that_is_exported_is_in_the_catalogue() -> None:
    registry = filled()
    text = registry.text().decode()
    assert set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)) == set(BY_NAME)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = re.sub("_(bucket|count|sum)$", "", sample.name)
            labels = set(sample.labels) - {"le"}
            assert labels == set(BY_NAME[name if name in BY_NAME else sample.name].labels)
    assert "_created" not in text


def filled() -> Registry:
    """Something of everything."""
    registry = Registry()
    for metric in CATALOGUE:
        labels = ["x"] * len(metric.labels)
        match metric.kind:
            case Kind.COUNTER:
                registry.count(metric.name, *labels, amount=2.5)
            case Kind.GAUGE:
                registry.set_gauge(metric.name, *labels, value=0.5)
            case Kind.HISTOGRAM:
                registry.observe(metric.name, *labels, value=0.3)
            case Kind.INFO:
                registry.set_info(metric.name, *labels)
    registry.take(samples(3, loss=math.nan, divergence=0.1), local_rank=0, process_id=7)
    return registry


@pytest.mark.needs("promtool", apt="prometheus")
def test_promtool_finds_nothing_wrong() -> None:
    for registry in (Registry(), filled()):
        done = subprocess.run(
            ["promtool", "check", "metrics"],
            input=registry.text(),
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_openmetrics_says_the_same() -> None:
    registry = filled()
    text = registry.openmetrics_text().decode()
    assert text.endswith("# EOF\n")
    told = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_openmetrics(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
    }
    plain = exported(registry)
    assert told.keys() == plain.keys()
    assert all(told[key] == plain[key] or math.isnan(plain[key]) for key in told)


def test_counters_go_on_when_a_worker_starts_anew() -> None:
    registry = Registry()
    registry.take(samples(10), local_rank=1, process_id=7)
    registry.take(samples(15), local_rank=1, process_id=7)
    assert registry.value(names.STEPS, "1") == 15
    registry.drop(local_rank=1, process_id=7)
    assert registry.value(names.STEPS, "1") == 15
    # Another process, and then one more that happens to get the first one's number.
    for process_id, total in ((8, 19), (7, 23)):
        registry.take(samples(4), local_rank=1, process_id=process_id)
        assert registry.value(names.STEPS, "1") == total
        registry.drop(local_rank=1, process_id=process_id)
    assert registry.value(names.BADPUT_SECONDS, "quiet") == 23 / 2
    found = exported(registry)
    assert found["hieravg_step_seconds_count", (("local_rank", "1"),)] == 23
    assert found["hieravg_step_seconds_sum", (("local_rank", "1"),)] == pytest.approx(2.3)


def test_a_number_that_goes_back_takes_nothing_away() -> None:
    registry = Registry()
    for steps, total in ((10, 10), (4, 10), (12, 18)):
        registry.take(samples(steps), local_rank=0, process_id=7)
        assert registry.value(names.STEPS, "0") == total


def test_workers_that_share_a_series_are_added_up() -> None:
    registry = Registry()
    for local_rank in (0, 1):
        registry.take(samples(4), local_rank=local_rank, process_id=7 + local_rank)
    assert registry.value(names.BADPUT_SECONDS, "quiet") == 4.0
    registry.set_total(names.BADPUT_SECONDS, "quiet", value=3.0)
    registry.set_total(names.BADPUT_SECONDS, "quiet", value=2.0)
    assert registry.value(names.BADPUT_SECONDS, "quiet") == 7.0, "what the agent adds does not go back"


def test_gauges_vanish_with_their_worker() -> None:
    registry = Registry()
    registry.take(samples(1, loss=2.0, divergence=0.1), local_rank=0, process_id=7)
    registry.take(samples(1, loss=3.0, divergence=0.4), local_rank=1, process_id=8)
    assert registry.value(names.USER_VALUE, "loss", "0") == 2.0
    assert registry.value(names.DIVERGENCE, "global") == 0.4
    registry.drop(local_rank=1, process_id=8)
    assert registry.value(names.USER_VALUE, "loss", "1") is None
    assert registry.value(names.DIVERGENCE, "global") == 0.1
    registry.drop(local_rank=0, process_id=7)
    assert registry.value(names.DIVERGENCE, "global") is None


def test_a_loss_that_is_none_is_shown() -> None:
    registry = Registry()
    registry.take(samples(1, loss=math.nan, divergence=math.inf), local_rank=0, process_id=7)
    registry.take(samples(1, loss=1.0, divergence=0.1), local_rank=1, process_id=8)
    value = registry.value(names.USER_VALUE, "loss", "0")
    assert value is not None
    assert math.isnan(value)
    assert registry.value(names.DIVERGENCE, "global") == math.inf


def test_names_of_scripts_are_bounded() -> None:
    registry = Registry()
    for local_rank in range(4):
        gauges: dict[Key, float] = {
            (names.USER_VALUE, (f"value_{local_rank}_{index:03}",)): 1.0 for index in range(50)
        }
        registry.take(Samples(gauges=gauges), local_rank=local_rank, process_id=1)
    assert registry.text().count(b"\nhieravg_user_value{") == USER_NAMES_MAX


def test_series_are_bounded() -> None:
    registry = Registry()
    for process_id in range(SERIES_MAX // 500 + 2):
        counters: dict[Key, float] = {
            (names.EXPOSED_SECONDS, (f"{process_id}-{each}",)): 1.0 for each in range(500)
        }
        registry.take(Samples(counters=counters), local_rank=0, process_id=process_id)
        registry.drop(local_rank=0, process_id=process_id)
    assert registry.text().count(b"\nhieravg_round_exposed_seconds_total{") == SERIES_MAX


def test_gauges_of_the_agent_are_replaced_together() -> None:
    registry = Registry()
    registry.set_gauges(names.NODES, {("training",): 3, ("lost",): 1})
    registry.set_gauges(names.NODES, {("training",): 4})
    assert registry.value(names.NODES, "training") == 4
    assert registry.value(names.NODES, "lost") is None


def test_what_is_of_now_is_set_before_each_collection() -> None:
    times = iter(range(1, 10))
    registry = Registry(refresh=lambda: registry.set_gauge(names.GOODPUT, value=float(next(times))))
    assert [registry.value(names.GOODPUT) for _ in range(3)] == [1.0, 2.0, 3.0]
