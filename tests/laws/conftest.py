"""Every law runs on every front."""

import pytest

from tests.laws.fronts import FRONTS


@pytest.fixture(scope="session", params=FRONTS)
def front(request):
    return FRONTS[request.param]()
