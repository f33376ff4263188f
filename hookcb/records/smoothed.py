"""Smoothed: exponential moving average of numbers, such as the losses of batches."""

BETA = 0.98  # weight of the past in the smoothed loss, as in fastai


class Smoothed:
    """Exponential moving average, corrected for its start at zero.

    Source: D. Kingma, J. Ba, "Adam", arxiv.org/abs/1412.6980, section 3.

    >>> smoothed = Smoothed(beta=0.5)
    >>> smoothed.add(3.0), smoothed.add(6.0)
    (3.0, 5.0)
    """

    def __init__(self, beta: float = BETA) -> None:
        self.beta, self._sum, self._weight = beta, 0.0, 0.0

    def add(self, value: float) -> float:
        """Adds a number; returns the average including it."""
        self._sum = self.beta * self._sum + (1 - self.beta) * value
        self._weight = self.beta * self._weight + (1 - self.beta)
        return self._sum / self._weight
