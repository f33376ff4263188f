// The page from top to bottom.

function showHead(page) {
  const [, word, rest] = page.headline.match(/^([A-Z]+)(?= {2})(.*)$/s) || [null, "", page.headline];
  const status = word.toLowerCase();
  $("headline").replaceChildren(word && make(`span.status.${status}`, {}, word), rest);
  document.title = [page.title, status || "hookcb"].filter(Boolean).join(": ");
  const written = page.written && new Date(page.written);
  const facts = [
    page.title,
    page.n_batches ? counted(page.n_batches, "batch", "batches") : "",
    written && !page.every ? `written ${written.toLocaleString()}` : "",
    page.hookcb && `hookcb ${page.hookcb}`,
  ].filter(Boolean);
  $("facts").replaceChildren(...facts.flatMap((fact, i) => [i ? " · " : "", make("span", {}, fact)]));
}

/** Fills the page, whose sections are empty. */
function draw(page) {
  timeline.start(stepsOf(page));
  for (const part of [
    showHead,
    showVerdict,
    showRun,
    (own) => layers.start(own),
    (own) => depth.start(own),
    showTime,
    showMemory,
    showRanks,
    showConfig,
    showNotes,
  ])
    part(page);
  follow.tell(page);
}

const empty = document.querySelector("main").cloneNode(true);

/** Shows other data of the same run in place of those that are shown, and keeps the place. */
function drawAnew(page) {
  const state = follow.state();
  document.querySelector("main").replaceWith(empty.cloneNode(true));
  draw(page);
  follow.restore(state);
  for (const own of timeline.live()) if (isInSight(own.box)) own.draw(); // before the next frame
}

async function show() {
  const text = $("data").textContent;
  const page = await readPage(text);
  follow.live = JSON.parse(text).live;
  draw(page);
  $("zoom-out").addEventListener("click", () => timeline.zoom(...timeline.full));
  follow.restore(follow.kept());
  follow.start(page);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  preparePrint();
  document.body.dataset.ready = "yes";
}

/** Before printing, charts take the width and the colors of paper, and the verdict is opened. */
function preparePrint() {
  let opened = [];
  const before = () => {
    if (document.documentElement.dataset.print) return; // both events come
    document.documentElement.dataset.print = "yes";
    opened = [...document.querySelectorAll("#verdict details:not([open])")];
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
