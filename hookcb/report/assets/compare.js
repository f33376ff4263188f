// Runs beside one another, see `Comparison._content` in compare.py.

async function readComparison(text) {
  const [data, series] = await unpacked(text);
  for (const group of ["curves", "layers"]) data[group] = mapped(data[group], (runs) => runs.map(series));
  return data;
}

/** Charts of series, in each of which every run has a line. */
function comparedCharts(group, names, title) {
  const charts = Object.entries(group).map(([name, runs]) => {
    const lines = runs.map((series, i) => ({ label: names[i], series }));
    const few = Math.max(...runs.map(({ steps }) => steps.length)) < 50;
    return chart({ title: title(name), lines: lines.map((line) => ({ ...line, points: few })), height: 13 });
  });
  return make("div.charts", {}, ...charts);
}

function showDepartures(data) {
  const place = $("departures");
  if (!data.departures.flat().length) {
    place.append(make("p", {}, `${data.headline}.`));
    return;
  }
  data.departures.forEach((lines, i) => {
    const name = data.names[i + 1];
    if (!lines.length) place.append(make("p.soft", {}, `${name}: no layer departs from ${data.names[0]}.`));
    else place.append(make("h3", {}, `${name}, from ${data.names[0]}`), list("ol", lines.slice(0, 10)));
    if (lines.length > 10) place.append(fold(`${lines.length - 10} more`, list("ul", lines.slice(10))));
  });
  place.append(comparedCharts(data.layers, data.names, (name) => name));
}

async function show() {
  const data = await readComparison($("data").textContent);
  const steps = [...Object.values(data.curves), ...Object.values(data.layers)]
    .flat()
    .flatMap((series) => (series.steps.length ? [series.steps[0], series.steps.at(-1)] : []));
  if (steps.length) timeline.full = timeline.range = [Math.min(...steps) - 0.5, Math.max(...steps) + 0.5];
  $("headline").textContent = data.headline;
  $("facts").textContent = `${counted(data.names.length, "run")}: ${data.names.join(", ")}`;
  document.title = data.names.join(", ");
  const looked = data.verdicts.map(([headline, seen], i) => [data.names[i], headline, seen || "–"]);
  $("verdict").append(table(["run", "verdict", "looked at"], looked, "", "verdicts"));
  const ratio = `${data.names.at(-1)} / ${data.names[0]}`;
  const figures = data.figures.map(([name, ...rest]) => [runName(name), ...rest]);
  $("figures").append(table(["", ...data.names, ratio], figures, "", "figures"));
  showDepartures(data);
  const curves = comparedCharts(data.curves, data.names, runName);
  if (curves.childElementCount) $("run").append(switches.of([...curves.children]), curves);
  else $("run").append("No batch was recorded.");
  switches.restore(switches.state);
  const differences = data.differences.map(([section, key, ...values]) => [`${section}: ${key}`, ...values]);
  $("config").append(
    differences.length
      ? table(["", ...data.names], differences, "", "differences of configuration")
      : "Nothing that was recorded differs.",
  );
  $("zoom-out").addEventListener("click", () => timeline.zoom(...timeline.full));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.body.dataset.ready = "yes";
}

show();
