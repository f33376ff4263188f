"use strict";
// Paints the page from the data it holds. Text reaches the page only through textContent.

const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const NONFINITE = "#d55e00";
const $ = (id) => document.getElementById(id);

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

async function inflated(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

function seriesOf(numbers, [steps, values, n]) {
  return [Array.from(new Int32Array(numbers, 4 * steps, n)), Array.from(new Float32Array(numbers, 4 * values, n))];
}

function chart(place, title, [steps, values]) {
  const box = element("div", "", "chart");
  place.append(box);
  const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, size: 64 };
  const shown = values.map((x) => (Number.isFinite(x) ? x : null));
  const positive = shown.filter((x) => x !== null && x > 0);
  const spread = positive.length === shown.length && Math.max(...positive) > 100 * Math.min(...positive);
  const width = () => Math.max(240, Math.min(1200, place.clientWidth));
  const plot = new uPlot({
    title, width: width(), height: 220,
    scales: { x: { time: false }, y: { distr: spread ? 3 : 1 } },
    axes: [{ ...axis, label: "step", size: 40 }, axis],
    series: [{ label: "step" }, { label: title, stroke: color("--accent"), width: 1.5 }],
  }, [steps, shown], box);
  addEventListener("resize", () => plot.setSize({ width: width(), height: 220 }));
}

function showVerdict(verdict) {
  const place = $("verdict");
  for (const finding of verdict ? verdict.findings : []) {
    const box = element("div", "", `finding ${finding.severity}`);
    const when = finding.step === null ? "" : ` · from step ${finding.step}`;
    const where = finding.layer || finding.param;
    box.append(element("strong", `${finding.severity.toUpperCase()} ${finding.code} ${where}${when}`));
    box.append(element("p", finding.message));
    if (finding.causes.length) box.append(element("p", `Likely: ${finding.causes.join("; ")}.`));
    if (finding.next_steps.length) box.append(element("p", `Next: ${finding.next_steps[0]}.`));
    place.append(box);
  }
  for (const [title, lines] of verdict ? [["Ruled out", verdict.ruled_out], ["Looked at", verdict.coverage]] : []) {
    if (!lines.length) continue;
    const fold = element("details"), list = element("ul");
    fold.append(element("summary", `${title} (${lines.length})`), list);
    list.append(...lines.map((line) => element("li", line)));
    place.append(fold);
  }
}

function tint(share) {
  const at = Math.min(share * 4, 3.999), low = Math.floor(at);
  return `rgb(${VIRIDIS[low].map((c, i) => Math.round(c + (at - low) * (VIRIDIS[low + 1][i] - c)))})`;
}

function paint(canvas, [steps, values], [least, most], [first, last]) {
  const pen = canvas.getContext("2d"), cell = Math.max(1, canvas.width / Math.max(1, steps.length));
  values.forEach((x, i) => {
    pen.fillStyle = Number.isFinite(x) ? tint(most > least ? (x - least) / (most - least) : 0.5) : NONFINITE;
    const left = last > first ? (steps[i] - first) / (last - first) * (canvas.width - cell) : 0;
    pen.fillRect(left, 0, cell + 1, canvas.height);
  });
}

function ends(numbers) {
  return numbers.reduce(([a, b], x) => (Number.isFinite(x) ? [Math.min(a, x), Math.max(b, x)] : [a, b]),
    [Infinity, -Infinity]);
}

function showLayers(page, numbers) {
  const names = Object.keys(page.layers), place = $("layers");
  const stats = [...new Set(names.flatMap((name) => Object.keys(page.layers[name])))];
  $("stat").append(...stats.map((stat) => element("option", stat)));
  if (stats.includes("std")) $("stat").value = "std";
  const draw = () => {
    const stat = $("stat").value, wanted = $("find").value.toLowerCase();
    place.replaceChildren();
    const found = names.filter((name) => page.layers[name][stat] && name.toLowerCase().includes(wanted));
    const all = found.map((name) => seriesOf(numbers, page.layers[name][stat]));
    const range = ends(all.flatMap((series) => series[1])), span = ends(all.flatMap((series) => series[0]));
    found.forEach((name, i) => {
      const row = element("button", "", "strip"), canvas = element("canvas"), label = element("span", name);
      row.type = "button";
      row.setAttribute("aria-pressed", "false");
      label.title = `${name} ${page.kinds[name] || ""}`;
      [canvas.width, canvas.height] = [600, 1];
      row.append(label, canvas);
      row.addEventListener("click", () => choose(row, name));
      paint(canvas, all[i], range, span);
      place.append(row);
    });
    if (!found.length) place.append(element("p", "No layer to show.", "soft"));
    else place.append(element("p", `${stat}: dark ${range[0].toPrecision(3)} to bright ${range[1].toPrecision(3)}; ` +
      `steps ${span[0]} to ${span[1]}; orange: not finite`, "soft"));
  };
  const choose = (row, name) => {
    for (const other of place.querySelectorAll(".strip")) other.setAttribute("aria-pressed", `${other === row}`);
    $("layer").replaceChildren(element("h3", `${name} ${page.kinds[name] || ""}`));
    for (const [stat, at] of Object.entries(page.layers[name])) {
      if (at[2]) chart($("layer"), stat, seriesOf(numbers, at));
    }
  };
  $("stat").addEventListener("change", draw);
  $("find").addEventListener("input", draw);
  draw();
}

async function show() {
  const page = JSON.parse($("data").textContent);
  $("headline").textContent = page.headline;
  showVerdict(page.verdict);
  const numbers = await inflated(page.numbers);
  for (const [name, at] of Object.entries(page.run)) chart($("run"), name, seriesOf(numbers, at));
  if (!Object.keys(page.run).length) $("run").append(element("p", "No batch was recorded.", "soft"));
  showLayers(page, numbers);
  document.body.dataset.ready = "yes";
}

show();
