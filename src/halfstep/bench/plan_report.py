"""Presents a plan: tables, details of one operation, and an HTML page.

The page has a picture of the graph: operations from top to bottom, in the colours of
their formats.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from html import escape
from typing import TYPE_CHECKING

from halfstep.errors import UserError
from halfstep.reporting import html
from halfstep.reporting.html import Drawing, Section
from halfstep.reporting.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from halfstep.graph.plan import Plan, PlannedNode

_LOW, _FP32, _CAST = "#56b4e9", "#e69f00", "#d55e00"
_ROW = 13  # height of an operation in the picture
_BOX, _LEFT = 10, 90
_MAX_REACH = 110  # of an arc to the left


def tables(
    plan: Plan, autocast_casts: int, measured: Mapping[str, float]
) -> list[Table]:
    """Return a summary of a plan, and a table by operation and by module."""
    num_low = len(plan.low)
    facts = [
        ("operations", f"{num_low} of {len(plan.nodes)} in {plan.dtype}"),
        ("casts", f"{len(plan.casts)}; torch.autocast: {autocast_casts}"),
        ("predicted", f"{plan.ms:.3f} ms; all in fp32: {plan.fp32_ms:.3f}"),
        *((f"measured, {name}", f"{ms:.3f} ms") for name, ms in measured.items()),
    ]
    notes = (
        "times are of a forward and a backward pass",
        plan.slowdown.text(plan.dtype),
        *([plan.doubt] if plan.doubt else []),
    )
    return [
        Table(f"Plan by {plan.method}", ("what", "value"), tuple(facts), notes),
        _grouped(plan, "By operation", "operation", lambda node: node.op, ("why",)),
        _grouped(plan, "By module", "module", lambda node: node.module or "(model)"),
    ]


def _grouped(
    plan: Plan,
    title: str,
    what: str,
    key: Callable[[PlannedNode], str],
    why: tuple[str, ...] = (),
) -> Table:
    """Group nodes by a key, and by their reason if asked for."""
    groups: dict[tuple[str, str], list[PlannedNode]] = defaultdict(list)
    for node in plan.nodes:
        groups[key(node), node.reason if why else ""].append(node)
    rows = [
        (
            name,
            len(nodes),
            sum(node.low for node in nodes),
            sum(node.ms for node in nodes),
            sum(node.fp32_ms for node in nodes),
            *([reason] if why else []),
        )
        for (name, reason), nodes in groups.items()
    ]
    if why:
        rows.sort(key=lambda row: -float(row[3]))
    columns = (what, "number", plan.dtype, "ms", "ms in fp32", *why)
    return Table(title, columns, tuple(rows))


def explain(plan: Plan, name: str) -> Table:
    """Return the details of one operation."""
    by_name = {node.name: node for node in plan.nodes}
    if name not in by_name:
        near = difflib.get_close_matches(name, by_name, n=1) or list(by_name)[:1]
        raise UserError(f"--explain {name}: no such node; is it {', '.join(near)}?")
    node, nodes = by_name[name], plan.graph_module.graph.nodes
    graph_node = next(each for each in nodes if each.name == name)
    casts = {cast.tensor: cast for cast in plan.casts}

    def format_of(other: str) -> str:  # of a parameter or an input: fp32
        return plan.dtype if other in by_name and by_name[other].low else "fp32"

    rows = [
        ("operation", node.op),
        ("module", node.module or "the model itself"),
        ("source", node.source or "-"),
        ("runs in", format_of(name)),
        ("kind", node.kind),
        ("why", node.reason),
        (f"ms in {plan.dtype}", f"{node.low_ms:.4f}" if node.low_ms else "-"),
        ("ms in fp32", f"{node.fp32_ms:.4f}"),
    ]
    for source in graph_node.all_input_nodes:
        cast = casts.get(source.name)
        is_cast = cast is not None and cast.to == format_of(name)
        text = f"{source.name}, made in {format_of(source.name)}"
        more = f", cast in {cast.ms:.4f} ms" if cast and is_cast else ""
        rows.append((f"input {len(rows) - 7}", text + more))
    users = ", ".join(
        f"{user.name} in {format_of(user.name)}" for user in graph_node.users
    )
    rows.append(("used by", users or "-"))
    return Table(f"{name}", ("what", "value"), tuple(rows))


def page(title: str, plan: Plan, summary: list[Table]) -> str:
    """Return an HTML page with the picture, the tables and every operation."""
    lead = (
        f"{len(plan.low)} of {len(plan.nodes)} operations in {plan.dtype}, "
        f"{len(plan.casts)} casts."
    )
    legend = (
        f"blue: {plan.dtype}; orange: fp32; arcs: tensors that are used further down",
        "red: what is cast. Point at an operation to read why.",
    )
    sections = [
        Section("The plan", tables=tuple(summary)),
        Section("The graph", drawings=(Drawing("Operations", picture(plan), legend),)),
        Section("Every operation", tables=(plan.table(),)),
    ]
    return html.page(title, sections, lead)


def picture(plan: Plan) -> str:
    """Return the graph as SVG: operations from top to bottom, uses as arcs."""
    rows = {node.name: number for number, node in enumerate(plan.nodes)}
    cast = {each.tensor for each in plan.casts}
    low = plan.low

    def y(name: str) -> float:
        return rows[name] * _ROW + _ROW / 2 + 2

    arcs, boxes = [], []
    uses = ((n.name, u.name) for n in plan.graph_module.graph.nodes for u in n.users)
    for node, user in uses:
        if node not in rows or user not in rows:
            continue
        is_cast = node in cast and (node in low) != (user in low)
        start, end = y(node), y(user)
        left = _LEFT - min(_MAX_REACH, 6 + (end - start) / 4)
        if rows[user] - rows[node] > 1 or is_cast:
            path = f"M{_LEFT} {start} C{left} {start} {left} {end} {_LEFT} {end}"
            colour = _CAST if is_cast else "#8886"
            arcs.append(f'<path d="{path}" stroke="{colour}"/>')
    for each in plan.nodes:
        colour = _LOW if each.low else _FP32
        words = f"{each.op} {each.module}".strip()
        why = f"{each.name}: {each.reason} {each.source}".strip()
        top = y(each.name)
        boxes.append(
            f"<g><title>{escape(why)}</title>"
            f'<rect x="{_LEFT}" y="{top - _BOX / 2}" width="{_BOX}" height="{_BOX}" '
            f'fill="{colour}"/>'
            f'<text x="{_LEFT + _BOX + 5}" y="{top + 3.5}">{escape(words)}</text></g>'
        )
    height = len(rows) * _ROW + 4
    return (
        f'<svg role="img" aria-label="The graph" viewBox="0 0 600 {height}" '
        'font-family="system-ui, sans-serif" font-size="10" fill="currentColor">'
        f'<g fill="none">{"".join(arcs)}</g>{"".join(boxes)}</svg>'
    )
