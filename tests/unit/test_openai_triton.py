import asyncio

import pytest

from backend.openai_frontend.errors import ApiError
from backend.openai_frontend.triton import Triton
from tests.server.harness import free_ports


def test_a_triton_that_is_not_there_is_unavailable():
    async def ask():
        triton = Triton(f"127.0.0.1:{free_ports(1)[0]}")
        try:
            with pytest.raises(ApiError) as raised:
                await triton.command("health")
            return raised.value
        finally:
            await triton.close()

    error = asyncio.run(ask())
    assert error.status == 503
    assert error.body()["error"]["type"] == "server_error"
