// The page from top to bottom.

/** Says that the run goes on, and when the page was last written; text has the rest. */
function showLive(page) {
  $("live").hidden = !page.every;
  if (!page.every) return;
  const written = page.written && new Date(page.written);
  const time = written && !Number.isNaN(+written) ? `, last written ${written.toLocaleTimeString()}` : "";
  $("live").textContent =
    `${$("facts").childElementCount ? "· " : ""}the run goes on: updates every ${short(page.every)} s${time}`;
}

async function show() {
  const page = await readPage($("data").textContent);
  $("plain").remove();
  timeline.full = timeline.range = stepsOf(page);
  for (const part of [
    showLive,
    showVerdict,
    showRun,
    (own) => layers.start(own),
    (own) => depth.start(own),
    showTime,
    showMemory,
    showRanks,
  ])
    part(page);
  $("zoom-out").addEventListener("click", () => timeline.zoom(...timeline.full));
  follow.restore();
  follow.start(page);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  preparePrint();
  document.body.dataset.ready = "yes";
}

/** Before printing, charts take the width and the colors of paper, and what is folded is opened. */
function preparePrint() {
  let opened = [];
  const before = () => {
    if (document.documentElement.dataset.print) return; // both events come
    document.documentElement.dataset.print = "yes";
    opened = [...document.querySelectorAll("#verdict details:not([open]), details.section:not([open])")];
    opened.forEach((node) => {
      node.open = true;
    });
    workOff();
    redraw();
  };
  const after = () => {
    delete document.documentElement.dataset.print;
    opened.forEach((node) => {
      node.open = false;
    });
    redraw();
  };
  addEventListener("beforeprint", before);
  addEventListener("afterprint", after);
  matchMedia("print").addEventListener("change", ({ matches }) => (matches ? before() : after()));
}

show();
