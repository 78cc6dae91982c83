"""Every law runs on every front."""

import pytest

from tests.laws.fronts import FRONTS


@pytest.fixture(scope="session", params=FRONTS)
def front(request):
    front = FRONTS[request.param]()
    if not hasattr(front.module, "microbatch"):
        pytest.skip("this front has no microbatch yet")
    return front
