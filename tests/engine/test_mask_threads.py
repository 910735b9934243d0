"""The number of threads that compute the masks of a call."""

import pytest

from peagle_jax.engine.structured.mask_threads import MaskThreads


@pytest.mark.parametrize(
    ("milliseconds", "num_requests", "count"),
    [
        (0.0, 64, 1),
        (0.1, 8, 1),
        (0.1, 32, 4),
        (9.0, 1, 1),
        (1.1, 2, 4),
        (3.0, 8, 32),
        (3.0, 256, 48),
    ],
)
def test_a_thread_is_woken_for_each_millisecond_of_masks(milliseconds, num_requests, count):
    threads = MaskThreads(48)
    threads.seconds_each = milliseconds / 1e3
    assert threads.count(num_requests) == count
