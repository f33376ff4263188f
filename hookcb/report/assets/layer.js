// The chosen layer: its curves, its histogram over time, its parameters.

const GROUPED = {
  __proto__: null,
  min: "smallest and largest",
  max: "smallest and largest",
};
for (const stat of SHARES) GROUPED[stat] = "share of the output";

/** Charts of the statistics of an output or of several parameters. */
function statCharts(recorded, marks, isOfParam) {
  const charts = new Map();
  const names = [...recorded.keys()];
  const shortNames = withoutPrefix(names);
  for (const stat of statsOf([...recorded.values()])) {
    const title = (!isOfParam && GROUPED[stat]) || statName(stat, isOfParam);
    const lines = names.flatMap((name, i) => {
      const series = recorded.get(name).stats[stat];
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

function histogramChart(hist, marks) {
  const { bins } = hist;
  const inner = bins.slice(1, -1);
  const { painted, scale, edge } = cellsOf(hist);
  const labels = inner.map((_, i) => `${edge(i)} to ${edge(i + 1)}`);
  const all = [`below ${edge(0)}`, ...labels, `above ${edge(inner.length)}`];
  const lines = bins.map((series, i) => ({ series, label: all[i] }));
  const box = heatChart({
    title: "histogram over time",
    note: "elements by value; top and bottom row: beyond the range",
    painted,
    lines,
    scale,
    format: whole,
    axisFormat: edge, // rows are of equal height
    range: [-1, inner.length + 1],
    marks,
    height: 21,
  });
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
    const hist = isCounted(row.layer.hist) ? [histogramChart(row.layer.hist, marks)] : [];
    const [charts, same] = statCharts(new Map([[row.name, row.layer]]), marks, false);
    section("Output", [...hist, ...charts], same);
  }
  const params = new Map(row.params.map((name) => [name, page.params[name]]));
  section(
    `Parameters: ${[...params]
      .map(([name, { about }]) => `${name.split(".").at(-1)} ${about}`.trim())
      .join(", ")}`,
    ...statCharts(params, marks, true),
  );
  $("said").textContent = `Curves of ${row.name || row.label} are shown.`;
}
