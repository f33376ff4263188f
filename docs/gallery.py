"""Makes the gallery of the site in build/gallery: pages and figures of the demo and its faults."""

import sys
import tempfile
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hookcb import compare
from hookcb.cli.demo import build_model, digits, train_digits
from hookcb.cli.faults import FAULTS
from hookcb.loops.learner import Learner

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OUT = Path(__file__).parents[1] / "build" / "gallery"
SHOWN = ("sigmoid-stack", "dead-relu", "nan-input", "lr-too-high")
EPOCHS = 5


def main() -> None:
    """Writes the pages of runs, the figures, and an index of both."""
    OUT.mkdir(parents=True, exist_ok=True)
    parts = ["# Gallery", "Runs of `hookcb demo`, on scikit-learn's digits, made when this site was built."]
    healthy, sick = train(None), {name: train(name) for name in SHOWN}
    for name, learn in (sick | {"healthy": healthy}).items():
        learn.report(OUT / f"{name}.html")
        about = FAULTS[name].about if name in FAULTS else "no fault"
        command = f"hookcb demo --fault {name}" if name in FAULTS else "hookcb demo"
        title = f"{about[0].upper()}{about[1:]}"
        parts += [f"## {title}", f"`{command}`, {EPOCHS} epochs: {learn.diagnose().headline}"]
        parts.append(frame(f"{name}.html", f"the page of the run: {about}"))
    compare(OUT / "healthy.html", OUT / "dead-relu.html").save(OUT / "compare.html")
    parts += ["## Two runs over one another", "`hookcb compare healthy.html dead-relu.html -o compare.html`"]
    parts += [frame("compare.html", "two runs compared"), "## Figures"]
    for call, figure in figures(healthy, sick["sigmoid-stack"]).items():
        file = f"{call.partition('(')[0].replace('.', '_')}.svg"
        figure.savefig(OUT / file, bbox_inches="tight")
        parts += [f"### `{call}`", f"![The figure of {call}]({file})"]
    (OUT / "index.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def train(fault: str | None) -> Learner:
    """The demo's learner, after training; no file of it stays."""
    with tempfile.TemporaryDirectory() as folder:
        return train_digits(epochs=EPOCHS, folder=folder, fault=FAULTS.get(fault or ""))


def figures(healthy: Learner, sick: Learner) -> "dict[str, Figure]":
    """Each figure, by the call that draws it."""
    torch.manual_seed(0)
    curve = Learner(digits(), build_model(), torch.nn.functional.cross_entropy).lr_find()
    return {
        "learn.recorder.plot()": healthy.recorder.plot(),
        "learn.lr_find().plot()": curve.plot(),
        "learn.activation_stats.color_dim()": healthy.activation_stats.color_dim(),
        "learn.activation_stats.dead_chart()": healthy.activation_stats.dead_chart(),
        'learn.activation_stats.plot_layer_stats("act1")': healthy.activation_stats.plot_layer_stats("act1"),
        "learn.gradient_health.plot_flow()": sick.gradient_health.plot_flow(),
        "learn.gradient_health.plot_updates()": healthy.gradient_health.plot_updates(),
    }


def frame(file: str, title: str) -> str:
    """Frame with a page in it, and a link that opens it alone."""
    style = "width:100%; height:36rem; border:1px solid #8884"
    shown = f'<iframe loading="lazy" style="{style}" title="{escape(title)}" src="{file}"></iframe>'
    return f"{shown}\n\n[Open it alone]({file})"


if __name__ == "__main__":
    sys.exit(main())
