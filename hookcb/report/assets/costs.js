// Where time and memory go, and several ranks beside one another.

const SHOWN = 20; // bars shown at first

const sentences = (lines) => (lines.length ? list("ul", lines) : "");
const isDetail = (line) => line.startsWith("- "); // of the line above
const hasSteps = (series) => series && series.steps.length > 0;

/** Bars of numbers by name, the largest first; a table for eyes and for screen readers. */
function bars(title, columns, numbers, format) {
  const sum = (own) => own.reduce((total, x) => total + (x || 0), 0);
  const all = Object.entries(numbers)
    .sort(([, a], [, b]) => sum(b) - sum(a))
    .filter(([, own]) => sum(own) > 0);
  if (!all.length) return "";
  const most = sum(all[0][1]);
  const row = ([name, own]) => {
    const bar = make("div.bar", { "aria-hidden": "true" });
    own.forEach((x, i) => {
      const part = make("span");
      part.style.width = `${(100 * (x || 0)) / most}%`;
      part.style.background = `var(${paletteName(i)})`;
      bar.append(part);
    });
    return make(
      "tr",
      {},
      make("th", { scope: "row", title: name }, name || "(the model)"),
      make("td", {}, bar),
      make("td", {}, format(sum(own))),
    );
  };
  const key = make(
    "ul.legend",
    {},
    ...columns.map((column, i) => {
      const square = make("span.square", { "aria-hidden": "true" });
      square.style.background = `var(${paletteName(i)})`;
      return make("li", {}, square, column);
    }),
  );
  const head = make(
    "thead",
    {},
    make("tr", {}, ...["layer", "share", "total"].map((text) => make("th", { scope: "col" }, text))),
  );
  const body = make("tbody", {}, ...all.slice(0, SHOWN).map(row));
  const rest =
    all.length > SHOWN
      ? make(
          "button",
          {
            type: "button",
            click: (event) => {
              body.append(...all.slice(SHOWN).map(row));
              event.target.remove();
            },
          },
          `Show all ${whole(all.length)} layers`,
        )
      : "";
  const exact = foldLater("As a table", () => {
    const [shown, said] = thinned(all);
    return table(
      ["layer", ...columns],
      shown.map(([name, own]) => [name || "(the model)", ...columns.map((_, i) => format(own[i] || 0))]),
      `${title}. ${said}`.trim(),
    );
  });
  exact.className = "behind";
  return make(
    "div.bars",
    {},
    make("h3", {}, title),
    columns.length > 1 ? key : "",
    make("table", {}, head, body),
    rest,
    saveButtons(title, {
      CSV: () =>
        csvByName(
          columns,
          all.map(([name, own]) => [name || "(the model)", ...columns.map((_, i) => own[i] || 0)]),
        ),
    }),
    exact,
  );
}

function showTime({ time }) {
  const place = $("time");
  const phases = Object.entries(time?.phases || {}).filter(([, series]) => hasSteps(series));
  const isThere =
    time && (phases.length || time.slow.length || time.sentences.length || Object.keys(time.layers).length);
  $("time-section").hidden = !isThere;
  if (!isThere) return;
  place.append(sentences(time.sentences.filter((line) => !time.slow.length || !isDetail(line)))); // they are in the table
  if (phases.length) {
    const totals = new Map();
    for (const [, { steps, values }] of phases)
      steps.forEach((step, i) => totals.set(step, (totals.get(step) || 0) + (values[i] || 0)));
    const sorted = [...totals.values()].sort((a, b) => a - b);
    const usual = sorted[Math.floor(0.98 * (sorted.length - 1))];
    place.append(
      chart({
        title: "time of each step by phase",
        format: seconds,
        height: 13,
        stack: true,
        lines: phases.map(([label, series]) => ({ label, series })),
        top: sorted.at(-1) > 3 * usual ? 1.5 * usual : undefined,
      }),
    );
  }
  if (time.slow.length) {
    const rows = time.slow.map((own) => [
      whole(own.step),
      seconds(own.seconds),
      seconds(own.usual),
      own.phase,
      own.notes,
    ]);
    place.append(
      make("h3", {}, "Slow steps"),
      table(["step", "took", "usual", "most of it in", "what is known"], rows, "", "Slow steps"),
    );
  }
  const parts = Math.max(0, ...Object.values(time.layers).map((own) => own.length));
  place.append(bars("Time by layer", ["forward", "backward"].slice(0, parts), time.layers, seconds));
}

function showMemory({ memory }) {
  const place = $("memory");
  const isThere =
    memory && (hasSteps(memory.used) || memory.sentences.length || Object.keys(memory.layers).length);
  $("memory-section").hidden = !isThere;
  if (!isThere) return;
  place.append(sentences(memory.sentences));
  if (hasSteps(memory.used)) {
    place.append(
      chart({
        title: "memory in use",
        format: bytes,
        lines: [{ label: "after each watched step", series: memory.used }],
        height: 10,
      }),
    );
  }
  place.append(bars("Memory by layer", memory.columns, memory.layers, bytes));
}

function showRanks({ ranks }) {
  $("ranks-section").hidden = !ranks;
  if (!ranks) return;
  const place = $("ranks");
  const name = (rank) => `rank ${rank}${ranks.hosts[rank] ? ` (${ranks.hosts[rank]})` : ""}`;
  const said = `There are ${ranks.world} ranks; the rest of the page shows numbers of rank ${ranks.rank}.`;
  place.append(sentences(ranks.sentences.length ? ranks.sentences : [said]));
  for (const [phase, all] of Object.entries(ranks.phases)) {
    if (!all.some(hasSteps)) continue;
    const scale = colorScale(all.map(({ values }) => values));
    place.append(
      heatChart({
        title: `${phase}: time by rank`,
        note: "a row for each rank",
        painted: all,
        lines: all.map((series, rank) => ({ label: name(rank), series })),
        scale,
        format: seconds,
        yNames: all.map((_, rank) => String(rank)),
        range: [-0.5, all.length - 0.5],
        height: clamp(all.length * 1.4 + 2, 5, 20),
      }),
    );
  }
  const losses = ranks.loss.flatMap((series, rank) =>
    hasSteps(series) ? [{ label: name(rank), series }] : [],
  );
  if (losses.length) place.append(chart({ title: "loss by rank", lines: losses, height: 12 }));
}
