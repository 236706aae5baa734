"""Over the wire: a prompt served before finds its KV, a tenant of another salt does not, and no
text changes.
"""

from backend.sequence import BLOCK_TOKENS

BLOCKS = 6
PROMPT = ("a prompt that nobody else has, " * 10)[: BLOCKS * BLOCK_TOKENS] + "and more: go on"


def test_a_prompt_that_was_served_before_reuses_its_blocks_within_its_tenant(
    service, reference_text
):
    def counted():
        events = [
            service.metric("spindle_kv_block_events_total", event=event)
            for event in ("reused", "missed")
        ]
        return [*events, service.metric("spindle_kv_reused_tokens_total")]

    found = counted()
    for salt, reused in (
        (None, 0),
        (None, BLOCKS),
        ("tenant", 0),
        ("tenant", BLOCKS),
        ("other", 0),
    ):
        inputs = {"exclude_input_in_output": True} | ({} if salt is None else {"cache_salt": salt})
        status, reply = service.generate(PROMPT, 20, **inputs)
        assert (status, reply["text_output"]) == (200, reference_text(PROMPT, 20))
        expected = [found[0] + reused, found[1] + BLOCKS - reused, found[2] + BLOCK_TOKENS * reused]
        service.wait_until(lambda expected=expected: counted() == expected, 5)
        found = expected
