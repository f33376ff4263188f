"""Made-up evidence for the checks."""

from hookcb.diagnosis.measurements.loss import Loss
from hookcb.diagnosis.run import Param, Run, Series


def series(values, every=1):
    return Series.of(range(0, every * len(values), every), values)


def weight(name="body", kind="Linear", shape=(16, 16), **kwargs):
    """A weight of usual size; keywords are fields of `Param` or, if it has no such field, statistics."""
    given = {key: kwargs.pop(key) for key in list(kwargs) if key in Param.__dataclass_fields__}
    stats = {"weight_norm": [4.0] * 40, "clipped_norm": [1.0] * 40} | kwargs
    return Param(
        f"{name}.weight", name, kind, kind, 0, shape, 0,
        stats={stat: series(x) for stat, x in stats.items()}, **given,
    )  # fmt: skip


def gradient(name, place, rms=(1.0,) * 20, kind="Linear", shape=(8, 8), layer=None, **kwargs):
    """A weight with these gradients, at a place in the model; keywords are fields of `Param`."""
    stats = {"rms": series(rms), "norm": series([8 * x for x in rms])} | kwargs.pop("stats", {})
    return Param(
        f"{name}.weight", layer or name, kind, f"{kind} 8→8", place, shape, place, stats=stats, **kwargs
    )


def stack(factors, n=20):
    """Weights from the input to the head, with gradients of these sizes."""
    return [gradient(f"layers.{i}", i, [x] * n) for i, x in enumerate(factors)]


def evidence(*params, lr=0.1, loss=(), loss_kind="mse", **kwargs):
    """A run; keywords are attributes of `Loss`, or else fields of the run."""
    rates = series(lr if isinstance(lr, list) else [lr] * 40)
    named, of_loss = {p.name: p for p in params}, vars(Loss()).keys()
    about = {key: kwargs.pop(key) for key in list(kwargs) if key in of_loss}
    run = Run(params=named, lr=rates, loss=series(loss), **kwargs)
    return measured(run, Loss, kind=loss_kind, **about)


def measured(run, kind, /, **numbers):
    """The run, with these attributes of a measurement."""
    for name, value in numbers.items():
        setattr(run.measured(kind), name, value)
    return run


def only(check, given):
    (found,) = check().findings(given) if isinstance(check, type) else check(given)
    return found


FALLS = [1.0 - 0.015 * i for i in range(40)]
STAYS, RISES = [1.0] * 40, [1.0 + i for i in range(40)]
