import asyncio
import json

import numpy as np
import pytest

from backend.openai_frontend.errors import ApiError
from backend.openai_frontend.front_end import FrontEnd
from backend.openai_frontend.routes import chat_of, completion_of, text_of
from backend.openai_frontend.template import ChatTemplate, EscapedPrompt
from backend.openai_frontend.triton import Triton, _Texts
from tests.fakes.chats import HEADERS, HI
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
            texts.free_place()

    assert asyncio.run(ask()) == list(range(count))


def test_a_text_that_finds_the_queue_full_is_asked_for_again_once_another_has_ended():
    async def ask():
        texts = _Texts(3, 2)
        assert [await texts.next(), await texts.next()] == [0, 1]
        assert texts.put_off(1)
        assert not texts.has_next
        texts.free_place()  # 0
        assert await texts.next() == 1
        assert not texts.put_off(1), "nothing of the body is in flight that could make a place"

    asyncio.run(ask())


FRONT_END = FrontEnd("", ("m",), ChatTemplate("<s>{{ messages[0].content }}"))


class Preprocessing(Triton):
    """A Triton that lists in ``asked`` what came to ``preprocessing``."""

    def __init__(self):
        self._special_tokens, self._letters, self.asked = {"<s>": 7}, {}, []

    async def _infer(self, model, values):
        self.asked.append(values.get("add_special_tokens"))
        names = {"INPUT_ID": [[7, 8]], "STOP_WORDS_IDS": [[[1, 2], [1, 2]]]}
        return Reply({name: np.array(value) for name, value in names.items()})


class Reply(dict):
    """Triton's result."""

    as_numpy = dict.get


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "a"}, None),
        ({"prompt": "a", "add_special_tokens": True}, True),
        ({"prompt": "a", "add_special_tokens": False}, False),
        ({"messages": HI}, False),
        ({"messages": HI, "add_special_tokens": False}, False),
    ],
)
def test_only_a_prompt_that_is_no_chat_gets_the_tokenizer_s_special_tokens(body, expected):
    triton = Preprocessing()
    text, special = text_of(FRONT_END, json.dumps(body).encode(), HEADERS)
    asyncio.run(triton.tokenize(text, add_special_tokens=special))
    route = chat_of if "messages" in body else completion_of
    answer = route(FRONT_END, json.dumps({"model": "m", **body}).encode(), HEADERS)
    assert asyncio.run(answer.tokens(triton)) == [[7, 8]]
    assert answer.options.get("add_special_tokens") is expected
    assert triton.asked == [expected if expected is None else [[expected]]] * 2


def test_special_tokens_of_a_chat_that_are_plain_text_come_without_others():
    triton = Preprocessing()
    prompt = EscapedPrompt("<s>", (("<s>", True),))
    assert asyncio.run(triton.tokenize(prompt, add_special_tokens=False)) == [1, 2, 8]
    assert triton.asked == [[[False]], None]


@pytest.mark.parametrize(("route", "more"), [(text_of, {}), (chat_of, {"model": "m"})])
def test_special_tokens_on_top_of_a_template_s_are_refused(route, more):
    body = json.dumps({"messages": HI, "add_special_tokens": True, **more}).encode()
    with pytest.raises(ApiError, match="the chat template writes all") as error:
        route(FRONT_END, body, HEADERS)
    assert error.value.param == "add_special_tokens"
