"""Where metrics are served: flags, the environment, and pods."""

import pytest

from elastic_hieravg.config import MetricsPlace, read_metrics_place
from elastic_hieravg.errors import UsageError

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
HERE, EVERYWHERE = "127.0.0.1", "0.0.0.0"


@pytest.mark.parametrize(
    ("port", "host", "environment", "place"),
    [
        (None, None, {}, MetricsPlace(HERE, 9400)),
        ("7", None, {}, MetricsPlace(HERE, 7)),
        ("auto", None, {}, MetricsPlace(HERE, 0)),
        ("off", None, {}, None),
        (None, None, POD, MetricsPlace(EVERYWHERE, 9400)),
        (None, HERE, POD, MetricsPlace(HERE, 9400)),
        (None, "::", {}, MetricsPlace("::", 9400)),
        (None, None, {"HIERAVG_METRICS_PORT": "8", "HIERAVG_METRICS_HOST": "h"}, MetricsPlace("h", 8)),
        ("7", "x", {"HIERAVG_METRICS_PORT": "8", "HIERAVG_METRICS_HOST": "h"}, MetricsPlace("x", 7)),
        (None, None, {"HIERAVG_METRICS_PORT": "off"}, None),
        (None, None, {"HIERAVG_METRICS_PORT": "", "HIERAVG_METRICS_HOST": ""}, MetricsPlace(HERE, 9400)),
    ],
)
def test_flags_come_before_the_environment_before_the_defaults(
    port: str | None, host: str | None, environment: dict[str, str], place: MetricsPlace | None
) -> None:
    assert read_metrics_place(port, host, environment=environment) == place


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", "9400.5", "\u0664", " 7", "9" * 5000])
def test_what_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(UsageError, match="--metrics-port is"):
        read_metrics_place(port, environment={})
