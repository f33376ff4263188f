// Saving the numbers of a chart as CSV, and the chart as a picture that stands alone.

/** Two buttons for a chart. */
function saveButtons(own) {
  const button = (kind, content) =>
    make(
      "button.link",
      {
        type: "button",
        "aria-label": `Save ${own.title} as ${kind}`,
        click: async () => saveAs(`${own.title}.${kind.toLowerCase()}`, await content(own)),
      },
      kind,
    );
  return make("span.save", {}, button("CSV", csvOf), " ", button("PNG", pictureOf));
}

function saveAs(name, blob) {
  const run = document.title.split(":")[0];
  const address = URL.createObjectURL(blob);
  const file = `${run} ${name}`.replace(/[^\p{L}\p{N}._-]+/gu, "-").slice(-120);
  make("a", { href: address, download: file.replace(/^[.-]+/, "") }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** A cell of a CSV file; a text that a spreadsheet would run as a formula gets a "'" before it. */
function csvCell(text) {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** A float32 with as few digits as tell it from all others, as Python writes it. */
function csvNumber(x) {
  if (x === undefined) return "";
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "nan" : x > 0 ? "inf" : "-inf";
  const digits = [6, 7, 8].find((n) => Math.fround(+x.toPrecision(n)) === Math.fround(x)) || 17;
  return String(+x.toPrecision(digits));
}

/** All numbers of a chart that the page has: a row for each step, a column for each line. */
function csvOf({ lines: drawn, cells, names }) {
  const { lines } = cells || { lines: drawn };
  const columns = lines.map(
    ({ series }) => new Map(Array.from(series.steps, (step, i) => [step, series.values[i]])),
  );
  const places = [...new Set(columns.flatMap((column) => [...column.keys()]))].sort((a, b) => a - b);
  const head = [names ? "layer" : "step", ...lines.map(({ label }) => label)].map(csvCell);
  const rows = places.map((at) => [
    names ? csvCell(names[at]) : at,
    ...columns.map((column) => csvNumber(column.get(at))),
  ]);
  return new Blob([[head, ...rows].map((row) => `${row.join(",")}\r\n`).join("")], {
    type: "text/csv;charset=utf-8",
  });
}

/** A chart as it is shown, with its title and its legend. */
function pictureOf(own) {
  workOff();
  const plot = own.plotted.ctx.canvas;
  const px = (devicePixelRatio * parseFloat(getComputedStyle(document.documentElement).fontSize)) / 16;
  const edge = 12 * px;
  const head = [
    { text: own.title, font: `600 ${14 * px}px system-ui, sans-serif`, ink: color("--ink") },
    { text: [own.note, document.title.split(":")[0]].filter(Boolean).join(" · ") },
  ];
  const key = [...(own.box.querySelector(".key")?.children || [])].map(partOf);
  const legend = [...own.legend.children].flatMap((item) => {
    const line = item.querySelector(".line");
    return [...(line ? [{ fill: getComputedStyle(line).backgroundColor }] : []), partOf(item)];
  });
  legend.push({ text: own.where.textContent.trim() });
  const canvas = make("canvas");
  const pen = canvas.getContext("2d");
  const draw = (isReal) => {
    let y = edge;
    for (const parts of [head, key]) y = flow(pen, parts, edge, y, plot.width, px, isReal);
    if (isReal) pen.drawImage(plot, edge, y);
    if (isReal && !own.names) {
      pen.textAlign = "right";
      flowText(pen, { text: "step" }, edge + plot.width, y + plot.height - 8 * px - (own.hasEpochs() ? 14 * px : 0), px);
      pen.textAlign = "left";
    }
    return flow(pen, legend, edge, y + plot.height + 4 * px, plot.width, px, isReal) + edge;
  };
  const height = draw(false);
  [canvas.width, canvas.height] = [plot.width + 2 * edge, Math.ceil(height)];
  pen.fillStyle = color("--paper");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  draw(true);
  return new Promise((done) => canvas.toBlob(done));
}

/** What a picture shows of an element of a legend. */
const partOf = (node) =>
  node instanceof HTMLCanvasElement
    ? { image: node }
    : { text: node.textContent.trim(), ink: getComputedStyle(node).color };

function flowText(pen, { text, font, ink }, x, y, px) {
  pen.font = font || `${12 * px}px system-ui, sans-serif`;
  pen.fillStyle = ink || color("--soft");
  pen.fillText(text, x, y);
}

/** Draws parts beside one another, in lines of this width; returns where the next line begins. */
function flow(pen, parts, left, top, width, px, isReal) {
  let [x, y] = [left, top];
  for (const part of parts) {
    pen.font = part.font || `${12 * px}px system-ui, sans-serif`;
    if (part.text === "") continue;
    const own = part.image ? 96 * px : part.fill ? 16 * px : pen.measureText(part.text).width;
    if (x > left && x + own > left + width) [x, y] = [left, y + 18 * px];
    if (isReal && part.image) pen.drawImage(part.image, x, y + 3 * px, own, 11 * px);
    else if (isReal && part.fill) {
      pen.fillStyle = part.fill;
      pen.fillRect(x, y + 7 * px, own, 3 * px);
    } else if (isReal) flowText(pen, part, x, y + 13 * px, px);
    x += own + (part.fill ? 6 : 14) * px;
  }
  return x > left ? y + 20 * px : y;
}
