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

/** Switches for all charts of a section: the y axis and smoothing. */
const switches = {
  state: { axis: "auto", smoothing: "0" },
  charts: [],

  /** The row of switches for the elements of charts. */
  of(boxes) {
    this.charts = boxes.map((box) => box.querySelector(".plot").chart);
    const series = this.charts.flatMap(({ lines }) => lines.map((line) => line.series));
    this.note = series.some(({ steps }) => isThinned(steps))
      ? ", long curves from the extremes of stretches"
      : "";
    const option = ([value, text]) => make("option", { value }, text);
    const axes = { auto: "automatic", linear: "linear", log: "logarithmic" };
    return make(
      "div.controls",
      {},
      make(
        "label",
        {},
        "y axis ",
        make("select", { id: "run-axis", change: () => this.read() }, ...Object.entries(axes).map(option)),
      ),
      make("label", { for: "run-smoothing" }, "Smoothing"),
      make("input", {
        id: "run-smoothing",
        type: "range",
        min: 0,
        max: 0.99,
        step: 0.01,
        value: 0,
        input: () => this.read(),
      }),
      make("output", { id: "run-smoothed", for: "run-smoothing" }),
    );
  },

  read() {
    this.restore({ axis: $("run-axis").value, smoothing: $("run-smoothing").value });
  },

  restore(state) {
    this.state = state;
    const { axis, smoothing } = state;
    if (!$("run-axis")) return;
    [$("run-axis").value, $("run-smoothing").value] = [axis, smoothing];
    $("run-smoothed").textContent = Number(smoothing) ? smoothing + this.note : "off";
    for (const own of this.charts) {
      Object.assign(own, { axis, smoothing: Number(smoothing) });
      if (!own.plotted || own.isDue) continue;
      own.isDue = true;
      later(() => {
        own.isDue = false;
        own.draw();
      });
    }
  },
};

/** The last step of each epoch, if numbers of a training are known, and not only a file's. */
function epochEnds({ epochs, run }) {
  const all = new Set(Object.values(epochs).flatMap(({ steps }) => Array.from(steps)));
  return run.loss?.steps.length && all.size > 1 ? [...all].sort((a, b) => a - b) : [];
}

function showRun(page) {
  const place = $("run");
  timeline.epochs = epochEnds(page);
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
  if (charts.length) place.append(switches.of(charts));
  place.append(make("div.charts", {}, ...charts), same);
  switches.restore(switches.state);
  if (!charts.length && !same) place.append(make("p.soft", {}, "No batch was recorded."));
}
