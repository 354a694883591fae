"""The page of `dynamix policy explain`: the report's look, no JavaScript; numbers of `explain_policy` alone."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

MOST = 15  # features of the page
_WIDE, _HIGH = 150, 34  # of a feature's curve, pixels


def write_explained(name: str, found: Mapping[str, Any], out: str | Path) -> None:
    """Write what `dynamix_lab.training.explaining.explain_policy` found about the policy `name` to the file `out`."""
    target = Path(out)
    unfinished = target.with_suffix(".unfinished")
    unfinished.write_text(explained_html(name, found), encoding="utf-8")
    unfinished.replace(target)


def explained_html(name: str, found: Mapping[str, Any]) -> str:
    """The page as one file."""
    same, differs = 100 * found["differs"]["same"], found["differs"]
    headline = f"A correction of the goodput rule. {same:.0f} % of its answers are the rule's own."
    clusters, workers, windows = found["clusters"], found["workers"], found["windows"]
    seen = f"Seen on {clusters} simulated clusters of {workers} workers, {windows} windows each."
    features = sorted(found["features"], key=lambda one: -(one["shares"] + one["total"]))[:MOST]
    body = "\n".join(
        [
            f"<p>{html.escape(seen)}</p>",
            '<div class="pair">',
            _figure(
                "What it gives to other workers than the rule",
                "Part of a round, at quantiles of its answers",
                _quantiles(found["quantiles"], differs["moved"], lambda value: f"{100 * value:.1f} %", 0.0),
            ),
            _figure(
                "Its global batch over the rule's",
                "At quantiles of its answers; 1 is the rule's",
                _quantiles(found["quantiles"], differs["total"], lambda value: f"{value:.3f}", 1.0),
            ),
            "</div>",
            _figure(
                "Which features move it, and where to",
                "Bars: how much a worker's size and the global batch change when the feature is shuffled over all that "
                "was seen. Curve: what the net multiplies a worker's size by, from the feature's 5 % to its 95 % "
                "quantile. The line is 1. Features overlap: what is small here need not be useless.",
                _features(features),
            ),
        ]
    )
    static = files("dynamix.telemetry") / "static"
    style = (static / "page.css").read_text(encoding="utf-8") + _STYLE
    title = html.escape(f"Policy {name}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">\n<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<header><h1>{title}</h1><p id="headline">{html.escape(headline)}</p></header>\n'
        f"<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


_STYLE = """
.curve path { fill: none; stroke: var(--c0); stroke-width: 2; }
.curve line { stroke: var(--line); }
.of { display: inline-block; height: 9px; border-radius: 2px; background: var(--c0); vertical-align: baseline;
  print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.of.total { background: var(--c1); }
"""


def _figure(heading: str, caption: str, inside: str) -> str:
    return f"<figure><h3>{html.escape(heading)}</h3><figcaption>{html.escape(caption)}</figcaption>{inside}</figure>"


def _quantiles(at: Sequence[float], values: Sequence[float], said: Any, zero: float) -> str:
    """A bar for each quantile, from `zero`."""
    most = max((abs(value - zero) for value in values), default=0.0) or 1.0
    rows = [
        f'<span>{100 * part:.0f} %</span><span class="bar"><span style="width:{100 * abs(value - zero) / most:.1f}%;'
        f'background:var(--c{0 if value >= zero else 1})"></span></span><span class="figure">{said(value)}</span>'
        for part, value in zip(at, values, strict=True)
    ]
    return f'<div class="bars">{"".join(rows)}</div>'


def _features(features: Sequence[Mapping[str, Any]]) -> str:
    most = max((max(one["shares"], one["total"]) for one in features), default=0.0) or 1.0
    sizes = [value for one in features for value in one["size"]]
    reach = max((abs(math.log(value)) for value in sizes if value > 0), default=0.0) or 1.0
    rows = "".join(
        f'<tr><td class="name">{html.escape(str(one["name"]))}</td>'
        f'<td class="w">{_bar(one["shares"], most, "")}</td><td class="w">{_bar(one["total"], most, " total")}</td>'
        f'<td class="w">{_curve(one["size"], reach)}</td>'
        f'<td class="n">{min(one["size"]):.2f} to {max(one["size"]):.2f}</td></tr>'
        for one in features
    )
    heads = "<th>feature</th><th>sizes</th><th>global batch</th><th>a worker's size</th><th class=n>times</th>"
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _bar(value: float, most: float, kind: str) -> str:
    return f'<span class="of{kind}" style="width:{max(70 * value / most, 1):.0f}px"></span> {100 * value:.1f} %'


def _curve(sizes: Sequence[float], reach: float) -> str:
    """Through what the size is multiplied by at the quantiles, on a logarithmic scale of `reach` either way."""
    step = _WIDE / max(len(sizes) - 1, 1)
    points = [
        f"{step * i:.1f},{_HIGH / 2 - (_HIGH / 2 - 3) * math.log(max(value, 1e-9)) / reach:.1f}"
        for i, value in enumerate(sizes)
    ]
    middle = f'<line x1="0" x2="{_WIDE}" y1="{_HIGH / 2}" y2="{_HIGH / 2}"/>'
    told = ", ".join(f"{value:.2f}" for value in sizes)
    return (
        f'<svg class="curve" width="{_WIDE}" height="{_HIGH}" role="img" aria-label="times {told}">{middle}'
        f'<path d="M{" L".join(points)}"/></svg>'
    )
