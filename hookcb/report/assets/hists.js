// Histograms of all layers over time, small, behind a fold; a click on one chooses its layer.

const isCounted = (hist) => Boolean(hist?.bins.some(({ values }) => values.some((n) => n > 0)));

/** A histogram over time as rows of cells, the largest values on top; `edge` is the text of an edge. */
function cellsOf({ edges, bins }) {
  const rows = bins.toReversed();
  const scale = colorScale(rows.map(({ values }) => values));
  const totals = bins[0].values.map((_, i) => bins.reduce((sum, { values }) => sum + values[i], 0));
  scale.isFinite = totals.every((n) => n > 0); // without a finite element there is nothing to count
  const shade = (n, i) => (totals[i] ? n : NaN);
  const painted = rows.map(({ steps, values }) => ({ steps, values: values.map(shade) }));
  const edge = (i) => (edges[i] === undefined ? "" : short(edges[i]));
  return { painted, scale, edge };
}

function showHistograms() {
  const rows = [...layers.rows.values()].filter(({ layer }) => isCounted(layer?.hist));
  if (rows.length < 2) return; // one is shown with its layer
  const all = foldLater(`Histograms of ${rows.length} layers`, () => {
    const made = rows.map(smallHistogram);
    const paint = () => all.open && made.forEach(({ paint }) => later(paint));
    timeline.strips.add(paint);
    later(paint);
    const note =
      "Values from low to high over the steps that are shown; top and bottom row: beyond the range. Brighter is " +
      "more elements, on a scale of its own for each layer. A click shows the layer.";
    return make("div", {}, make("p.soft", {}, note), make("div.hists", {}, ...made.map(({ box }) => box)));
  });
  $("map-table").after(all);
}

function smallHistogram({ name, label, layer }) {
  const { painted, scale, edge } = cellsOf(layer.hist);
  const canvas = make("canvas.cells", { "aria-hidden": "true" });
  const choose = () => {
    layers.choose(name);
    $("layer").scrollIntoView();
  };
  const box = make(
    "button",
    { type: "button", title: name, click: choose },
    make("code", {}, name || label),
    canvas,
    make("span.soft", {}, `${edge(0)} to ${edge(layer.hist.edges.length - 1)}`),
    scale.isFinite ? null : make("span.nonfinite", {}, " NaN or infinite"),
  );
  const paint = () =>
    raster(
      painted,
      timeline.range,
      clamp(Math.round(canvas.clientWidth * devicePixelRatio), 32, 1024),
      scale,
      canvas,
    );
  return { box, paint };
}
