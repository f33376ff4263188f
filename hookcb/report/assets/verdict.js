// The verdict: its text is there; here it gets the figures, and layers that can be clicked.

/** The series that shows a finding, or null. */
function seriesOf(page, shown) {
  if (!shown) return null;
  const { of: group, name, stat } = shown;
  return (group === "run" ? page.run[name] || page.run[stat] : page[group]?.[name]?.stats[stat]) || null;
}

/** The chart that proves a finding: of its own numbers, or else of the series that shows it; "" if there is none. */
function proofOf(page, finding, isMain) {
  const height = isMain ? 12 : 9;
  if (finding.figure) {
    const { title, lines, names, limit } = finding.figure;
    const at = names.findIndex((name) => name === finding.param || name === finding.layer);
    const step = names.length ? at : finding.step;
    return chart({
      title,
      lines: lines.map(({ label, places, values }) => ({
        label,
        series: { steps: places, values: values.map(Number) },
        points: true,
      })),
      names: names.length ? names : null,
      limit,
      marks: step === null || step < 0 ? [] : [{ step, text: names[step] ?? `step ${whole(step)}` }],
      height,
    });
  }
  const series = seriesOf(page, finding.shown_by);
  if (!series?.steps.length) return "";
  const { name, stat, limit } = finding.shown_by;
  const label = statName(stat, finding.shown_by.of === "params");
  const title = [label, name === stat ? "" : name].filter(Boolean).join(" of ");
  const marks = finding.step === null ? [] : [{ step: finding.step, text: `step ${whole(finding.step)}` }];
  return chart({ title, lines: [{ label: title, series }], limit, marks, height });
}

function showVerdict(page) {
  const place = $("verdict");
  if (!page.verdict) return;
  const { findings } = page.verdict;
  for (const node of place.querySelectorAll(".drawn")) {
    const index = Number(node.dataset.finding);
    node.replaceWith(proofOf(page, findings[index], findings[index].code === page.verdict.primary?.code));
  }
  for (const link of place.querySelectorAll("[data-layer]"))
    link.addEventListener("click", (event) => {
      event.preventDefault();
      layers.choose(link.dataset.layer, true);
    });
  const copy = make("button.copy", { type: "button" }, "Copy as Markdown");
  copy.addEventListener("click", async () => {
    copy.textContent = (await copied(markdownOf(page))) ? "Copied" : "The browser does not allow it";
  });
  place.append(copy);
}

/** The verdict as Markdown, for an issue or a chat. */
function markdownOf({ headline, verdict }) {
  const box = ({ severity, headline: name, code, layer, param, when, message, causes, next_steps: steps }) =>
    [
      `- **${severity}: ${name || code}** (\`${code}\`) ${layer || param ? `\`${layer || param}\` ` : ""}${when}`,
      `  ${message}`,
      ...causes.map((cause) => `  - Likely: ${cause}`),
      ...steps.map((step) => `  - Next: ${step}`),
    ].join("\n");
  const [word, rest] = headline.split(/ {2}(.*)/s);
  const looked = verdict.looked.length ? [`Looked at: ${verdict.looked.join("; ")}.`] : [];
  return [rest ? `**${word}** ${rest}` : headline, ...verdict.findings.map(box), ...looked].join("\n\n");
}

/** Puts text on the clipboard; false if the browser refuses. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", { class: "sr", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    return isDone;
  }
}

/** Findings with a step, as marks of a chart; `isNamed`: with what they say. */
function findingMarks(page, isNamed) {
  const all = (page.verdict?.findings || []).filter(({ step }) => step !== null);
  const byStep = Map.groupBy(all, ({ step }) => step);
  return [...byStep]
    .sort(([a], [b]) => a - b)
    .map(([step, found]) => ({
      step,
      text: isNamed ? [...new Set(found.map(({ headline, code }) => headline || code))].join(", ") : "",
    }));
}
