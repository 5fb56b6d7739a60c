"""Finds the labels of a PromQL expression's result, and its metrics, in samples that were scraped.

    Catalogue(text).labels_of("sum by (queue) (rate(tokenmill:x_total[5m]))")   →   {"queue"}

Raises Unresolved if a metric, a label or a label's value is missing. It evaluates nothing.
"""

from __future__ import annotations

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

TARGET_LABELS = frozenset({"instance", "job"})  # Prometheus adds them


class Unresolved(Exception):
    pass


class Catalogue:
    """Every sample of an exposition: name → label → values seen."""

    def __init__(self, text: str) -> None:
        self.samples: dict[str, dict[str, set[str]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = self.samples.setdefault(sample.name, {})
                for name, value in sample.labels.items():
                    labels.setdefault(name, set()).add(value)

    def labels_of(self, expression: str) -> set[str]:
        return self._labels(promql.parse(expression))

    def _labels(self, node: promql.Expr) -> set[str]:
        match node:
            case promql.VectorSelector():
                return self._selected(node)
            case promql.MatrixSelector():
                return self._selected(node.vector_selector)
            case promql.AggregateExpr():
                return self._aggregated(node)
            case promql.BinaryExpr():
                return self._combined(node)
            case promql.Call():
                inside = [self._labels(argument) for argument in node.args]
                labels = set().union(*inside)
                return labels - {"le"} if node.func.name == "histogram_quantile" else labels
            case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
                return self._labels(node.expr)
        return set()  # numbers and strings

    def _selected(self, selector: promql.VectorSelector) -> set[str]:
        if selector.name == "up":
            return set(TARGET_LABELS)
        name = selector.name or ""
        if name not in self.samples:
            raise Unresolved(f"no sample is called {name}")
        labels = self.samples[name]
        for matcher in selector.matchers.matchers:
            if matcher.name not in labels:
                raise Unresolved(f"{name} has no label {matcher.name}, only {sorted(labels)}")
            if matcher.op == promql.MatchOp.Equal and matcher.value not in labels[matcher.name]:
                raise Unresolved(
                    f"{name} has no {matcher.name}={matcher.value!r}, only "
                    f"{sorted(labels[matcher.name])}"
                )
        return {*labels, *TARGET_LABELS}

    def _aggregated(self, node: promql.AggregateExpr) -> set[str]:
        inside = self._labels(node.expr)
        if node.modifier is None:
            return set()
        named = set(node.modifier.labels)
        if not named <= inside:
            raise Unresolved(f"{node.expr.prettify()} has no {sorted(named - inside)}")
        return named if node.modifier.type == promql.AggModifierType.By else inside - named

    def _combined(self, node: promql.BinaryExpr) -> set[str]:
        left, right = self._labels(node.lhs), self._labels(node.rhs)
        matching = node.modifier.matching if node.modifier is not None else None
        if matching is not None and not set(matching.labels) <= left & right:
            raise Unresolved(f"{node.prettify()}: both sides need {matching.labels}")
        vectors = [
            labels for labels, side in ((left, node.lhs), (right, node.rhs)) if not _is_number(side)
        ]
        if len(vectors) == 2 and matching is None and left != right and str(node.op) != "or":
            raise Unresolved(f"{node.prettify()}: {sorted(left)} never match {sorted(right)}")
        return left & right if str(node.op) == "or" else (vectors or [set()])[0]


def _is_number(node: promql.Expr) -> bool:
    """Return True if the node is a number, or a function that gives one."""
    is_scalar = isinstance(node, promql.Call) and node.func.name in ("time", "scalar", "pi")
    return is_scalar or isinstance(node, promql.NumberLiteral)
