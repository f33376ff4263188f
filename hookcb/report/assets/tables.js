// A table behind each chart, made when it is opened.

const MAX_ROWS = 200;

function table(head, rows, caption = "", label = caption || "table") {
  const cells = (row) =>
    row.map((text, i) => (i ? make("td", {}, text) : make("th", { scope: "row" }, text)));
  return make(
    "div.scroll",
    { tabindex: "0", role: "group", "aria-label": label },
    make(
      "table",
      {},
      caption ? make("caption", {}, caption) : null,
      make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text)))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells(row)))),
    ),
  );
}

/** Every n-th of `rows`, such that at most `MAX_ROWS` remain, and a sentence that says so. */
function thinned(rows) {
  const every = Math.ceil(rows.length / MAX_ROWS);
  const said = every > 1 ? `Every ${every}th of ${whole(rows.length)} rows.` : "";
  return [rows.filter((_, i) => i % every === 0), said];
}

/** A fold that makes its content when it is first opened. */
function foldLater(title, content) {
  const node = fold(title);
  node.addEventListener("toggle", () => {
    if (node.open && node.childElementCount === 1) node.append(content());
  });
  return node;
}

/** The numbers of a chart: a column for each line, by step or place, and all of these in order. */
function gridOf({ lines: drawn, cells, names }) {
  const { lines } = cells || { lines: drawn };
  const columns = lines.map(
    ({ series }) => new Map(Array.from(series.steps, (step, i) => [step, series.values[i]])),
  );
  const places = [...new Set(columns.flatMap((column) => [...column.keys()]))].sort((a, b) => a - b);
  return { head: [names ? "layer" : "step", ...lines.map(({ label }) => label)], columns, places };
}

/** The table behind a chart. */
function tableOf(own) {
  const { title, names, format } = own;
  const node = foldLater("As a table", () => {
    const { head, columns, places } = gridOf(own);
    const [shown, said] = thinned(places);
    const rows = shown.map((at) => [
      names ? names[at] : whole(at),
      ...columns.map((column) => (column.has(at) ? format(column.get(at)) : "")),
    ]);
    return table(
      head,
      rows,
      `${title}. ${said}`.trim(),
    );
  });
  node.className = "behind";
  return node;
}
