"""Panels, queries, variables and annotations, as all dashboards here have them.

What a panel shows is said in `training.py` and `membership.py`; how it looks is said here, once. Invariant: no
panel without a title, a description, a unit and a legend for each of its queries.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model

from elastic_hieravg.metrics import catalogue as names

Panel = timeseries.Panel | stat.Panel | bargauge.Panel

TAG = "hieravg"
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
# What every series here is chosen by. One job at a time: sums over several jobs say nothing.
JOB = 'training_job="$training_job"'
NODE = 'node=~"$node"'
LEVEL = 'level=~"$level"'
# Long enough for a rate at any zoom; Grafana computes it from the scrape interval.
WINDOW = "$__rate_interval"
STAT_HEIGHT = 4
HEIGHT = 8

GREEN, YELLOW, RED, BLUE = "green", "yellow", "red", "blue"


@dataclass(frozen=True, slots=True)
class Query:
    """`is_instant`: only the newest value is wanted."""

    expr: str
    legend: str
    is_instant: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    """The color of small values, and from where on another one holds."""

    base: str
    steps: tuple[tuple[float, str], ...] = ()

    def build(self) -> dashboard.ThresholdsConfig:
        steps = [model.Threshold(value=None, color=self.base)]
        steps += [model.Threshold(value=value, color=color) for value, color in self.steps]
        return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


PLAIN = Bounds(GREEN)
# A job that trains less than 80 % of its time is what the alert calls low.
GOODPUT_BOUNDS = Bounds(RED, ((0.8, YELLOW), (0.9, GREEN)))
# From one on, somebody has to look.
NONE_WANTED = Bounds(GREEN, ((1, RED),))


# --- PromQL ---------------------------------------------------------------------------------------------------


def of(metric: str, *matchers: str) -> str:
    """The series of the chosen job and nodes."""
    return f"{metric}{{{','.join((JOB, NODE, *matchers))}}}"


def of_job(metric: str, *matchers: str) -> str:
    """The series of the chosen job, of all nodes: what nodes tell of the job, not of themselves."""
    return f"{metric}{{{','.join((JOB, *matchers))}}}"


def rate(metric: str, *matchers: str, window: str = WINDOW) -> str:
    return f"rate({of(metric, *matchers)}[{window}])"


def increase(metric: str, *matchers: str, window: str = WINDOW) -> str:
    return f"increase({of(metric, *matchers)}[{window}])"


def total(expr: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) ({expr})" if by else f"sum({expr})"


def quantile(share: float, metric: str, *matchers: str, by: Sequence[str] = (), window: str = WINDOW) -> str:
    buckets = total(rate(f"{metric}_bucket", *matchers, window=window), *by, "le")
    return f"histogram_quantile({share}, {buckets})"


def worker_seconds(*by: str, window: str = WINDOW) -> str:
    """All time that workers had: in steps, and not."""
    productive = total(rate(names.PRODUCTIVE_SECONDS, window=window), *by)
    return f"({productive} + {total(rate(names.BADPUT_SECONDS, window=window), *by)})"


def goodput(*by: str, window: str = WINDOW) -> str:
    productive = total(rate(names.PRODUCTIVE_SECONDS, window=window), *by)
    return f"{productive} / {worker_seconds(*by, window=window)}"


# --- panels ---------------------------------------------------------------------------------------------------


def number(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str,
    bounds: Bounds = PLAIN,
    words: Mapping[str, tuple[str, str]] | None = None,
    decimals: float | None = None,
    span: int = 3,
    no_value: str = "none",
) -> Panel:
    """One number. `words`: a value shown as a word, with its color."""
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .height(STAT_HEIGHT)
        .span(span)
        .unit(unit)
        .thresholds(bounds.build())
        .no_value(no_value)
        .graph_mode(common_model.BigValueGraphMode.NONE)
        .color_mode(common_model.BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target(query, 0))
    )
    if words:
        options = {
            value: model.ValueMappingResult(text=text, color=color) for value, (text, color) in words.items()
        }
        panel = panel.mappings([model.ValueMap(options=options)])
    return panel if decimals is None else panel.decimals(decimals)


def lines(
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    bounds: Bounds | None = None,
    is_stacked: bool = False,
    is_stepped: bool = False,
    is_rare: bool = False,
    span: int = 8,
    low: float | None = 0,
    high: float | None = None,
) -> Panel:
    """Values over time. `bounds` draws lines where a value begins to be bad; `is_stepped` is for whole numbers
    that hold until they change; `is_rare` shows points, for what happens now and then.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .height(HEIGHT)
        .span(span)
        .unit(unit)
        .line_width(1)
        .fill_opacity(30 if is_stacked else 5)
        .thresholds((bounds or PLAIN).build())
        .legend(
            common.VizLegendOptions()
            .show_legend(show_legend=True)
            .display_mode(common_model.LegendDisplayMode.TABLE)
            .placement(common_model.LegendPlacement.BOTTOM)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_model.TooltipDisplayMode.MULTI)
            .sort(common_model.SortOrder.DESCENDING)
        )
    )
    if bounds is not None:
        style = common.GraphThresholdsStyleConfig().mode(common_model.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds_style(style)
    if is_stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A"))
    if is_stepped:
        panel = panel.line_interpolation(common_model.LineInterpolation.STEP_AFTER)
    if is_rare:
        panel = panel.show_points(common_model.VisibilityMode.ALWAYS).point_size(6)
    if low is not None:
        panel = panel.min(low)
    if high is not None:
        panel = panel.max(high)
    return panel.targets([_target(query, index) for index, query in enumerate(queries)])


def bars(
    title: str, description: str, *queries: Query, unit: str, bounds: Bounds = Bounds(BLUE), span: int = 8
) -> Panel:
    """One bar for each series, by its newest value."""
    return (
        bargauge.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .height(HEIGHT)
        .span(span)
        .unit(unit)
        .min(0)
        .no_value("none")
        .thresholds(bounds.build())
        .orientation(common_model.VizOrientation.HORIZONTAL)
        .display_mode(common_model.BarGaugeDisplayMode.GRADIENT)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .targets([_target(query, index) for index, query in enumerate(queries)])
    )


def _target(query: Query, index: int) -> prometheus.Dataquery:
    target = (
        prometheus.Dataquery()
        .datasource(SOURCE)
        .ref_id(chr(ord("A") + index))
        .expr(query.expr)
        .legend_format(query.legend)
    )
    return target.instant() if query.is_instant else target.range()


# --- the dashboard around them --------------------------------------------------------------------------------


class _Annotation(model.AnnotationQuery):
    """The fields that Prometheus' annotations have and the typed model lacks."""

    def __init__(self, *, name: str, expr: str, color: str, text: str) -> None:
        super().__init__(name=name, datasource=SOURCE, icon_color=color, expr=expr, built_in=None)
        self._texts = {"titleFormat": "{{reason}}", "textFormat": text, "tagKeys": "training_job,reason"}

    def to_json(self) -> dict[str, object]:
        target = {"expr": self.expr, "refId": "Anno", "legendFormat": "", "range": True, "instant": False}
        return super().to_json() | self._texts | {"target": target}


@dataclass(frozen=True, slots=True)
class _Built(Builder[model.AnnotationQuery]):
    """A model in the place of its builder."""

    annotation: _Annotation

    def build(self) -> model.AnnotationQuery:
        return self.annotation


def _changes_as_annotations() -> list[Builder[model.AnnotationQuery]]:
    """Who goes and comes, on all panels. Nodes count the same generations: the one that saw most is right."""

    def expr(matcher: str) -> str:
        return f"max by (training_job, reason) (increase({of_job(names.GENERATIONS, matcher)}[{WINDOW}])) > 0"

    def annotation(name: str, matcher: str, color: str, text: str) -> _Built:
        made = _Annotation(name=name, expr=expr(matcher), color=color, text=text)
        return _Built(made)

    return [
        annotation("Nodes gone", 'reason="loss"', RED, "a generation without a node that was lost or left"),
        annotation("Nodes joined", 'reason="join"', GREEN, "a generation with new nodes"),
        annotation(
            "Other generations", 'reason!~"loss|join"', BLUE, "a generation with the same nodes, or the first"
        ),
    ]


def build_dashboard(
    *, uid: str, title: str, description: str, rows: Sequence[tuple[str, Sequence[Panel]]]
) -> str:
    """The JSON that Grafana reads. Panels are numbered in their order, so that links to them stay right."""
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .editable()
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .time("now-6h", "now")
        .refresh("30s")
        .timezone("browser")
        .variables(_variables())
        .annotations(_changes_as_annotations())
        .link(
            dashboard.DashboardLink("All of hieravg")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(as_dropdown=False)
            .include_vars(include_vars=True)
            .keep_time(keep_time=True)
        )
    )
    panel_id = 0
    for row_title, panels in rows:
        panel_id += 1
        made = made.with_row(dashboard.Row(row_title).id(panel_id))
        for panel in panels:
            panel_id += 1
            made = made.with_panel(panel.id(panel_id))
    return json.dumps(json.loads(JSONEncoder().encode(made.build())), indent=2) + "\n"


def _variables() -> list[Builder[model.VariableModel]]:
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    job = _query_variable(
        "training_job",
        "Job",
        f"label_values({names.GENERATION}, training_job)",
        "the job, as the scrape names it",
    )
    node = _query_variable(
        "node",
        "Node",
        f"label_values({of_job(names.GENERATION)}, node)",
        "the nodes to show; none chosen is all",
    )
    level = _query_variable(
        "level",
        "Level",
        f"label_values({of_job(names.ROUNDS)}, level)",
        "levels of the hierarchy, in panels of rounds",
    )
    # New nodes and levels are in it at once, without another look at what there is.
    everything = model.VariableOption(selected=True, text=["All"], value=["$__all"])
    chosen = (
        each.multi(multi=True).include_all(include_all=True).all_value(".+").current(everything)
        for each in (node, level)
    )
    return [source, job, *chosen]


def _query_variable(name: str, label: str, query: str, description: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(SOURCE)
        .query({"query": query, "refId": name})
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.NATURAL_ASC)
    )
