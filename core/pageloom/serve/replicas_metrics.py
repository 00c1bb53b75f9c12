"""The metrics of several engines as one text, each sample with the label ``replica``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from pageloom.serve.wire import Inspection


def merge(found: Mapping[int, Inspection]) -> Inspection:
    """That of all replicas, by number. What is of this moment is added up, and said of each."""
    registry = CollectorRegistry()
    registry.register(_Merged(found))
    problems = [f"replica {n}: {each.problem}" for n, each in found.items() if each.problem]
    return Inspection(
        generate_latest(registry),
        sum(each.open_requests for each in found.values()),
        sum(each.aborted_requests for each in found.values()),
        sum(each.blocks_used for each in found.values()),
        "; ".join(problems),
    )


class _Merged(Collector):
    def __init__(self, found: Mapping[int, Inspection]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for number, inspection in self._found.items():
            for family in text_string_to_metric_families(inspection.metrics.decode()):
                mine = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                mine.samples += [
                    sample._replace(labels={**sample.labels, "replica": str(number)})
                    for sample in family.samples
                ]
        yield from families.values()
        yield GaugeMetricFamily("pageloom_replicas", "Engines that run.", value=len(self._found))
        each = GaugeMetricFamily(
            "pageloom_replica_open_requests", "Requests that have not ended.", labels=["replica"]
        )
        for number, inspection in self._found.items():
            each.add_metric([str(number)], inspection.open_requests)
        yield each
