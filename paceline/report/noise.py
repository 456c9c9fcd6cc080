"""Whether a mean reward has changed, or only been measured twice: means with their standard errors, and how they are compared.

The prompt is the unit of all of it, because the answers to one prompt resemble each other: a mean over 8 prompts with 8 answers
each is known about as well as 8 independent values, not 64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev
from typing import NamedTuple

BEYOND_NOISE = 2.0
"""A difference counts as a change if it is larger than this many standard errors."""


class Mean(NamedTuple):
    """A mean over prompts."""

    value: float
    standard_error: float
    """Standard error of the mean; 0 if there is only one prompt."""
    num_prompts: int

    @property
    def sum_of_squares(self) -> float:
        """Sum of the squared distances of the prompts' values from the mean."""
        return self.standard_error * self.standard_error * self.num_prompts * (self.num_prompts - 1)


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of one value per prompt."""
    deviation = stdev(values) if len(values) > 1 else 0.0
    return Mean(math.fsum(values) / len(values), deviation / math.sqrt(len(values)), len(values))


def joined(means: Sequence[Mean]) -> Mean:
    """The mean over the prompts of several means, such as those of some steps."""
    count = sum(mean.num_prompts for mean in means)
    value = sum(mean.num_prompts * mean.value for mean in means) / count
    squares = sum(mean.sum_of_squares + mean.num_prompts * (mean.value - value) * (mean.value - value) for mean in means)
    return Mean(value, math.sqrt(squares / (count * (count - 1))) if count > 1 else 0.0, count)


def standard_errors_between(first: Mean, last: Mean) -> float:
    """The difference of two means in units of its standard error; 0 if they are equal.

    The standard error is the one that the difference would have if all values were drawn from one distribution:
    sqrt(s² (1/n₁ + 1/n₂)), with the variance s² of all values together. It is not 0 if the values of either mean are all equal,
    as those of two prompts often are.
    """
    both = joined([first, last])
    if first.value == last.value or not 0 < both.standard_error < math.inf:
        return 0.0
    error = both.standard_error * math.sqrt(both.num_prompts * (1 / first.num_prompts + 1 / last.num_prompts))
    return (last.value - first.value) / error


def paired_standard_errors(differences: Sequence[float]) -> float:
    """The mean of the differences of each prompt's values in units of its standard error; 0 if there is no difference. Problems
    differ much more from each other than one does from itself, so this tells smaller changes from noise.

    The standard error is the one that the mean would have if every difference were as likely to have the opposite sign:
    sqrt(sum of d²) / n.
    """
    squares = math.sqrt(sum(difference * difference for difference in differences))
    return sum(differences) / squares if 0 < squares < math.inf else 0.0
