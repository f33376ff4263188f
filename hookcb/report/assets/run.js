// The run: loss, metrics, learning rate and whatever else has a number for each step.

/** Series of the run by chart: training and validation of one number belong together. */
function runCharts(page) {
  const charts = new Map();
  const add = (title, line) => charts.set(title, [...(charts.get(title) || []), line]);
  const { total_norm: norm, clipped_total_norm: clipped } = page.run;
  const isClipped = clipped && !(norm && isSame(norm, clipped));
  const labels = {
    __proto__: null,
    loss: "each batch",
    ...(isClipped && { total_norm: "before clipping", clipped_total_norm: "after clipping" }),
  };
  for (const [name, series] of Object.entries(page.run)) {
    if (!series.steps.length || (series === clipped && !isClipped)) continue;
    add(series === clipped && norm ? "total_norm" : name, { label: labels[name] || runName(name), series });
  }
  for (const [name, series] of Object.entries(page.epochs)) {
    const [, part, title] = name.match(/^(?:(train|valid)_)?(.*)$/s);
    const label = { train: "epoch", valid: "validation" }[part] || "each epoch";
    if (series.steps.length) add(title || name, { label, series, points: true });
  }
  const first = ["loss", ...Object.keys(page.epochs), "lr"]; // then the others, the inputs last
  const rank = ([name]) =>
    first.includes(name) ? first.indexOf(name) : name === "input_rms" ? Infinity : first.length;
  return new Map([...charts].sort((a, b) => rank(a) - rank(b) || 0));
}

const RUN_NAMES = {
  __proto__: null,
  lr: "learning rate",
  input_rms: "RMS of the inputs",
  total_norm: "gradient norm of all parameters",
  clipped_total_norm: "gradient norm of all parameters after clipping",
  clipped_mean_norm: "mean gradient norm after clipping",
  scale: "scale of the loss",
  clip_coef: "clipping coefficient",
  mean_norm: "mean gradient norm",
  skipped: "skipped steps",
};

const runName = (name) => RUN_NAMES[name] || words(name);

function showRun(page) {
  const place = $("run");
  const [charts, same] = partlySame(
    runCharts(page),
    (name, lines) =>
      chart({
        title: runName(name),
        lines,
        marks: findingMarks(page, name === "loss"),
        height: 12,
        isLinear: name === "lr",
      }),
    runName,
  );
  $("run-section").hidden = false;
  place.append(make("div.charts", {}, ...charts), same);
  if (!charts.length && !same) place.append(make("p.soft", {}, "No batch was recorded."));
}
