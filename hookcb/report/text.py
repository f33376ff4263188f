"""The text of a page: its verdict, tables and configuration as markup, which needs no script."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fastcore.xml import ft, to_xml

from hookcb.core.text import as_layer
from hookcb.diagnosis.explain import explain
from hookcb.records.content import Recorded
from hookcb.records.series import Series
from hookcb.report.data import PageData

if TYPE_CHECKING:  # pages are compared without torch
    from hookcb.diagnosis.verdict import Finding

MAX_ROWS, MAX_STATS = 20, 6  # of a table; the scripts show all of them
MIN_LOG = 20.0  # ratio of a number and its limit from which their axis is logarithmic
SMALL_PRINT = r"(.*) (\([^()]*checks ran\)|\([a-z]+\.[a-z_]+\))(.*)"  # of a headline
WIDTH, LEFT, RIGHT = 640, 20, 620  # of the axis of a number, in its own units
SICK = ("sick", "suspect")


def text_of(data: PageData) -> dict[str, str]:
    """Markup of a page by the name of its place in the template."""
    verdict = data.verdict or {}
    return {
        "HEADLINE": _markup(*_headline(data.headline)),
        "FACTS": _markup(*_facts(data)),
        "COMMAND": _markup(*_command(data)),
        "VERDICT": _markup(*_verdict(verdict)) if verdict else "",
        "PLAIN": _markup(*_tables(data)),
        "SAMPLES": _markup(_samples(data)) if data.samples else "",
        "HAS_SAMPLES": "" if data.samples else " hidden",
        "CONFIG": _markup(*_config(data.config)),
        "NOTES": _markup(ft("ul", *(ft("li", note) for note in data.notes)) if data.notes else ""),
        "OPEN": "" if verdict.get("status") in SICK else " open",
        "HAS_CONFIG": "" if any(data.config.values()) else " hidden",
        "HAS_NOTES": "" if data.notes else " hidden",
    }


def outline_of(headline: str, cause: "Finding | None", held: str, recorded: Sequence[str]) -> str:
    """Markup of a loop for a notebook: the headline of its verdict, the cause, what it holds and records."""
    parts = [ft("p", ft("b", *_headline(headline)))]
    if cause is not None:
        facets = _facet("Likely", "ul", cause.causes), _facet("Next", "ul", cause.next_steps)
        parts += [ft("p", cause.message), _fold("What may be the cause, and what to do", *facets)]
    kept = f"Recorded by: {', '.join(recorded)}." if recorded else "Nothing is recorded."
    return _markup(ft("div", *parts, ft("p", kept), ft("p", ft("code", held))))


def _markup(*parts: Any) -> str:
    return f"{to_xml(parts, indent=False)}"  # a tuple, as text on its own is not escaped


# ---- the head


def title_of(data: PageData) -> str:
    """Title of the window: the name of the run, and how it is: "run: sick"."""
    word, _ = _word_and_rest(data.headline)
    return ": ".join(filter(None, (data.title, word.lower() or "hookcb")))


def _word_and_rest(headline: str) -> tuple[str, str]:
    """The status in capitals that a headline begins with, "" if it has none, and what follows."""
    word, gap, rest = headline.partition("  ")
    return (word, rest) if gap and word.isupper() else ("", headline)


def _headline(text: str) -> list[Any]:
    """The word, the sentence, in small print the code and the number of checks, and what limits it."""
    word, rest = _word_and_rest(text)
    sentence, small, limits = rest, "", ""
    if found := re.fullmatch(SMALL_PRINT, rest, re.DOTALL):
        sentence, small, limits = found.groups()
    status = ft("span", word, cls=f"status {word.lower()}") if word.isalpha() else word
    printed = [" ", ft("small", small), limits] if small else []
    return [status, " " if word else "", sentence, *printed]


def _facts(data: PageData) -> list[Any]:
    batches = f"{data.n_batches:,} batch{'es' * (data.n_batches != 1)}" if data.n_batches else ""
    hookcb = f"hookcb {data.hookcb}" if data.hookcb else ""
    written = f"written {data.written[:16].replace('T', ' ')}" if data.written and not data.every else ""
    return _joined([data.title, batches, written, hookcb])


def _command(data: PageData) -> list[Any]:
    """The command, the commit, and what the optimizers were given."""
    run = _by_key(data.config.get("Run", ()))
    asked = [ft("code", run["command"]) if "command" in run else ""]
    asked += [f"commit {run['git commit']}" if "git commit" in run else ""]
    for title, rows in data.config.items():
        known = _by_key(rows)
        if "lr" in known:
            given = [
                f"{key}={known[key]}" for key in ("lr", "weight_decay", "betas", "momentum") if key in known
            ]
            asked.append(f"{title} {', '.join(given)}")
    return _joined(asked)


def _by_key(rows: Iterable[Sequence[str]]) -> dict[str, str]:
    return {row[0]: row[1] for row in rows}


def _joined(parts: Iterable[Any]) -> list[Any]:
    shown = [ft("span", part) if isinstance(part, str) else part for part in parts if part != ""]
    return [x for i, part in enumerate(shown) for x in ((" · ", part) if i else (part,))]


# ---- the verdict


def _verdict(verdict: Mapping[str, Any]) -> list[Any]:
    findings = list(verdict["findings"])
    indices = {id(finding): i for i, finding in enumerate(findings)}
    notes = [f for f in findings if f["severity"] == "info"]
    alarms = [f for f in findings if f["severity"] != "info"]
    causes = [f for f in alarms if not f["consequence_of"]]
    effects = [f for f in alarms if f["consequence_of"]]
    shown: list[Any] = [_finding(f, indices[id(f)], is_first=True) for f in causes[:1]]
    for title, group in (("Also wrong", causes[1:]), ("What follows from it", effects), ("Notes", notes)):
        if group:
            names = "; ".join(dict.fromkeys(_name(f) for f in group))
            boxes = [_finding(f, indices[id(f)]) for f in group]
            is_open = title == "Notes" and not causes
            shown.append(_fold(f"{title} ({len(group)}): {names}", *boxes, is_open=is_open))
    if verdict["looked"]:
        n, n_checks = verdict["n_checked"], verdict["n_checks"]
        ran = f"; {n} of {n_checks} checks ran" if n_checks else ""
        shown.append(ft("p", ft("b", "Looked at: "), f"{'; '.join(verdict['looked'])}{ran}.", cls="looked"))
    if verdict["ruled_out"]:
        shown.append(_fold(f"Ruled out ({len(verdict['ruled_out'])})", _list("ul", verdict["ruled_out"])))
    if gaps := verdict["gaps"]:
        n = sum(len(gap["codes"]) for gap in gaps)
        rows = [(gap["reason"], ", ".join(gap["codes"])) for gap in gaps]
        shown.append(_fold(f"Not looked at ({n} check{'s' * (n != 1)})", _table(("why", "checks"), rows)))
    return shown


def _name(finding: Mapping[str, Any]) -> str:
    return str(finding.get("headline") or finding["code"])


def _finding(finding: Mapping[str, Any], index: int, *, is_first: bool = False) -> Any:
    place = finding["layer"] or finding["param"]
    link = ft("a", as_layer(place), href="#layers-section", data_layer=place) if place else ""
    kind = f" ({finding['kind']})" if finding["kind"] else ""
    on = f" on {finding['on_ranks']}" if finding.get("on_ranks") else ""
    when = f" {finding['when']}" if finding.get("when") else ""
    name = "" if is_first else f"{_name(finding)}{': ' if place else ''}"
    head = ft(
        "h2", ft("span", finding["severity"], cls="badge"), " ", name, link, f"{kind}{when}{on} ",
        ft("code", finding["code"]),
    )  # fmt: skip
    steps = finding["next_steps"]
    facets = ft(
        "div",
        _facet("Likely", "ul", finding["causes"]),
        _facet("Next", "ol" if len(steps) > 1 else "ul", steps),
        cls="facets",
    )
    source = finding.get("source") or {}
    quoted = ft("p", ft("code", source["line"]), f" {source['place']}", cls="soft source") if source else ""
    return ft(
        "article", head, ft("p", finding["message"]), quoted, _proof(finding, index), facets,
        _about(finding["code"]), cls=f"finding {finding['severity']}", id=f"finding-{index}",
    )  # fmt: skip


def _facet(title: str, kind: str, items: Sequence[str]) -> Any:
    return ft("div", ft("h3", title), _list(kind, items)) if items else ""


def _about(code: str) -> Any:
    """Explanation of the check, without its first line, which is the code."""
    with suppress(LookupError):  # a check of the user's own has none
        text = explain(code).partition("\n")[2].strip().partition("\n\nSee also:")[0]
        parts = [ft("p", " ".join(part.split())) for part in text.split("\n\n")]
        return _fold(f"How {code} is found", *parts)
    return ""


def _proof(finding: Mapping[str, Any], index: int) -> Any:
    """The place of the figure, the number beside its limit, or the reason why there is neither."""
    shown, value, limit = finding.get("shown_by"), finding.get("value"), finding.get("limit")
    is_drawn = bool(finding.get("figure")) or (shown is not None)
    has_limit = bool(finding.get("figure")) or (shown is not None and shown["limit"] is not None)
    parts: list[Any] = [ft("div", cls="drawn", data_finding=str(index))] if is_drawn else []
    is_exact = finding.get("is_exact", False)
    is_note = finding["severity"] == "info"
    if value is not None and limit is not None and not (has_limit or is_exact or is_note):
        parts.append(_gauge(float(value), float(limit)))
    if not (parts or is_note):
        why = "this is a fact, with no number that has a limit" if is_exact else ""
        parts.append(ft("p", f"No figure: {why or 'what was seen is in the sentence'}.", cls="soft"))
    return ft("div", *parts, cls="proof") if parts else ""


def _gauge(value: float, limit: float) -> Any:
    """A number and its limit on one axis, as a picture that needs no script."""
    low, high = sorted((value, limit))
    is_log = low > 0 and high / low > MIN_LOG
    bend = math.log if is_log else float
    first, last = (bend(low / 2), bend(high * 2)) if is_log else (min(0.0, low), max(high, 0.0))
    if not is_log:
        last += 0.25 * ((last - first) or 1.0)
    places = [LEFT + (RIGHT - LEFT) * (bend(x) - first) / (last - first) for x in (value, limit)]
    at, bound = (f"{min(max(x, LEFT), RIGHT):.0f}" for x in places)
    anchors = ["end" if float(x) > WIDTH / 2 else "start" for x in (at, bound)]
    ends = f"{_short(value)}, limit {_short(limit)}"
    return ft(
        "svg",
        ft("line", x1=LEFT, x2=RIGHT, y1=26, y2=26, cls="axis"),
        ft("line", x1=bound, x2=bound, y1=10, y2=42, cls="limit"),
        ft("circle", cx=at, cy=26, r=6, cls="found"),
        ft("text", f"measured {_short(value)}", x=at, y=13, text_anchor=anchors[0], cls="value"),
        ft("text", f"limit {_short(limit)}", x=bound, y=54, text_anchor=anchors[1], cls="bound"),
        viewBox=f"0 0 {WIDTH} 60", role="img", aria_label=f"measured {ends}{', logarithmic' * is_log}",
        cls="gauge",
    )  # fmt: skip


# ---- tables and lists


def _tables(data: PageData) -> list[Any]:
    """Tables of the numbers that the scripts draw."""
    run = [(name, *_ends(series)) for name, series in (data.run | data.epochs).items() if len(series)]
    parts = []
    if run:
        parts += [ft("h2", "Run"), _table(("number", "first", "last", "smallest", "largest"), run)]
    place = {module.name: i for i, module in enumerate(data.modules)}
    layers = dict(sorted(data.layers.items(), key=lambda x: place.get(x[1].module, -1)))
    for title, records in (("Outputs of layers", layers), ("Parameters", data.params)):
        if any(own.stats for own in records.values()):
            parts += [ft("h2", title), _latest(records)]
    return parts


def _ends(series: Series) -> list[str]:
    known = [x for x in series.values if math.isfinite(x)] or [math.nan]
    return [*map(_short, (series.values[0], series.values[-1], min(known), max(known)))]


def _latest(records: Mapping[str, Recorded]) -> Any:
    """The latest number of each statistic of each layer or parameter."""
    stats = list(dict.fromkeys(stat for own in records.values() for stat in own.stats))[:MAX_STATS]
    rows = [
        (name or "(the model)", *(_short(own.stats[s].values[-1]) if own.stats.get(s) else "" for s in stats))
        for name, own in list(records.items())[:MAX_ROWS]
    ]
    more = len(records) - len(rows)
    note = (
        f"The latest numbers of the first {len(rows)} of {len(records):,}." if more else "The latest numbers."
    )
    return _table(("name", *(stat.replace("_", " ") for stat in stats)), rows, note)


def _samples(data: PageData) -> Any:
    rows = [(f"{x.step:,}", f"{x.index:,}", _short(x.loss), _short(x.usual)) for x in data.samples]
    head = ("step", "sample of the batch", "loss", "median of the batch")
    return _table(head, rows, "Largest losses of samples in the batches that were inspected.")


def _config(config: Mapping[str, Sequence[Sequence[str]]]) -> list[Any]:
    return [
        part
        for title, rows in config.items()
        if rows
        for part in (
            ft("h3", title or "(without a name)"),
            ft("dl", *(x for key, value in rows for x in (ft("dt", key), ft("dd", value)))),
        )
    ]


def _fold(title: str, *children: Any, is_open: bool = False) -> Any:
    return ft("details", ft("summary", title), *children, open=is_open)


def _list(kind: str, items: Iterable[str]) -> Any:
    return ft(kind, *(ft("li", item) for item in items))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Any:
    body = [ft("tr", ft("th", row[0], scope="row"), *(ft("td", x) for x in row[1:])) for row in rows]
    top = ft("thead", ft("tr", *(ft("th", x, scope="col") for x in head)))
    told = ft("caption", caption) if caption else ""
    label = caption or head[0]
    return ft(
        "div",
        ft("table", told, top, ft("tbody", *body)),
        cls="scroll",
        tabindex=0,
        role="group",
        aria_label=label,
    )


def _short(x: float) -> str:
    return f"{x:.3g}"
