// Reading the data that the page holds, see `PageData` in data.py.

/** The fields of a text of `to_text`, and a function that gives `{steps, values}` for a series in them. */
async function unpacked(text) {
  const packed = JSON.parse(text);
  const fields = JSON.parse(new TextDecoder().decode(await inflated(packed.content)));
  const numbers = joined(await inflated(packed.numbers));
  const views = new Map(); // steps that are alike are one array
  const series = ([steps, values, n]) => {
    const key = `${steps}:${n}`;
    if (!views.has(key)) views.set(key, summed(new Int32Array(numbers, 4 * steps, n)));
    return { steps: views.get(key), values: new Float32Array(numbers, 4 * values, n) };
  };
  return [fields, series];
}

/** The page with its series. */
async function readPage(text) {
  const [page, series] = await unpacked(text);
  const byName = (group) => mapped(group, series);
  const recorded = (own) => ({
    ...own,
    stats: byName(own.stats),
    hist: own.hist && { ...own.hist, bins: own.hist.bins.map(series) },
  });
  page.run = byName(page.run);
  page.epochs = byName(page.epochs);
  page.layers = mapped(page.layers, recorded);
  page.params = mapped(page.params, recorded);
  if (page.time) {
    page.time.phases = byName(page.time.phases);
    page.time.layers = mapped(page.time.layers);
  }
  if (page.memory) {
    page.memory.used = series(page.memory.used);
    page.memory.layers = mapped(page.memory.layers);
  }
  if (page.ranks) {
    page.ranks.loss = page.ranks.loss.map(series);
    page.ranks.phases = mapped(page.ranks.phases, (ranks) => ranks.map(series));
  }
  return page;
}

/** First and last step of everything that was recorded. */
function stepsOf(page) {
  const recorded = [...Object.values(page.layers), ...Object.values(page.params)].map((own) => own.stats);
  const all = [page.run, page.epochs, ...recorded].flatMap(Object.values).filter((own) => own.steps.length);
  const first = all.reduce((least, { steps }) => Math.min(least, steps[0]), Infinity);
  const last = all.reduce((most, { steps }) => Math.max(most, steps.at(-1)), page.n_batches - 1);
  return Number.isFinite(first) ? [first - 0.5, last + 0.5] : [0, 1]; // room for whole cells
}

/** Numbers of 4 bytes from planes: the first bytes of all, the second bytes, and so on. */
function joined(planes) {
  const bytes = new Uint8Array(planes),
    n = bytes.length / 4;
  const numbers = new Uint8Array(bytes.length);
  for (let i = 0; i < bytes.length; i += 1) numbers[4 * (i % n) + Math.floor(i / n)] = bytes[i];
  return numbers.buffer;
}

/** Steps from their differences. */
function summed(differences) {
  let sum = 0;
  return differences.map((difference) => (sum += difference));
}
