"""input.eval_scale: inputs of the validation that are prepared in another way than those of the training."""

import math
from collections.abc import Iterator

from hookcb.diagnosis.fault import Fault, Result, Site, fault
from hookcb.diagnosis.measurements.input_phases import LEVEL, Columns, InputPhases
from hookcb.diagnosis.rules import finite, format_factor, median
from hookcb.diagnosis.run import Absent, Passed, Run
from hookcb.diagnosis.verdict import Finding

MIN_ROWS = 16  # of each phase
MAX_FACTOR = 8.0  # between standard deviations
MIN_RAW_FACTOR, MIN_RAW_SHIFT = 1.7, 1.0  # if one of the two has the range of images that are not normalized
MAX_NORMAL_MEAN, NORMAL_STD = 0.1, (0.9, 1.1)  # of values that are normalized
MAX_NORMAL_FACTOR, MAX_NORMAL_SHIFT = 4.0, 4.0  # if those of the training are
MAX_ENDS_APART = 0.25  # of the ends of the range, in standard deviations: a linear map keeps them
MAX_SHIFT = 6.0  # standard deviations
RAW_ENDS = (1.0, 255.0)
MAX_RAW_LOW = 0.02  # share of the high end
MIN_IMAGES, MIN_SIGMAS = 32, 6.0  # for the difference between the first and the last channel
SWAPPED = 0.3  # of it, that is left if both are added
MAX_LEVEL_SHIFT = 0.5  # standard deviations of a noise level, beyond which the inputs may differ for it


@fault("input.eval_scale", Site.INPUT, needs="batch", leads_to="valid.*")
class OtherPreparation(Fault):
    """Inputs of the validation that are scaled, shifted or ordered in another way than those of the training.

    Formula: statistics of each column of a table or channel of images, in inspected training batches and in
    the first four batches of each validation, at least 16 rows of each. Found if the standard deviations
    differ by a factor of 8, of all values and in the median column; if means differ by 6 standard deviations
    and ranges do not overlap in most columns; if one of the two has the range of images that are not
    normalized, 0 to 1 or 0 to 255, and the other the same values scaled and shifted, by a factor of 1.7 or by
    a standard deviation; if those of the training are normalized (a mean within 0.1 of 0 and a standard
    deviation of 0.9 to 1.1, of all values or in most columns), and those of the validation differ by a factor
    of 4 in their standard deviation or by 4 standard deviations in the mean; or if the differences between
    the means of the first and the last of three channels are opposite, as of RGB and BGR, each 6 standard
    errors from 0. Not judged if the model is also given a number for each sample, as a noise level, and that
    differs too.

    Source: LeCun et al., Efficient BackProp, 1998, section 4.3, on a scale that inputs share. Augmentation
    changes standard deviations by up to a factor of 2, and drift over time means by up to 3.
    """

    headline = "Validation inputs are prepared differently"
    uses = (InputPhases,)
    severity = "warning"

    def findings(self, run: Run) -> Iterator[Result]:
        phases = run.measured(InputPhases)
        pairs = [
            (a, b)
            for key, a in phases.train.items()
            if not key.startswith(LEVEL)
            and (b := phases.valid.get(key)) is not None
            and min(a.n, b.n) >= MIN_ROWS
        ]
        depends = any(_shift(a, b) >= MAX_LEVEL_SHIFT for a, b in phases.levels)
        found = [] if depends else [x for a, b in pairs if (x := self._compared(a, b)) is not None]
        factors = [factor for a, b in pairs if (factor := _factor(a, b)) > 0]
        if found:
            yield found[0]
        elif not phases.valid:
            yield Absent("no validation was seen")
        elif not factors or depends:
            yield run.why_not("inputs of the validation that can be compared")
        else:
            value = max(max(x, 1 / x) for x in factors)
            yield Passed(f"inputs of the validation on another scale (factor {value:.2g})", value, MAX_FACTOR)

    def _compared(self, train: Columns, valid: Columns) -> Finding | None:
        factor, shift = _factor(train, valid), _shift(train, valid)
        far = max(factor, 1 / factor) if factor > 0 else 1.0
        numbers = (
            f"In training the inputs have a mean of {_mean(train):.3g} and a standard deviation of "
            f"{_std(train):.3g}, in validation {_mean(valid):.3g} and {_std(valid):.3g}"
        )
        if far >= MAX_FACTOR:
            return self._found(f"{numbers}, a factor of {format_factor(far)}", far, MAX_FACTOR)
        if shift >= MAX_SHIFT and _are_apart(train, valid):
            text = f"{numbers}; the means of most columns differ by {shift:.2g} standard deviations"
            return self._found(text, shift, MAX_SHIFT)
        is_far = far >= MIN_RAW_FACTOR or shift >= MIN_RAW_SHIFT
        if is_far and _is_raw(train) != _is_raw(valid) and _is_linear_map(train, valid):
            which = "training" if _is_raw(train) else "validation"
            text = f"{numbers}; the values of the {which} go from 0 to {_high(train, valid):g}"
            return self._found(text, far, MIN_RAW_FACTOR)
        if _is_normalized(train) and (far >= MAX_NORMAL_FACTOR or shift >= MAX_NORMAL_SHIFT):
            by_factor = far >= MAX_NORMAL_FACTOR
            text = f"{numbers}; those of the training are normalized, and those of the validation are not"
            value, limit = (far, MAX_NORMAL_FACTOR) if by_factor else (shift, MAX_NORMAL_SHIFT)
            return self._found(text, value, limit, "a normalization that only the training has")
        if _is_swapped(train, valid):
            text = (
                "The mean of the first channel less that of the last one is "
                f"{train.ends:+.2g} in training, and {valid.ends:+.2g} in validation"
            )
            return self._found(text, valid.ends, train.ends, "channels in another order, RGB and BGR")
        return None

    def _found(self, text: str, value: float, limit: float, cause: str = "") -> Finding:
        return self.finding(
            f"{text}: the validation measures the model on inputs that it was not trained for.",
            value=value,
            limit=limit,
            causes=(cause or "a normalization or a division by 255 that only one of the two has",),
            next_steps=("Normalize both in the same way; only augmentation belongs to the training alone",),
        )


def _factor(train: Columns, valid: Columns) -> float:
    """Standard deviation in validation / in training, the nearer to 1 of all values and the median column."""
    ratios = [
        b / a for a, b in zip(train.std, valid.std, strict=True) if 0 < a < math.inf and 0 < b < math.inf
    ]
    a, b = _std(train), _std(valid)
    if not ratios or not (0 < a < math.inf and 0 < b < math.inf):
        return math.nan
    return min((b / a, median(ratios)), key=lambda x: abs(math.log(x)))


def _shift(train: Columns, valid: Columns) -> float:
    """Difference of the means in the median column, in units of the larger standard deviation."""
    rows = zip(train.mean, valid.mean, train.std, valid.std, strict=True)
    return median([abs(a - b) / max(s, t) for a, b, s, t in rows if max(s, t) > 0])


def _are_apart(train: Columns, valid: Columns) -> bool:
    """Whether ranges do not overlap in most of several columns; a single one may be a series that drifts."""
    apart = [
        low > other_high or high < other_low
        for low, high, other_low, other_high in zip(train.low, train.high, valid.low, valid.high, strict=True)
    ]
    return len(apart) > 1 and 2 * sum(apart) > len(apart)


def _is_normalized(x: Columns) -> bool:
    """Whether values have the mean 0 and standard deviation 1 of a normalization, together or by columns."""
    low, high = NORMAL_STD
    by_column = [
        abs(mean) < MAX_NORMAL_MEAN and low < std < high for mean, std in zip(x.mean, x.std, strict=True)
    ]
    mean, squares = _mean(x), sum(m * m + s * s for m, s in zip(x.mean, x.std, strict=True)) / len(x.std)
    std = math.sqrt(max(0.0, squares - mean * mean))
    is_whole = abs(mean) < MAX_NORMAL_MEAN and low < std < high
    return is_whole or 2 * sum(by_column) > len(by_column)


def _is_raw(x: Columns) -> bool:
    """Whether the values have the range of images that are not normalized."""
    low, high = min(x.low), max(x.high)
    return any(0 <= low <= MAX_RAW_LOW * end and 0.95 * end <= high <= end for end in RAW_ENDS)


def _is_linear_map(train: Columns, valid: Columns) -> bool:
    """Whether both ends of the range are as far from the mean in both, in standard deviations."""
    for a, b in ((train.low, valid.low), (train.high, valid.high)):
        of_train = median([(x - m) / s for x, m, s in zip(a, train.mean, train.std, strict=True) if s > 0])
        of_valid = median([(x - m) / s for x, m, s in zip(b, valid.mean, valid.std, strict=True) if s > 0])
        if not abs(of_train - of_valid) <= MAX_ENDS_APART * max(1.0, abs(of_train)):
            return False
    return True


def _is_swapped(train: Columns, valid: Columns) -> bool:
    """Whether the first and the last of three channels have changed their places."""
    if min(train.n_images, valid.n_images) < MIN_IMAGES:
        return False
    is_clear = all(abs(x.ends) > MIN_SIGMAS * x.ends_error for x in (train, valid))
    return is_clear and abs(train.ends + valid.ends) <= SWAPPED * abs(train.ends)


def _mean(x: Columns) -> float:
    means = finite(x.mean)
    return sum(means) / len(means) if means else math.nan


def _std(x: Columns) -> float:
    """Standard deviation within columns."""
    return math.sqrt(sum(s * s for s in x.std) / len(x.std))


def _high(train: Columns, valid: Columns) -> float:
    return round(max((train if _is_raw(train) else valid).high))
