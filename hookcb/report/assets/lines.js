// Which records a line joins, and its smoothed form.

/** Whether steps may be those of the extremes of stretches, see `envelope` in data.py. */
const isThinned = (steps) => steps.length > 600 && steps.at(-1) - steps[0] >= steps.length;

/**
 * The largest distance of two records that a line joins: twice the most frequent one. Records that are farther apart,
 * as those of batches that are looked at ever more rarely, are points: nobody looked between them.
 */
function reachOf(steps) {
  const n = steps.length - 1;
  if (isThinned(steps)) return (6 * (steps[n] - steps[0])) / n; // the extremes of a stretch are anywhere in it
  const counts = new Map();
  for (let i = 0; i < n; i += 1) {
    const gap = steps[i + 1] - steps[i];
    counts.set(gap, (counts.get(gap) || 0) + 1);
  }
  const [[usual] = [1]] = [...counts].sort(([gap, n], [other, m]) => m - n || gap - other);
  return 2 * usual;
}

/** Where a line is cut, as pairs of steps, and the steps of records that it joins to no other. */
function cutsOf({ steps, values }, isDrawn, reach = reachOf(steps)) {
  const found = { cuts: [], lone: new Set() };
  let last = -1; // the drawn record before
  for (let i = 0; i < steps.length; i += 1) {
    if (!isDrawn(values[i])) continue;
    if (last >= 0 && last === i - 1 && steps[i] - steps[last] <= reach) found.lone.delete(steps[last]);
    else {
      if (last >= 0) found.cuts.push([steps[last], steps[i]]);
      found.lone.add(steps[i]);
    }
    last = i;
  }
  return found;
}

/**
 * The exponential moving average with this weight of the past, corrected for its start at zero, as TensorBoard draws
 * it; what is not finite stays, and does not count.
 */
function smoothed(values, weight) {
  let [sum, known] = [0, 0];
  return Array.from(values, (x) => {
    if (!Number.isFinite(x)) return x;
    sum = weight * sum + (1 - weight) * x;
    known = weight * known + (1 - weight);
    return sum / known;
  });
}
