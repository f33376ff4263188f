// Saving the numbers of a figure as CSV, and the figure as a picture that stands alone.

/** Buttons that save a figure with this title: `made` gives a Blob by kind, CSV or PNG. */
function saveButtons(title, made) {
  const buttons = Object.entries(made).map(([kind, content]) =>
    make(
      "button.link",
      {
        type: "button",
        "aria-label": `Save ${title} as ${kind}`,
        click: async () => saveAs(`${title}.${kind.toLowerCase()}`, await content()),
      },
      kind,
    ),
  );
  return make("span.save", {}, ...buttons.flatMap((button) => [button, " "]));
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

const csvBlob = (rows) =>
  new Blob([rows.map((row) => `${row.join(",")}\r\n`).join("")], { type: "text/csv;charset=utf-8" });

/** All numbers of a chart that the page has: a row for each step, a column for each line. */
function csvOf(own) {
  const { head, columns, places } = gridOf(own);
  const rows = places.map((at) => [
    own.names ? csvCell(own.names[at]) : at,
    ...columns.map((column) => csvNumber(column.get(at))),
  ]);
  return csvBlob([head.map(csvCell), ...rows]);
}

/** Numbers by name, a row for each. */
const csvByName = (columns, rows) =>
  csvBlob(
    [["layer", ...columns], ...rows].map(([name, ...own]) =>
      [name, ...own].map((x) => (typeof x === "number" ? csvNumber(x) : csvCell(x))),
    ),
  );

const usualFont = (px) => `${12 * px}px system-ui, sans-serif`;
const pixelsPerPx = () =>
  (devicePixelRatio * parseFloat(getComputedStyle(document.documentElement).fontSize)) / 16;

/** Name of the figure and of the run, over a picture. */
const headOf = (title, note, px) => [
  { text: title, font: `600 ${14 * px}px system-ui, sans-serif`, ink: color("--ink") },
  { text: [note, document.title.split(":")[0]].filter(Boolean).join(" · ") },
];

/**
 * A picture on the color of the page; `draw(pen, isReal)` gives its height without its edges, and draws if it is real.
 */
function picture(width, px, draw) {
  const canvas = make("canvas");
  const pen = canvas.getContext("2d");
  const edge = 12 * px;
  const height = draw(pen, edge, false);
  [canvas.width, canvas.height] = [width + 2 * edge, Math.ceil(height + edge)];
  pen.fillStyle = color("--paper");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  draw(pen, edge, true);
  return new Promise((done) => canvas.toBlob(done));
}

/** A chart as it is shown, with its title and its legend. */
function pictureOf(own) {
  workOff();
  const plot = own.plotted.ctx.canvas;
  const px = pixelsPerPx();
  const head = headOf(own.title, own.note, px);
  const key = [...(own.box.querySelector(".key")?.children || [])].map(partOf);
  const legend = [...own.legend.children].flatMap((item) => {
    const line = item.querySelector(".line");
    return [...(line ? [{ fill: getComputedStyle(line).backgroundColor }] : []), partOf(item)];
  });
  legend.push({ text: own.where.textContent.trim() });
  return picture(plot.width, px, (pen, edge, isReal) => {
    let y = edge;
    for (const parts of [head, key]) y = flow(pen, parts, edge, y, plot.width, px, isReal);
    if (isReal) pen.drawImage(plot, edge, y);
    if (isReal && !own.names) {
      pen.textAlign = "right";
      const below = (own.hasEpochs() ? 22 : 8) * px;
      flowText(pen, { text: "step" }, edge + plot.width, y + plot.height - below, px);
      pen.textAlign = "left";
    }
    return flow(pen, legend, edge, y + plot.height + 4 * px, plot.width, px, isReal);
  });
}

/** The layer map as it is shown, with its title and its colors. */
function pictureOfMap({ shown }, { choice, paint }, key) {
  const px = pixelsPerPx();
  const [name, strip, value, row] = [190, 600, 80, 18].map((x) => Math.round(x * px));
  const rows = shown.slice(0, Math.floor(15_000 / row)); // a canvas has an end
  rows.forEach(paint);
  const cutNote =
    rows.length < shown.length ? `the first ${whole(rows.length)} of ${whole(shown.length)} rows` : "";
  const head = headOf(choice.title, cutNote, px);
  const [first, last] = timeline.ends().map(whole);
  return picture(name + strip + value, px, (pen, edge, isReal) => {
    let y = edge;
    for (const parts of [head, key]) y = flow(pen, parts, edge, y, name + strip + value, px, isReal);
    if (!isReal) return y + rows.length * row + 20 * px;
    pen.imageSmoothingEnabled = false;
    for (const node of rows) {
      pen.textAlign = "left";
      flowText(
        pen,
        { text: cut(node.row.name || node.row.label, 28), ink: color("--ink") },
        edge,
        y + 13 * px,
        px,
      );
      pen.fillStyle = color("--missing");
      pen.globalAlpha = 0.4;
      if (choice.of(node.row) !== null) pen.fillRect(edge + name, y + 1, strip, row - 2);
      pen.globalAlpha = 1;
      pen.drawImage(node.querySelector("canvas"), edge + name, y + 1, strip, row - 2);
      pen.textAlign = "right";
      flowText(
        pen,
        { text: node.querySelector(".value").textContent },
        edge + name + strip + value,
        y + 13 * px,
        px,
      );
      y += row;
    }
    pen.textAlign = "left";
    if (!choice.isCost)
      flowText(
        pen,
        { text: `steps ${first} to ${last}; on the right, the latest` },
        edge + name,
        y + 14 * px,
        px,
      );
    return y + 20 * px;
  });
}

/** What a picture shows of an element of a legend. */
const partOf = (node) =>
  node instanceof HTMLCanvasElement
    ? { image: node }
    : { text: node.textContent.trim(), ink: getComputedStyle(node).color };

function flowText(pen, { text, font, ink }, x, y, px) {
  pen.font = font || usualFont(px);
  pen.fillStyle = ink || color("--soft");
  pen.fillText(text, x, y);
}

/** Draws parts beside one another, in lines of this width; returns where the next line begins. */
function flow(pen, parts, left, top, width, px, isReal) {
  let [x, y] = [left, top];
  for (const part of parts) {
    pen.font = part.font || usualFont(px);
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
