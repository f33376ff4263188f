// Statistics by name: how they are called, and how they are grouped.

const STATS = {
  __proto__: null,
  std: "std",
  mean: "mean",
  min: "smallest",
  max: "largest",
  abs_max: "largest magnitude",
  near_zero: "near zero",
  zeros: "zeros",
  nonfinite: "NaN or inf",
  spread: "spread over the batch",
  saturated: "saturated",
  dead: "dead units",
  grad_nonfinite: "NaN or inf in the gradient",
  norm: "gradient norm",
  clipped_norm: "gradient norm after clipping",
  rms: "rms",
  kurtosis: "kurtosis",
  zero_rows: "rows without gradient",
  weight_norm: "weight norm",
  weight_mean: "weight mean",
  weight_std: "weight std",
  update_ratio: "update ratio",
  drift: "drift of the weight",
};
const GRADIENT = {
  __proto__: null,
  abs_max: "largest gradient",
  nonfinite: "NaN or inf in the gradient",
  rms: "gradient rms",
}; // of parameters
const SHARES = new Set(["near_zero", "zeros", "saturated", "dead", "zero_rows"]); // 0 to 1
const FIRST = ["std", "near_zero", "norm", "update_ratio", "dead"]; // those asked for most

const statName = (stat, isOfParam = false) =>
  (isOfParam && GRADIENT[stat]) || STATS[stat] || words(stat || "");

/** Names of the statistics that any of `recorded` has, those asked for most first. */
function statsOf(recorded) {
  const found = new Set(
    recorded.flatMap(({ stats }) => Object.keys(stats).filter((stat) => stats[stat].steps.length)),
  );
  const rank = (stat) => (FIRST.includes(stat) ? FIRST.indexOf(stat) : FIRST.length);
  return [...found].sort((a, b) => rank(a) - rank(b));
}

/** The largest of several series at each step. */
function largest(all) {
  if (all.length === 1) return all[0];
  const found = new Map();
  for (const { steps, values } of all) {
    steps.forEach((step, i) => {
      const old = found.get(step);
      found.set(step, old === undefined || !(values[i] <= old) ? values[i] : old);
    });
  }
  const at = Int32Array.from(found.keys()).sort();
  return { steps: at, values: Float32Array.from(at, (step) => found.get(step)) };
}

const isSame = (one, other) => one && other && String(one.values) === String(other.values);

function median(numbers) {
  const sorted = Array.from(numbers)
    .filter(Number.isFinite)
    .sort((a, b) => a - b);
  return sorted.length ? (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2 : NaN;
}
