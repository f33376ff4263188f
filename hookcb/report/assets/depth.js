// Signal over depth: std of the output and gradient norm of all layers at one step, which a slider chooses.

const depth = {
  steps: [], // those of the slider

  start(page) {
    const norm = layers.choices.some(({ key }) => key === "norm") ? "norm" : "clipped_norm";
    const charts = ["std", norm].flatMap((key) => this.chartOf(page, key));
    $("depth-section").hidden = !charts.length;
    if (!charts.length) return;
    const all = charts.flatMap(({ series }) => series.flatMap(({ steps }) => Array.from(steps)));
    this.steps = [...new Set(all)].sort((a, b) => a - b);
    this.charts = charts;
    $("depth").append(make("div.charts", {}, ...charts.map(({ own }) => own.box)));
    $("depth-step").max = this.steps.length - 1;
    $("depth-step").value = this.fullest(all);
    $("depth-step").addEventListener("input", () => this.slide());
    this.slide();
  },

  /** Place of the newest of the steps at which most layers were recorded. */
  fullest(all) {
    const counts = new Map();
    for (const step of all) counts.set(step, (counts.get(step) || 0) + 1);
    const most = Math.max(...counts.values());
    this.first = this.steps.findLastIndex((step) => counts.get(step) === most);
    return this.first;
  },

  /** The chart of a statistic of all layers; none if fewer than two have it. */
  chartOf(page, key) {
    const choice = layers.choices.find((own) => own.key === key);
    const rows = choice ? [...layers.rows.values()].filter((row) => choice.of(row) !== null) : [];
    if (rows.length < 2) return [];
    const series = rows.map(choice.of);
    const line = { steps: [], values: [] };
    const title = choice.group === "Outputs" ? choice.title : choice.label;
    const codeOf = ({ findings }) => page.verdict.findings[findings[0]].code;
    const own = new Chart({
      title,
      names: rows.map(({ name }) => name),
      lines: [{ label: title, series: line, points: rows.length <= 60 }],
      wide: extremes(series.map(({ values }) => values)), // the axis stays as it is while the slider moves
      marks: rows.flatMap((row, i) => (row.findings.length ? [{ step: i, text: codeOf(row) }] : [])),
      height: 12,
    });
    return [{ own, line, series }];
  },

  slide() {
    const step = this.steps[Number($("depth-step").value)];
    $("depth-step").setAttribute("aria-valuetext", `step ${whole(step)}`);
    $("depth-at").textContent = `step ${whole(step)}`;
    for (const { own, line, series } of this.charts) {
      const found = series.map(({ steps }) => nearest(steps, step));
      line.steps = [...found.keys()].filter((i) => found[i] >= 0);
      line.values = line.steps.map((i) => series[i].values[found[i]]);
      if (own.plotted) {
        own.plotted.setData(own.read());
        own.tell(null);
      }
    }
  },

  /** The step that is shown, null if it is the one that is shown first. */
  kept() {
    const at = Number($("depth-step").value);
    return at === this.first ? null : (this.steps[at] ?? null);
  },

  restore(step) {
    const at = step === null ? -1 : this.steps.findIndex((own) => own >= step);
    if (at < 0) return;
    $("depth-step").value = at;
    this.slide();
  },
};
