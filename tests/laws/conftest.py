"""Every law runs on every front."""

import pytest

from tests.laws.fronts import FRONTS


@pytest.fixture(scope="module", params=FRONTS)
def front(request):
    if request.param == "jax":
        request.getfixturevalue("quick_compile")
    return FRONTS[request.param]()
