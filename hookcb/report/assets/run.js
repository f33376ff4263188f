// The run: loss, metrics, learning rate and whatever else has a number for each step.

/** Series of the run by chart: training and validation of one number belong together. */
function runCharts(page) {
  const charts = new Map();
  const add = (title, line) => charts.set(title, [...(charts.get(title) || []), line]);
  for (const [name, series] of Object.entries(page.run)) {
    if (series.steps.length) add(name, { label: name === "loss" ? "each batch" : statName(name), series });
  }
  for (const [name, series] of Object.entries(page.epochs)) {
    const [, part, title] = name.match(/^(?:(train|valid)_)?(.*)$/s);
    const label = { train: "training, each epoch", valid: "validation" }[part] || "each epoch";
    if (series.steps.length) add(title || name, { label, series, points: true });
  }
  return charts;
}

const RUN_NAMES = { lr: "learning rate", total_norm: "gradient norm of all parameters", scale: "scale of the loss",
  clip_coef: "clipping coefficient", clipped_total_norm: "gradient norm after clipping", mean_norm: "mean gradient norm",
  skipped: "skipped steps" };

function showRun(page) {
  const place = $("run"), charts = runCharts(page);
  if (!charts.size) place.append(make("p.soft", {}, "No batch was recorded."));
  const grid = make("div.charts");
  for (const [name, lines] of charts) {
    grid.append(chart({ title: RUN_NAMES[name] || words(name), lines, marks: findingMarks(page, name === "loss"), height: 12 }));
  }
  place.append(grid);
}
