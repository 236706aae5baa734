import asyncio

import pytest

from backend.openai_frontend.errors import ApiError
from backend.openai_frontend.triton import Triton, _Texts
from tests.server.harness import free_ports


def test_a_triton_that_is_not_there_is_unavailable():
    async def ask():
        triton = Triton(f"127.0.0.1:{free_ports(1)[0]}", 4, {})
        try:
            with pytest.raises(ApiError) as raised:
                await triton.command("health")
            return raised.value
        finally:
            await triton.close()

    error = asyncio.run(ask())
    assert error.status == 503
    assert error.body()["error"]["type"] == "server_error"


@pytest.mark.parametrize(("count", "most"), [(1, 4), (4, 4), (5, 4), (50, 4), (9, 1)])
def test_the_texts_of_a_body_are_asked_for_as_places_come_free(count, most):
    async def ask():
        texts, asked, in_flight = _Texts(count, most), [], 0
        while True:
            while texts.has_next and (index := await texts.next()) is not None:
                asked.append(index)
                in_flight += 1
            assert in_flight <= most
            if not in_flight:
                return asked
            in_flight -= 1
            texts.ended()

    assert asyncio.run(ask()) == list(range(count))


def test_a_text_that_finds_the_queue_full_is_asked_for_again_once_another_has_ended():
    async def ask():
        texts = _Texts(3, 2)
        assert [await texts.next(), await texts.next()] == [0, 1]
        assert texts.put_off(1)
        assert not texts.has_next
        texts.ended()  # 0
        assert await texts.next() == 1
        assert not texts.put_off(1), "nothing of the body is in flight that could make a place"

    asyncio.run(ask())
