// The verdict: what is wrong, the series that shows it, why, and what to do next.

const SHOWN_FINDINGS = 5; // others are folded

/** The series that shows a finding, or null. */
function seriesOf(page, shown) {
  if (!shown) return null;
  const { of: group, name, stat } = shown;
  return (group === "run" ? page.run[name] || page.run[stat] : page[group]?.[name]?.stats[stat]) || null;
}

const placeOf = (finding) => finding.layer || finding.param;
/** A name that reads as a number gets the word before it: "layer 0.1". */
const asLayer = (name) => (/^\d+(\.\d+)*$/.test(name) ? `layer ${name}` : name);

function findingBox(page, finding, index, isMain) {
  const series = seriesOf(page, finding.shown_by);
  const place = placeOf(finding);
  const where =
    place && make("button.link", { type: "button", click: () => layers.choose(place, true) }, asLayer(place));
  const kind = finding.kind ? `(${finding.kind})` : "";
  const facts = [where, kind, finding.when, finding.on_ranks && `on ${finding.on_ranks}`]
    .filter(Boolean)
    .flatMap((part) => [part, " "]);
  const box = make(
    `article.finding.${finding.severity}`,
    { id: `finding-${index}` },
    make(
      "h2",
      {},
      make("span.badge", {}, finding.severity),
      " ",
      make("code", { title: `hookcb explain ${finding.code}` }, finding.code),
      " ",
      ...facts,
    ),
    make("p", {}, finding.message),
  );
  if (series && series.steps.length) {
    const { name, stat, limit } = finding.shown_by;
    const label = statName(stat, finding.shown_by.of === "params");
    const title = [label, name === stat ? "" : name].filter(Boolean).join(" of ");
    const marks = finding.step === null ? [] : [{ step: finding.step, text: `step ${whole(finding.step)}` }];
    box.append(chart({ title, lines: [{ label: title, series }], limit, marks, height: isMain ? 13 : 9 }));
  }
  const facet = (title, items, kindOfList) =>
    items.length ? make("div", {}, make("h3", {}, title), list(kindOfList, items)) : "";
  box.append(
    make(
      "div.facets",
      {},
      facet("Likely", finding.causes, "ul"),
      facet("Next", finding.next_steps, finding.next_steps.length > 1 ? "ol" : "ul"),
    ),
  );
  return box;
}

function showVerdict(page) {
  const { verdict } = page;
  const place = $("verdict");
  if (!verdict) return;
  const { findings } = verdict;
  const index = (finding) => findings.indexOf(finding);
  const causes = findings.filter((own) => !own.consequence_of);
  const effects = findings.filter((own) => own.consequence_of);
  const boxes = causes.map((own) => findingBox(page, own, index(own), index(own) === 0));
  place.append(...boxes.slice(0, SHOWN_FINDINGS));
  if (boxes.length > SHOWN_FINDINGS)
    place.append(fold(`More findings (${boxes.length - SHOWN_FINDINGS})`, ...boxes.slice(SHOWN_FINDINGS)));
  if (effects.length) {
    place.append(
      fold(
        `What follows from it (${effects.length})`,
        ...effects.map((own) => findingBox(page, own, index(own), false)),
      ),
    );
  }
  if (verdict.looked.length) {
    const ran = verdict.n_checks ? `; ${verdict.n_checked} of ${verdict.n_checks} checks ran` : "";
    place.append(make("p.looked", {}, make("b", {}, "Looked at: "), `${verdict.looked.join("; ")}${ran}.`));
  }
  if (verdict.ruled_out.length)
    place.append(fold(`Ruled out (${verdict.ruled_out.length})`, list("ul", verdict.ruled_out)));
  const gaps = verdict.gaps.map(({ codes, reason }) => [reason, codes.join(", ")]);
  if (gaps.length) {
    const n = verdict.gaps.reduce((sum, { codes }) => sum + codes.length, 0);
    place.append(
      fold(
        `Not looked at (${counted(n, "check")})`,
        table(["why", "checks"], gaps, "", "Checks that could not run"),
      ),
    );
  }
}

/** Findings with a step, as marks of a chart; `isNamed`: with their codes. */
function findingMarks(page, isNamed) {
  const all = (page.verdict?.findings || []).filter(({ step }) => step !== null);
  const byStep = Map.groupBy(all, ({ step }) => step);
  return [...byStep]
    .sort(([a], [b]) => a - b)
    .map(([step, found]) => ({
      step,
      text: isNamed ? [...new Set(found.map(({ code }) => code))].join(", ") : "",
    }));
}
