// The run: loss, metrics, learning rate and whatever else has a number for each step.

const LINES = { loss: "each batch", total_norm: "before clipping", clipped_total_norm: "after clipping" };

/** Series of the run by chart: training and validation of one number belong together. */
function runCharts(page) {
  const charts = new Map();
  const add = (title, line) => charts.set(title, [...(charts.get(title) || []), line]);
  for (const [name, series] of Object.entries(page.run)) {
    if (series.steps.length) add(name.replace("clipped_", ""), { label: LINES[name] || RUN_NAMES[name] || words(name), series });
  }
  for (const [name, series] of Object.entries(page.epochs)) {
    const [, part, title] = name.match(/^(?:(train|valid)_)?(.*)$/s);
    const label = { train: "training, each epoch", valid: "validation" }[part] || "each epoch";
    if (series.steps.length) add(title || name, { label, series, points: true });
  }
  return charts;
}

const RUN_NAMES = { lr: "learning rate", total_norm: "gradient norm of all parameters", scale: "scale of the loss",
  clip_coef: "clipping coefficient", mean_norm: "mean gradient norm", skipped: "skipped steps" };

function showRun(page) {
  const place = $("run"), charts = runCharts(page), same = [];
  if (!charts.size) place.append(make("p.soft", {}, "No batch was recorded."));
  const grid = make("div.charts");
  for (const [name, lines] of charts) {
    const title = RUN_NAMES[name] || words(name), { low, high, isFinite } = extremes(lines.map(({ series }) => series.values));
    if (name !== "loss" && isFinite && low === high) same.push(`${title} ${short(low)}`);
    else grid.append(chart({ title, lines, marks: findingMarks(page, name === "loss"), height: 12 }));
  }
  place.append(grid, same.length ? make("p", {}, make("b", {}, "The same at all steps: "), `${same.join(", ")}.`) : "");
}
