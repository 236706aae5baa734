"""What a request's options mean, one token at a time and without the engines' code: the expectation of tests on the fake engine."""

import math

from backend.engines.fake import _UNLIKELY_LOGIT, ORDER, VOCAB_SIZE, _candidates

LETTER_LOGITS = [4.0 + math.log(share) for share in (0.6, 0.25, 0.1, 0.05)]


def changed(logits, context, prompt_tokens, options, temperature=1.0):
    """Return the logits [vocab] behind ``context`` as TensorRT-LLM's decoder would change them."""
    bias, emitted = dict(options.get("bias", ())), len(context) - prompt_tokens
    result = []
    for token, raw in enumerate(logits):
        logit = (raw + bias.get(token, 0.0)) / temperature
        count = context.count(token)
        if count:
            factor = options.get("repetition_penalty", 1.0)
            logit = logit * factor if logit < 0 else logit / factor
            logit -= options.get("presence_penalty", 0.0) + count * options.get("frequency_penalty", 0.0)
        too_early = token in options.get("end_ids", ()) and emitted < options.get("min_tokens", 0)
        text = [*context, token]
        bad = any(text[-len(word) :] == list(word) for word in options.get("bad_words", ()))
        result.append(-1e30 if too_early or bad else logit)
    return result


def greedy(prompt, max_tokens, **options):
    """Return the tokens that the fake target writes behind a prompt, their log-probabilities, and whether an end id ended them."""
    context = list(prompt.encode())
    prompt_tokens, log_probs = len(context), []
    while len(log_probs) < max_tokens:
        logits = [_UNLIKELY_LOGIT] * VOCAB_SIZE
        for letter, logit in zip(_candidates(b"target", bytes(context[-ORDER:])), LETTER_LOGITS, strict=True):
            logits[letter] = logit
        logits = changed(logits, context, prompt_tokens, options)
        token = logits.index(max(logits))
        context.append(token)
        log_probs.append(max(logits) - math.log(math.fsum(map(math.exp, logits))))
        if token in options.get("end_ids", ()):
            return context[prompt_tokens:], log_probs, True
    return context[prompt_tokens:], log_probs, False
