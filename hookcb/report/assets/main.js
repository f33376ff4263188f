// The page from top to bottom.

/** Draws what the text of the page has no place for. */
function draw(page) {
  $("plain").remove();
  timeline.start(stepsOf(page));
  for (const part of [
    showVerdict,
    showRun,
    (own) => layers.start(own),
    (own) => depth.start(own),
    showTime,
    showMemory,
    showRanks,
  ])
    part(page);
  follow.tell(page);
}

/** Shows newer data of the same run, with their text, and keeps the place unless there were none before. */
function drawAnew(page, { title, markup }) {
  const state = follow.page.n_batches ? follow.state() : null;
  const fresh = new DOMParser().parseFromString(markup, "text/html");
  for (const part of ["header", "main"])
    document.querySelector(`body > ${part}`).replaceWith(document.adoptNode(fresh.querySelector(part)));
  document.title = title;
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
