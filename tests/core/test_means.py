"""Running means by name."""

from __future__ import annotations

from shoal.core.means import Means


def test_each_name_has_the_mean_of_its_own_numbers_since_the_last_time():
    means = Means()
    assert not means
    means.add({"loss": 1.0, "lag": 4.0})
    means.add({"loss": 2.0})
    assert means
    assert means.take() == {"loss": 1.5, "lag": 4.0}
    assert not means
    means.add({"loss": 7.0})
    assert means.take() == {"loss": 7.0}
    assert means.take() == {}
