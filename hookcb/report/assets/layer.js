// The chosen layer: its curves, its histogram over time, its parameters; and signal over depth.

const GROUPED = { min: "smallest and largest", max: "smallest and largest" };
for (const stat of SHARES) GROUPED[stat] = "share of the output";

/** Charts of the statistics of an output or of several parameters. */
function statCharts(recorded, marks, isOfParam) {
  const charts = new Map();
  const names = Object.keys(recorded);
  const shortNames = withoutPrefix(names);
  for (const stat of statsOf(recorded)) {
    const title = (!isOfParam && GROUPED[stat]) || statName(stat, isOfParam);
    const lines = names.flatMap((name, i) => {
      const series = recorded[name].stats[stat];
      return series?.steps.length
        ? [{ label: isOfParam ? shortNames[i].split(".").at(-1) : statName(stat), series }]
        : [];
    });
    charts.set(title, [...(charts.get(title) || []), ...lines]);
  }
  const [norm, clipped] = ["norm", "clipped_norm"].map((stat) => charts.get(statName(stat, true)) || []);
  if (norm.length && norm.every(({ series }, i) => isSame(series, clipped[i]?.series)))
    charts.delete(statName("clipped_norm", true));
  return partlySame(charts, (title, lines) => chart({ title, lines, marks, height: 9 }));
}

function histogramChart({ low, high, bins }, marks) {
  const inner = bins.slice(1, -1);
  const size = (high - low) / Math.max(1, inner.length);
  const rows = bins.toReversed(); // the largest values on top
  const scale = colorScale(rows.map(({ values }) => values.filter((n) => n > 0)));
  const emptied = rows.map(({ steps, values }) => ({ steps, values: values.map((n) => n || scale.low) }));
  const edge = (i) => short(low + i * size);
  const lines = bins.map((series, i) => ({
    series,
    label:
      i === 0
        ? `below ${edge(0)}`
        : i > inner.length
          ? `above ${edge(inner.length)}`
          : `${edge(i - 1)} to ${edge(i)}`,
  }));
  const paint = (u) => {
    const { left, top, width, height } = u.bbox;
    u.ctx.imageSmoothingEnabled = false;
    u.ctx.drawImage(
      raster(emptied, timeline.range, Math.max(1, Math.round(width)), scale),
      left,
      top,
      width,
      height,
    );
  };
  const box = chart({
    title: "histogram over time",
    axisFormat: short,
    note: "elements by value; top and bottom row: beyond the range",
    lines: [],
    cells: { steps: bins[0].steps, paint, lines },
    format: whole,
    rows: [low - size, high + size],
    marks,
    height: 21,
  });
  box.querySelector("figcaption").after(colorKey(scale, whole));
  box.classList.add("tall");
  return box;
}

function showLayer(page, row) {
  const place = $("layer");
  const findings = row.findings.map((i) => [i, page.verdict.findings[i]]);
  const marks = findings
    .filter(([, own]) => own.step !== null)
    .map(([, own]) => ({ step: own.step, text: "" }));
  const facts = [row.about, row.nParams ? counted(row.nParams, "parameter") : ""].filter(Boolean).join(" · ");
  place.replaceChildren(make("h3", {}, row.name || row.label), facts ? make("p.soft", {}, facts) : "");
  for (const [i, own] of findings) {
    place.append(
      make(
        `p.finding.${own.severity}`,
        {},
        make("a", { href: `#finding-${i}` }, make("code", {}, own.code)),
        " ",
        own.message,
      ),
    );
  }
  const section = (title, charts, same) =>
    (charts.length || same) &&
    place.append(make("h4", {}, title), make("div.charts.small", {}, ...charts), same);
  if (row.layer) {
    const hist = row.layer.hist?.bins?.[0]?.steps.length ? [histogramChart(row.layer.hist, marks)] : [];
    const [charts, same] = statCharts({ [row.name]: row.layer }, marks, false);
    section("Output", [...hist, ...charts], same);
  }
  const params = Object.fromEntries(row.params.map((name) => [name, page.params[name]]));
  section(
    `Parameters: ${Object.entries(params)
      .map(([name, { about }]) => `${name.split(".").at(-1)} ${about}`.trim())
      .join(", ")}`,
    ...statCharts(params, marks, true),
  );
  $("said").textContent = `Curves of ${row.name || row.label} are shown.`;
}

/** The step of the slider, null if it is the newest. */
function depthKept() {
  const slider = $("depth-step");
  return slider.value === slider.max ? null : slider.value;
}

function restoreDepth(value) {
  if (value === null) return;
  $("depth-step").value = value;
  $("depth-step").dispatchEvent(new Event("input"));
}

/** Standard deviation and gradient norm of all layers at one step. */
function showDepth(page) {
  const modules = new Map(layers.choices.map((choice) => [choice.key, choice]));
  const charts = [
    ["std", "std of the output"],
    ["norm", "gradient norm"],
  ].flatMap(([key, title]) => {
    const choice = modules.get(key) || modules.get(`param ${key}`);
    const rows = choice ? [...layers.rows.values()].filter((row) => choice.of(row) !== null) : [];
    return rows.length > 1 ? [{ title, rows, series: rows.map(choice.of) }] : [];
  });
  $("depth-section").hidden = !charts.length;
  if (!charts.length) return;
  const at = [
    ...new Set(charts.flatMap(({ series }) => series.flatMap(({ steps }) => Array.from(steps)))),
  ].sort((a, b) => a - b);
  const slider = $("depth-step");
  [slider.max, slider.value] = [at.length - 1, at.length - 1];
  const shown = charts.map(({ title, rows, series }) => {
    const line = { steps: [], values: [] };
    const all = extremes(series.map(({ values }) => values));
    const own = new Chart({
      title,
      names: rows.map(({ name }) => name),
      lines: [{ label: title, series: line, points: rows.length <= 60 }],
      wide: all,
      height: 12,
      marks: rows.flatMap(({ findings }, i) =>
        findings.length ? [{ step: i, text: page.verdict.findings[findings[0]].code }] : [],
      ),
    });
    return { own, line, series };
  });
  $("depth").append(make("div.charts", {}, ...shown.map(({ own }) => own.box)));
  const slide = () => {
    const step = at[Number(slider.value)];
    slider.setAttribute("aria-valuetext", `step ${whole(step)}`);
    $("depth-at").textContent = `step ${whole(step)}`;
    for (const { own, line, series } of shown) {
      const found = series.map(({ steps }) => nearest(steps, step));
      line.steps = [...found.keys()].filter((i) => found[i] >= 0);
      line.values = line.steps.map((i) => series[i].values[found[i]]);
      if (own.plotted) {
        own.plotted.setData(own.read());
        own.tell(null);
      }
    }
  };
  slider.addEventListener("input", slide);
  slide();
}
